"""The cold start with real processes: chosen by evaluation, killed, on two nodes (processes)."""

import json
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.config.files import load_run
from megatron_rl.launcher.run_folder import locked
from megatron_rl.protocol.checkpoint_folder import SFT_CHECKPOINTS, complete_checkpoints
from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end.commands import launched, wait_until, write_inputs

pytestmark = [pytest.mark.slow(150), pytest.mark.exhaustive, pytest.mark.timeout(400)]
ADDRESS = "127.0.0.2"
SFT_STEPS, HELD_OUT = 24, 48
CONFIG = f"""
[model]
path = "FOLDER/model"
dtype = "float32"
[sft]
dataset = "FOLDER/sft.jsonl"
steps = {SFT_STEPS}
batch_size = 8
optimizer = {{lr = 1e-2, warmup_steps = 2}}
[train]
steps = 1
prompts_per_batch = 2
group_size = 4
[sampling]
max_new_tokens = 8
[queue]
max_staleness = 1
[generator]
engine = "hf"
max_running = 16
kv_tokens = 2048
context_tokens = 64
[render]
system_prompt = ""
[eval]
prompts = {HELD_OUT}
temperature = 1.0
samples = 1
[reward]
length_margin_tokens = 2
[reward.tasks.any_text]
format_check = "none"
compare = "exact"
[expert]
train.batch_timeout_s = 60
generator.max_restarts = 0
weights.deadline_s = 20
[[prompts]]
path = "FOLDER/prompts.jsonl"
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model, prompts, SFT examples and configuration."""
    folder = tmp_path_factory.mktemp("cold")
    write_inputs(folder, CONFIG, train=100, held_out=HELD_OUT)
    # Right and wrong ones, so that rewards differ after the cold start too.
    examples = [
        {
            "messages": [{"role": "user", "content": f"{number}="}],
            "response": "1" if number % 2 else "21",
        }
        for number in range(100 + HELD_OUT)
    ]
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, examples)))
    return folder


def sft_steps(run_dir: Path) -> list[int]:
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [row["step"] for row in rows if row["source"] == "sft"]


def test_training_begins_with_the_best_model_of_the_cold_start(
    inputs: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    arguments = ["--config", inputs / "config.toml", "--run-dir", run_dir]
    with launched("run", *arguments, "sft.export_every_steps=21") as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    accuracy = {}
    for step in (21, 24):
        records = read_jsonl(run_dir / "rollouts" / f"eval_cold_start_step_{step}.jsonl")
        assert len(records) == HELD_OUT
        accuracy[step] = sum(record["reason"] == "correct" for record in records) / HELD_OUT
    best = 24 if accuracy[24] > accuracy[21] else 21
    choice = json.loads((run_dir / "summary.json").read_text())["cold_start"]
    assert choice["chosen_step"] == best
    found = {step: one["accuracy"] for step, one in choice["candidates"].items()}
    assert found == {str(step): pytest.approx(value) for step, value in accuracy.items()}
    assert choice["ahead_of_next_best"] == pytest.approx(abs(accuracy[21] - accuracy[24]))
    assert f"chosen            step {best}, " in output and "combined standard errors" in output
    weights = [
        (run_dir / "hf" / name / "model.safetensors").read_bytes()
        for name in ("cold_start", "cold_start_step_21", "cold_start_step_24")
    ]
    assert weights[0] == weights[1 if best == 21 else 2] and weights[1] != weights[2]
    # The very weights that the trainer loads and syncs.
    log = (run_dir / "logs" / "launch.log").read_text()
    assert f"megatron_rl.trainer.train --config {run_dir}/config.toml" in log
    assert f"model.path={json.dumps(str(run_dir / 'hf' / 'cold_start'))}" in log


@pytest.mark.exhaustive
def test_a_killed_run_goes_on_in_its_cold_start_and_never_repeats_it(
    inputs: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    arguments = ["run", "--config", inputs / "config.toml", "--run-dir", run_dir]
    arguments += ["sft.checkpoint_every_steps=4", "sft.steps=60"]
    with launched(*arguments) as run:
        wait_until(lambda: bool(complete_checkpoints(run_dir / SFT_CHECKPOINTS)), run)
        run.kill()
        run.communicate(timeout=200)
    # Its processes, which notice soon, hold the lock until then.
    with locked(run_dir):
        pass
    newest = max(complete_checkpoints(run_dir / SFT_CHECKPOINTS))
    assert newest < 60 and not (run_dir / "hf" / "cold_start").exists()
    with launched(*arguments) as run:
        wait_until((run_dir / "hf" / "cold_start").exists, run)
        run.kill()
        first, _ = run.communicate(timeout=200)
    text = f"except for its cold start, which resumes after step {newest} of 60"
    assert text in first
    assert sft_steps(run_dir) == list(range(1, 61))
    exported = (run_dir / "hf" / "cold_start" / "model.safetensors").stat().st_ino
    with launched(*arguments) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert any(text in output for text in KEPT) and "supervised" not in output
    assert (run_dir / "hf" / "cold_start" / "model.safetensors").stat().st_ino == exported
    assert sft_steps(run_dir) == list(range(1, 61))
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 1


KEPT = ("except for its cold start, which is complete", "The queue continues its ledger")
"""What a start says: the queue has a ledger if it had begun when its launcher was killed."""


def host_arguments(run_dir: Path, host: int) -> list[object]:
    return ["node", run_dir, "--node", host, "--nodes", 3, "--gpus-per-node", 1]


@pytest.mark.exhaustive
def test_two_nodes_of_a_trainer_share_the_cold_start(inputs: Path, tmp_path: Path) -> None:
    # The third host has the generator.
    run_dir = tmp_path / "run"
    prepare = ["prepare", "--config", inputs / "config.toml", "--run-dir", run_dir,
               f"ports.host={ADDRESS}", "parallel.data=2", "sft.checkpoint_every_steps=8",
               "eval.prompts=0"]  # fmt: skip
    with launched(*prepare) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    with launched(*host_arguments(run_dir, 0)) as first, launched(*host_arguments(run_dir, 1)) as _:
        wait_until((run_dir / "hf" / "cold_start").exists, first)
    assert sft_steps(run_dir) == list(range(1, SFT_STEPS + 1))
    outputs = {path.name for path in (run_dir / "logs").glob("sft*.out")}
    assert outputs == {"sft.out", "sft-node-1.out"}
    with launched(*prepare) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0 and any(text in output for text in KEPT), output
    assert {path.name for path in (run_dir / "hf").iterdir()} == {"cold_start"}
    with (
        launched(*host_arguments(run_dir, 0)) as first,
        launched(*host_arguments(run_dir, 1)) as second,
        launched(*host_arguments(run_dir, 2)) as third,
    ):
        for host in (first, second, third):
            output, _ = host.communicate(timeout=150)
            assert host.returncode == 0, output
    assert sft_steps(run_dir) == list(range(1, SFT_STEPS + 1))
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if row["source"] == "trainer" and "train/loss" in row] == [
        1
    ]
    assert (run_dir / "hf" / "final" / "config.json").exists()


@pytest.mark.exhaustive
def test_a_host_whose_cold_start_dies_ends_with_its_error(inputs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with launched("prepare", "--config", inputs / "config.toml", "--run-dir", run_dir,
                  f"ports.host={ADDRESS}", "sft.steps=100000") as run:  # fmt: skip
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    with launched(*host_arguments(run_dir, 0)) as host:
        wait_until(lambda: len(sft_steps(run_dir)) > 2, host)
        children = psutil.Process(host.pid).children(recursive=True)
        [rank] = [
            child
            for child in children
            if "megatron_rl.trainer.sft" in child.cmdline()
            and "megatron_rl.trainer.torchrun" not in child.cmdline()
        ]
        rank.kill()
        output, _ = host.communicate(timeout=200)
    assert host.returncode == 1 and "sft ended with" in output, output
    assert not any(child.is_running() for child in children)


def evaluated(run_dir: Path) -> list[str]:
    """Labels of the evaluations whose figures are known, in their order."""
    rows = read_jsonl(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []
    return [row["label"] for row in rows if "eval/accuracy" in row]


def two_nodes(run_dir: Path, host: int) -> list[object]:
    # The first has the trainer and the queue, the second one the generator.
    return ["node", run_dir, "--node", host, "--nodes", 2, "--gpus-per-node", 1]


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_two_nodes_choose_train_and_baseline_and_go_on_when_one_died(
    inputs: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    prepare = ["prepare", "--config", inputs / "config.toml", "--run-dir", run_dir,
               f"ports.host={ADDRESS}", "sft.export_every_steps=21", "sft.baseline=true",
               "expert.nodes.silence_timeout_s=4", "train.minibatches=2"]  # fmt: skip
    with launched(*prepare) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    with launched(*two_nodes(run_dir, 0)) as first, launched(*two_nodes(run_dir, 1)) as second:
        wait_until((run_dir / "logs" / "queue-cold_start_step_24.out").exists, first)
        children = psutil.Process(first.pid).children(recursive=True)
        second.kill()
        killed_at = time.monotonic()
        output, _ = first.communicate(timeout=200)
        # Silent for 4 s, then its own processes ended.
        assert time.monotonic() - killed_at < 100
        assert first.returncode == 1 and "node 1 has been silent for 4 s" in output, output
        assert not any(child.is_running() for child in children)
    assert evaluated(run_dir) == ["cold_start_step_21"]
    with launched(*prepare) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0 and "starts again, except for its cold start" in output, output
    with launched(*two_nodes(run_dir, 1)) as second, launched(*two_nodes(run_dir, 0)) as first:
        for host in (first, second):
            output, _ = host.communicate(timeout=300)
            assert host.returncode == 0, output
    # Nothing was done twice.
    assert sft_steps(run_dir) == list(range(1, SFT_STEPS + 1))
    assert evaluated(run_dir) == [
        "cold_start_step_21", "cold_start_step_24", "before", "after", "sft_baseline",
    ]  # fmt: skip
    summary = json.loads((run_dir / "summary.json").read_text())
    accuracy = {}
    for step in (21, 24):
        records = read_jsonl(run_dir / "rollouts" / f"eval_cold_start_step_{step}.jsonl")
        accuracy[step] = sum(record["reason"] == "correct" for record in records) / HELD_OUT
    best = 24 if accuracy[24] > accuracy[21] else 21
    assert summary["cold_start"]["chosen_step"] == best and summary["steps"] == 1
    assert summary["sft_baseline_accuracy"] is not None
    chosen, baseline, final = (
        (run_dir / "hf" / name / "model.safetensors").read_bytes()
        for name in ("cold_start", "sft_baseline", "final")
    )
    candidate = run_dir / "hf" / f"cold_start_step_{best}" / "model.safetensors"
    assert chosen == candidate.read_bytes() and len({chosen, baseline, final}) == 3
    outputs = {path.name for path in (run_dir / "logs").glob("verifier-1*.out")}
    assert outputs == {f"verifier-1{phase}.out" for phase in (
        "", "-cold_start_step_21", "-cold_start_step_24", "-sft_baseline",
    )}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("given", "tags", "format_check", "opening"),
    [
        ("auto", ("<think>", "</think>"), "think_box", "<think>"),
        ('{open = "(", close = ")"}', ("(", ")"), "think_box", "("),
        ("none", ("", ""), "box", "<think>"),
    ],
)
def test_each_way_to_think_is_taught_and_trained(
    inputs: Path, tmp_path: Path, given: str, tags: tuple[str, str], format_check: str, opening: str
) -> None:
    examples = tmp_path / "sft.jsonl"
    answers = [{"messages": [{"role": "user", "content": f"{number}="}],
                "response": f"<think>7</think>\\boxed{{{1 + number % 2}}}"}
               for number in range(100)]  # fmt: skip
    examples.write_text("\n".join(map(json.dumps, answers)))
    run_dir = tmp_path / "run"
    arguments = ["--config", inputs / "config.toml", "--run-dir", run_dir, "train.steps=2"]
    arguments += [f'sft.dataset="{examples}"', "sft.steps=40", "eval.prompts=0"]
    arguments += ["sampling.max_new_tokens=12", f"render.thinking={given}"]
    with launched("run", *arguments, "reward.tasks.any_text.format_check=auto") as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0, output
    assert f"format checks: any_text {format_check}; thoughts" in " ".join(output.split())
    saved = load_run(run_dir)
    assert (saved.render.thinking.open, saved.render.thinking.close) == tags
    assert saved.reward.format_checks["any_text"] == format_check
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "train/loss" in row and row["source"] == "trainer"] == [
        1, 2,
    ]  # fmt: skip
    trained = [
        record
        for path in (run_dir / "rollouts").glob("step_*.jsonl")
        for record in read_jsonl(path)
    ]
    assert len(trained) == 2 * 8
    assert sum(record["text"].startswith(opening) for record in trained) >= 12
    # What the cold start taught is what the format check accepts.
    assert any(record["reason"] == "correct" for record in trained)
