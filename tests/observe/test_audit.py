"""An audit holds on sound records, and names the rule that each change breaks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.cli.main import main
from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.observe.audit import SHOWN, Findings, audit_records

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
    step = {"source": "trainer", "queue/rollouts_trained": 4.0, "queue/groups_trained": 2.0}
    write(
        folder / "metrics.jsonl",
        [
            step | {"step": 1, "rollout/reward": 0.55, "rollout/length_tokens": 4.5,
                    "queue/staleness_versions_max": 0.0, "queue/staleness_versions_mean": 0.0},
            # Rewards 1, 1, 0.1, 0.1 and the zero-variance group's 1, 1; groups 2 and 3 by versions
            # 0 and 1.
            step | {"step": 2, "rollout/reward": 0.7, "rollout/length_tokens": 4.5,
                    "queue/groups_dropped_zero_variance": 1.0, "queue/staleness_versions_max": 1.0,
                    "queue/staleness_versions_mean": 0.5},
            {"source": "queue", "step": 2, "label": "after", "eval/accuracy": 0.5, "eval/n": 2},
        ],
    )  # fmt: skip
    summary = {"accuracy_before": None, "accuracy_after": 0.5, "sft_baseline_accuracy": None,
               "steps": 2, "rollouts_trained": 8}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
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
    # 10 rollouts of 5 groups in 3 files; 7 figures of each step, of which the first dropped none.
    assert looked_at["a reward is the sum of its parts"] == 10
    assert looked_at["a group has one prompt"] == 5
    assert looked_at["metrics of a step match its rollouts"] == 14
    assert looked_at["no rollout is staler than queue.max_staleness"] == 2
    assert looked_at["accuracies match recorded completions"] == 1


def test_versions_of_chats_that_waited_at_the_same_time_have_no_order(run_dir: Path) -> None:
    # Two chats of two replies each, between which the weights changed.
    spans = [[0, 0, 1], [1, 2, 3], [0, 4, 5], [1, 6, 7]]
    chats = {"spans": spans, "prompt_tokens": 3, "versions": [0, 1], "tokens": 7}
    for row_starts, broken in (([], 1), ([6], 0), ([7], 0), ([8], 1)):
        change = lambda rows, starts=row_starts: rows[2].update(chats, row_starts=starts)  # noqa: E731
        change_lines("rollouts/step_000001.jsonl", change)(run_dir)
        rule = audited(run_dir).rules["versions of a rollout only rise"]
        assert rule.broken == broken, row_starts


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


def change_lines(name: str, change: Callable[[list[dict]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        rows = [json.loads(text) for text in path.read_text().splitlines()]
        change(rows)
        write(path, rows)

    return apply


def _swap(key: str, value: Any, at: int = 0) -> Callable[[list[dict]], None]:
    return lambda rows: rows[at].update({key: value})


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (change_lines("metrics.jsonl", lambda rows: rows.pop(0)), "steps are taken once"),
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
