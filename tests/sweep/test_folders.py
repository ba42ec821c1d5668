"""What run folders say, and when they contradict the sweep."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import PortsConfig
from megatron_rl.launcher.run_folder import Beginning, check_run_folder
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, seal
from megatron_rl.protocol.metrics import RESUMED
from megatron_rl.sweep.folders import FAILURE, State, check_folders, state_of
from megatron_rl.sweep.plan import PlannedRun
from tests.sweep.places import SWEEP, plan_of


def save_config(run: PlannedRun, ports: PortsConfig | None = None) -> None:
    """As the launcher of the run saves it: with ports."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    saved = run.config.model_copy(update={"ports": ports or PortsConfig(prompts=4711)})
    (run.run_dir / "config.toml").write_text(dump_toml(saved))


def save_summary(run: PlannedRun, steps: int) -> None:
    summary = {"steps": steps, "accuracy_after": None}
    (run.run_dir / "summary.json").write_text(json.dumps(summary))


def test_states_follow_what_a_run_leaves(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    assert state_of(run) is State.NEW
    save_config(run)
    assert state_of(run) is State.STARTED
    (run.run_dir / FAILURE).write_text("exit code 1: no memory\n")
    assert state_of(run) is State.FAILED
    save_summary(run, 2)  # of 3
    assert state_of(run) is State.FAILED
    save_summary(run, 3)
    assert state_of(run) is State.COMPLETE


def test_steps_before_the_checkpoint_of_another_run_count(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    save_config(run)
    save_summary(run, 1)  # of 3
    row = {"source": "launch", "time": 1.0, RESUMED: 1, "checkpoint": "other/step_000002"}
    for step, state in ((1, State.STARTED), (2, State.COMPLETE)):
        (run.run_dir / "metrics.jsonl").write_text(json.dumps(row | {"step": step}) + "\n")
        assert state_of(run) is state


def test_a_summary_that_was_cut_short_is_named(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    save_config(run)
    (run.run_dir / "summary.json").write_text('{"steps": 3,')
    with pytest.raises(InputError, match=r"cannot read .*seed-0/summary\.json: .* move it away"):
        state_of(run)


def test_a_run_of_several_hosts_is_complete_by_its_summary_as_any_other(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    save_config(run, PortsConfig(host="10.0.0.7"))
    # All of its steps and its last evaluation: not yet what a run leaves at its end.
    rows = [
        {"source": "trainer", "step": k, "time": k, "train/loss": 0.0, "weight_sync/s": 0.1}
        for k in (1, 2, 3)
    ]
    rows.append({"source": "queue", "step": 3, "time": 9, "label": "after", "eval/accuracy": 0.5})
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run.run_dir / "metrics.jsonl").write_text(text)
    assert state_of(run) is State.STARTED
    save_summary(run, 3)
    assert state_of(run) is State.COMPLETE


def test_a_changed_variant_is_refused_with_the_keys_and_the_fix(tmp_path: Path) -> None:
    for run in plan_of(tmp_path).runs[:2]:
        save_config(run)
    check_folders(plan_of(tmp_path).runs)
    changed = plan_of(tmp_path, SWEEP.replace("optimizer.lr=0.5", "optimizer.lr=0.75"))
    with pytest.raises(InputError) as caught:
        check_folders(changed.runs)
    message = str(caught.value)
    assert "high seed 0: optimizer.lr was 0.5, is 0.75\n" in message
    assert "low" not in message and "high seed 1" not in message
    assert "--sweep-dir" in message and str(changed.runs[1].run_dir) in message


def test_more_steps_are_no_contradiction_where_a_checkpoint_is(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    save_config(run)
    longer = plan_of(tmp_path, SWEEP, "train.steps=9").runs
    with pytest.raises(InputError, match="low seed 0: train.steps was 3, is 9"):
        check_folders(longer)
    partial = run.run_dir / CHECKPOINTS / "step.partial"
    partial.mkdir(parents=True)
    (partial / "queue.json").write_text("{}")
    seal(partial, 3, {})
    check_folders(longer)
    with pytest.raises(InputError, match="train.steps was 3, is 2"):
        check_folders(plan_of(tmp_path, SWEEP, "train.steps=2").runs)


def test_a_run_that_begins_at_the_checkpoint_of_the_base_is_taken_up_again(tmp_path: Path) -> None:
    partial = tmp_path / "other" / CHECKPOINTS / "step.partial"
    partial.mkdir(parents=True)
    (partial / "queue.json").write_text("{}")
    other = seal(partial, 1, {})
    runs = plan_of(tmp_path, SWEEP, f"checkpoint.resume={other}").runs
    run = runs[0]
    assert check_run_folder(run.config) == Beginning(other)
    save_config(run)
    assert state_of(run) is State.STARTED
    check_folders(runs)
    # The sweep repeats the command, which begins there again until the run has a checkpoint.
    assert check_run_folder(run.config) == Beginning(other, is_again=True)
    shutil.copytree(other, run.run_dir / CHECKPOINTS / other.name)
    shutil.rmtree(tmp_path / "other")
    own = run.run_dir / CHECKPOINTS / other.name
    assert check_run_folder(run.config) == Beginning(own, is_again=True)


def test_absolute_and_relative_paths_are_the_same_place(tmp_path: Path) -> None:
    run = plan_of(tmp_path, SWEEP, "model.path=here/model").runs[0]
    save_config(run)
    check_folders(plan_of(tmp_path, SWEEP, f"model.path={Path.cwd()}/here/model").runs)
    with pytest.raises(InputError, match="model.path = there/model: there is no such folder"):
        check_folders(plan_of(tmp_path, SWEEP, "model.path=there/model").runs)


@pytest.mark.parametrize("text", ["sft.dataset=", "sft.dataset=''"])
def test_a_run_without_a_path_of_the_base_is_no_other_run(tmp_path: Path, text: str) -> None:
    sweep = SWEEP.replace("[[", f'overrides = ["{text}", "model.megatron_path="]\n[[', 1)
    run = plan_of(tmp_path, sweep).runs[0]
    save_config(run)
    check_folders(plan_of(tmp_path, sweep).runs)
    with pytest.raises(InputError, match=r"sft.dataset was None, is .*/answers\.jsonl"):
        check_folders(plan_of(tmp_path, SWEEP, "sft.dataset=answers.jsonl").runs)


def test_a_symbolic_link_is_the_place_that_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    # examples/launch.sh gives --model without links.
    save_config(plan_of(tmp_path, SWEEP, f"model.path={tmp_path}/real/model").runs[0])
    check_folders(plan_of(tmp_path, SWEEP, f"model.path={tmp_path}/link/model").runs)


def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    run = plan_of(tmp_path).runs[0]
    run.run_dir.mkdir(parents=True)
    (run.run_dir / "config.toml").write_text("[gone]\nkey = 1\n")
    with pytest.raises(InputError, match="is of another version: .*\n.*unknown key 'gone'"):
        check_folders(plan_of(tmp_path).runs)
