"""An audit holds on sound records, and names the rule that each change breaks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config
from megatron_rl.observe.audit import audit_records
from megatron_rl.observe.audit_figures import step_figures
from megatron_rl.observe.audit_findings import SHOWN, WHOLE, Findings
from megatron_rl.observe.facts import run_facts
from megatron_rl.observe.summary import RunFacts, summarize
from megatron_rl.observe.summary_text import render_text
from megatron_rl.protocol.metrics import RESUMED
from megatron_rl.protocol.rollout_files import RolloutRecord

REWARDS = {"step_000000": [[1.0, 0.1], [0.1, 1.0]], "step_000001": [[1.0, 1.0], [0.1, 0.1]],
           "dropped_000001": [[1.0, 1.0]]}  # fmt: skip


def line(group: int, index: int, reward: float, version: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt_id": f"p{group}", "group": group, "index": index, "task": "math", "problem": "q",
        "language": "", "text": "t", "answer": "1", "reward": reward,
        "parts": {"format": 0.1, "correct": reward - 0.1},
        "reason": "correct" if reward == 1.0 else "wrong_answer", "tokens": 4 + index,
        "versions": [version], "finish_reason": "stop", "seed": 0, "prompt_tail": "",
        "spans": [[version, 0, 4 + index]],
    } | more  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metrics() -> list[dict[str, Any]]:
    """Rewards of step 1: 1, 0.1, 0.1, 1; of step 2: 1, 1, 0.1, 0.1, and 1, 1 that were dropped."""
    common = {
        "source": "trainer", "time": 9.0, "train/loss": 0.1, "queue/rollouts_trained": 4.0,
        "queue/groups_trained": 2.0, "queue/rollouts_spanning_versions": 0.0,
        "rollout/length_tokens": 4.5, "rollout/format": 1.0, "rollout/truncated": 0.0,
        "reward/format": 0.1, "reason/wrong_answer": 2.0,
    }  # fmt: skip
    return [
        common
        | {"step": 1, "rollout/reward": 0.55, "rollout/correct": 0.5, "reward/correct": 0.45,
           "reason/correct": 2.0, "queue/groups_dropped_zero_variance": 0.0,
           "queue/staleness_versions_max": 0.0, "queue/staleness_versions_mean": 0.0},
        # Groups 2 and 3 were made by versions 0 and 1.
        common
        | {"step": 2, "rollout/reward": 0.7, "rollout/correct": 4 / 6, "reward/correct": 0.6,
           "reason/correct": 4.0, "queue/groups_dropped_zero_variance": 1.0,
           "queue/staleness_versions_max": 1.0, "queue/staleness_versions_mean": 0.5},
        {"source": "queue", "time": 9.0, "step": 2, "label": "after", "eval/accuracy": 0.5,
         "eval/accuracy_se": 0.5, "eval/n": 2, "eval/format": 1.0, "eval/length_tokens": 4.5,
         "eval/reward": 0.55, "eval/seconds": 1.0},
    ]  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two steps of two groups of two, one zero-variance group dropped, one evaluation of two
    prompts."""
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    config = Config.model_validate(
        {"run": {"dir": folder}, "queue": {"record_tokens": False, "strict_staleness": True,
                                           "max_staleness": 1},
         "train": {"steps": 2, "prompts_per_batch": 2, "group_size": 2}}
    )  # fmt: skip
    (folder / "config.toml").write_text(dump_toml(config))
    group = 0
    for name, groups in REWARDS.items():
        lines = []
        for rewards in groups:
            more = {"dropped": "zero_variance"} if name.startswith("dropped") else {}
            # The second step is made by the version before it and by its own.
            version = 0 if group < 3 else 1
            lines += [line(group, i, reward, version, **more) for i, reward in enumerate(rewards)]
            group += 1
        write(folder / "rollouts" / f"{name}.jsonl", lines)
    write(
        folder / "rollouts" / "eval_after.jsonl",
        [line(9, i, reward, 2, prompt_id=f"e{i}") for i, reward in enumerate((1.0, 0.1))],
    )
    rows = metrics()
    write(folder / "metrics.jsonl", rows)
    # Of step 1 two of 4 rollouts are correct, of step 2 with its dropped group four of 6.
    facts = RunFacts(max_staleness=1, sampled_accuracy=(0.5, 4 / 6))
    (folder / "summary.json").write_text(json.dumps(summarize(rows, facts)))
    (folder / "hf" / "final").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / "hf" / "final" / name).write_text("{}")
    return folder


def audited(folder: Path) -> Findings:
    return audit_records(folder, lambda done, total: None)


def test_sound_records_hold(run_dir: Path) -> None:
    findings = audited(run_dir)
    assert findings.is_sound, findings
    looked_at = {name: rule.looked_at for name, rule in findings.rules.items()}
    # 10 rollouts of 5 groups in 3 files; of each step 15 figures: 6 of queue/, 5 of rollout/, 2
    # parts of the reward, 2 reasons.
    assert looked_at["a reward is the sum of its parts"] == 10
    assert looked_at["a group has one prompt"] == 5
    assert looked_at["metrics of a step match its rollouts"] == 30
    assert looked_at["no rollout is staler than queue.max_staleness"] == 2
    assert looked_at["accuracies match recorded completions"] == 5
    # 2 steps and the evaluation.
    assert looked_at[WHOLE] == 3
    # A checkpoint that is being written has no list of files yet.
    (run_dir / "checkpoints" / "step_000002.partial").mkdir(parents=True)
    assert audited(run_dir).is_sound


def test_staleness_is_that_of_the_oldest_token_and_a_cached_share_that_of_later_replies() -> None:
    turns = [
        {"start": at, "end": at + 1, "follows": at - 1, "given": [], "text": "", "asked_s": 0.0,
         "replied_s": 0.0, "before": 4 + 4 * at, "cached": 6 * at} for at in (0, 1)
    ]  # fmt: skip
    spans = [[0, 0, 2], [1, 2, 4]]
    old = line(0, 0, 1.0, 0, versions=[0, 1], spans=spans, is_outcome=True, conversation=turns)
    records = msgspec.convert([old, line(0, 1, 0.1, 1)], list[RolloutRecord])
    figures = step_figures(1, records, [])
    assert figures["queue/staleness_versions_max"] == 1
    assert figures["queue/staleness_versions_mean"] == 0.5
    # The second reply was given 8 tokens, of which 6 were in the cache.
    assert figures["environment/cached_share"] == 0.75


def test_a_run_may_begin_at_a_checkpoint_of_another_one(run_dir: Path) -> None:
    first = {"source": "launch", "time": 1.0, "step": 1, RESUMED: 1, "checkpoint": "x/step_000001"}
    (run_dir / "rollouts" / "step_000000.jsonl").unlink()
    rows = [first, *metrics()[1:]]
    write(run_dir / "metrics.jsonl", rows)
    facts = RunFacts(max_staleness=1, sampled_accuracy=(4 / 6, 4 / 6))
    summary = summarize(rows, facts)
    # It was started once.
    assert (summary["steps"], summary["resumes"]) == (1, 0)
    assert "starts" not in render_text(summary | {"wall_s": {"rl": 1.0}}, facts)
    (run_dir / "summary.json").write_text(json.dumps(summary))
    findings = audited(run_dir)
    assert findings.is_sound, findings
    # A resume from its own checkpoint comes after rows, and excuses no lost step.
    write(run_dir / "metrics.jsonl", [metrics()[2] | {"step": 0, "label": "before"}, *rows])
    text = audited(run_dir).rules[WHOLE].examples[0]
    assert "no row of 1 of 2 steps, the first is 1" in text


def test_versions_of_chats_that_waited_at_the_same_time_have_no_order(run_dir: Path) -> None:
    # Two chats of two replies each, between which the weights changed.
    spans = [[0, 0, 1], [1, 2, 3], [0, 4, 5], [1, 6, 7]]
    chats = {"spans": spans, "prompt_tokens": 3, "versions": [0, 1], "tokens": 7}
    for row_starts, broken in (([], 1), ([6], 0), ([7], 0), ([8], 1)):
        change = lambda rows, starts=row_starts: rows[2].update(chats, row_starts=starts)  # noqa: E731
        change_lines("rollouts/step_000001.jsonl", change)(run_dir)
        rule = audited(run_dir).rules["versions of a rollout only rise"]
        assert rule.broken == broken, row_starts


@pytest.mark.parametrize(("begin", "broken"), [(2, 1), (3, 0)])
def test_a_version_has_one_span_unless_tokens_were_given_in_between(
    run_dir: Path, begin: int, broken: int
) -> None:
    change_lines("rollouts/step_000000.jsonl", _swap("spans", [[0, 0, 2], [0, begin, 4]]))(run_dir)
    assert audited(run_dir).rules["versions of a rollout only rise"].broken == broken


def test_a_completion_of_which_nothing_is_left_has_no_token_ids(run_dir: Path) -> None:
    path = run_dir / "config.toml"
    path.write_text(path.read_text().replace("record_tokens = false", "record_tokens = true"))
    rule = "token ids and logprobs match their lines"
    assert audited(run_dir).rules[rule].broken == len(REWARDS)
    nothing = {"tokens": 0, "spans": [], "versions": [], "reward": None, "parts": {}}
    lost = line(4, 1, 0.1, 1, dropped="environment_failed") | nothing
    write(run_dir / "rollouts" / "dropped_000001.jsonl", [lost])
    assert audited(run_dir).rules[rule].broken == len(REWARDS) - 1


def test_thinned_tokens_are_told_and_break_no_rule(run_dir: Path) -> None:
    path = run_dir / "config.toml"
    path.write_text(path.read_text().replace("record_tokens = false", "record_tokens = true"))
    for name in REWARDS:
        change_lines(f"rollouts/{name}.jsonl", lambda rows: [r.update(words=[0, 2]) for r in rows])(
            run_dir
        )
    for before, broken in ((1, 2), (2, 0)):
        (run_dir / "rollouts/tokens_thinned.json").write_text(json.dumps({"before_step": before}))
        findings = audited(run_dir)
        # Of step 1 two files are lost, unless it is thinned too.
        assert sum(rule.broken for name, rule in findings.rules.items() if "ids" in name) == broken
        assert sum("tokens thinned" in text for text in findings.skipped) == 1
    assert findings.is_sound
    assert findings.rules["a reward is the sum of its parts"].looked_at == 10


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [("queue.max_staleness", "max_staleness = 1", "max_staleness = 0"),
     ("queue.record_tokens", "record_tokens = false", "record_tokens = true"),
     ("train.group_size", "group_size = 2", "group_size = 3")],
)  # fmt: skip
def test_each_part_of_a_run_is_judged_by_its_configuration(
    run_dir: Path, key: str, old: str, new: str
) -> None:
    path = run_dir / "config.toml"
    text = path.read_text()
    assert text.count(old) == 1
    if key == "train.group_size":
        # A larger limit excuses no earlier step: its group has three.
        extra = line(0, 2, 0.1, 0)
        change_lines("rollouts/step_000000.jsonl", lambda rows: rows.append(extra))(run_dir)
    path.write_text(text.replace(old, new))
    broken = {}
    for step in (1, 2):
        resumed = {"source": "launch", "time": 9.0, "step": step, RESUMED: 1}
        write(run_dir / "metrics.jsonl", [*metrics()[:step], resumed, *metrics()[step:]])
        (run_dir / f"config.until_step_00000{step}.toml").write_text(text)
        findings = audited(run_dir)
        assert not any("unknown configuration" in text for text in findings.skipped)
        broken[step] = {
            name: rule.broken
            for name, rule in findings.rules.items()
            if rule.broken and name.startswith(("no rollout", "token ids", "a group has each"))
        }
        (run_dir / f"config.until_step_00000{step}.toml").unlink()
    # The second step is trained after a resume at step 1, and before one at step 2.
    assert (
        broken
        == {
            "queue.max_staleness": {1: {"no rollout is staler than queue.max_staleness": 1}, 2: {}},
            "queue.record_tokens": {1: {"token ids and logprobs match their lines": 2}, 2: {}},
            "train.group_size": {n: {"a group has each rollout once": 1} for n in (1, 2)},
        }[key]
    )
    # Nothing is judged by a configuration that was not kept.
    findings = audited(run_dir)
    assert any("unknown configuration, such as step 1" in text for text in findings.skipped)


def change_lines(name: str, change: Callable[[list[dict]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        rows = [json.loads(text) for text in path.read_text().splitlines()]
        change(rows)
        write(path, rows)

    return apply


def _swap(key: str, value: Any, at: int = 0) -> Callable[[list[dict]], None]:
    return lambda rows: rows[at].update({key: value})


def test_the_bound_of_a_summary_is_the_largest_of_all_resumes(run_dir: Path) -> None:
    path = run_dir / "config.toml"
    text = path.read_text()
    (run_dir / "config.until_step_000002.toml").write_text(text)
    path.write_text(text.replace("max_staleness = 1", "max_staleness = 0"))
    resumed = {"source": "launch", "time": 9.0, "step": 2, RESUMED: 1}
    rows = [*metrics(), resumed]
    write(run_dir / "metrics.jsonl", rows)
    summary = summarize(rows, run_facts(load_config(path), run_dir, {}))
    assert (summary["staleness_max"], summary["max_staleness"]) == (1.0, 1)
    (run_dir / "summary.json").write_text(json.dumps(summary))
    findings = audited(run_dir)
    assert findings.is_sound, findings


def test_figures_of_an_earlier_end_do_not_belong_into_the_summary(run_dir: Path) -> None:
    first, second, after = metrics()
    baseline = after | {"step": 0, "label": "sft_baseline"}
    rows = [first, after | {"step": 1}, baseline, second]
    records = run_dir / "rollouts"
    (records / "eval_sft_baseline.jsonl").write_text((records / "eval_after.jsonl").read_text())
    write(run_dir / "metrics.jsonl", rows)
    facts = RunFacts(max_staleness=1, sampled_accuracy=(0.5, 4 / 6))
    summary = summarize(rows, facts)
    assert summary["evaluations"] == {}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    findings = audited(run_dir)
    assert findings.is_sound, findings
    summary |= {"accuracy_after": 0.5, "sft_baseline_accuracy": 0.5}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    [rule] = [rule for rule in audited(run_dir).rules.values() if rule.broken]
    assert rule.broken == 2


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (change_lines("metrics.jsonl", lambda rows: rows.pop(0)), WHOLE),
        (change_lines("metrics.jsonl", lambda rows: rows.append(rows[0])), "taken once"),
        (change_lines("metrics.jsonl", lambda rows: rows.insert(0, rows[0])), "taken once"),
        (change_lines("metrics.jsonl", _swap("rollout/reward", 0.56)), "metrics of a step"),
        (change_lines("metrics.jsonl", _swap("queue/groups_dropped_zero_variance", 2.0, 1)),
         "metrics of a step"),
        (change_lines("metrics.jsonl", _swap("train/loss", float("nan"))), "metrics are numbers"),
        (change_lines("metrics.jsonl", _swap("eval/accuracy", 0.75, 2)), "accuracies match"),
        (change_lines("rollouts/eval_after.jsonl", _swap("reason", "correct", 1)),
         "accuracies match"),
        (change_lines("rollouts/step_000000.jsonl", _swap("reward", 0.9)), "the sum of its parts"),
        (change_lines("rollouts/step_000000.jsonl", _swap("prompt_id", "x")), "has one prompt"),
        (change_lines("rollouts/step_000000.jsonl", _swap("index", 1)), "each rollout once"),
        (change_lines("rollouts/step_000001.jsonl", _swap("group", 0)), "trained on twice"),
        (change_lines("rollouts/step_000000.jsonl", _swap("reward", None)), "was graded"),
        (change_lines("rollouts/step_000001.jsonl", _swap("versions", [-1])), "is staler than"),
        (change_lines("rollouts/step_000000.jsonl", _swap("spans", [[1, 0, 2], [0, 2, 4]])),
         "versions of a rollout only rise"),
        (lambda folder: (folder / "summary.json").write_text('{"steps": 2}'), "summary matches"),
        (lambda folder: (folder / "hf/final/config.json").unlink(), "models are whole"),
        (lambda folder: (folder / "rollouts/step_000000.jsonl").write_text("{}\n"),
         "match their lines"),
    ],
)  # fmt: skip
def test_a_change_breaks_its_rule(run_dir: Path, change: Callable[[Path], None], rule: str) -> None:
    change(run_dir)
    broken = [name for name, found in audited(run_dir).rules.items() if found.broken]
    assert any(rule in name for name in broken), broken


def test_the_command_says_what_is_broken_and_where(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run_dir), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_sound"] is True
    change_lines("metrics.jsonl", _swap("rollout/reward", 0.56))(run_dir)
    assert main(["audit", str(run_dir)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "step 1: rollout/reward is 0.56 in metrics.jsonl, 0.55" in text
    assert main(["audit", str(tmp_path / "nowhere")]) == 2


def test_of_many_faults_a_few_are_shown_and_all_are_counted() -> None:
    findings = Findings()
    for number in range(9):
        findings.check("a rule", False, f"place {number}")
    assert findings.rules["a rule"].broken == 9
    assert findings.rules["a rule"].examples == [f"place {n}" for n in range(SHOWN)]
    assert not findings.is_sound
