"""Which fault is named for which counts, and that keys and files named in the cure exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.rollout_queue.diagnosis import REFUSALS, Evidence, Setting, diagnose
from tests.rollout_queue.makers import make_prompt
from verification.format import CUT_OFF_REFUSALS
from verification.gates import GATES


def setting(*overrides: str, task: str = "math") -> Setting:
    return Setting.of(load_config(None, list(overrides)), [make_prompt(task=task)])


def evidence(
    training: dict[str, int], *, groups: int = 0, flat: int | None = None, truncated: int = 0,
    evaluation: dict[str, int] | None = None,
) -> Evidence:  # fmt: skip
    return Evidence(
        reasons=Counter(training) + Counter(evaluation or {}),
        training=Counter(training),
        truncated=truncated,
        groups=groups,
        flat_groups=groups if flat is None else flat,
    )


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (evidence({"no_think_start": 8}), "ill_formed", ["8 of 8", "<think>...</think>"]),
        # An evaluation before training tells as much about the form.
        (evidence({}, evaluation={"no_think_start": 5, "no_boxed": 3}), "ill_formed", ["no_boxed"]),
        # Nine in ten count only when all groups are flat.
        (evidence({"no_boxed": 60, "wrong_answer": 4}, groups=4), "ill_formed", ["60 of 64"]),
        (evidence({"unfinished": 8}), "length_limit", ["sampling.max_new_tokens = 1024"]),
        (evidence({"empty_response": 8}), "ends_at_once", ["render.chat_template"]),
        (evidence({"wrong_answer": 16}, groups=4), "never_correct", ["None of 16", "easier"]),
        (evidence({"wrong_answer": 64}), "never_correct", ["wrong_answer 64"]),
        (
            evidence({"wrong_answer": 64}, truncated=32),
            "never_correct",
            ["32 were cut", "sampling.max_new_tokens"],
        ),
        (evidence({"correct": 16}, groups=4), "too_easy", ["16 of 16", "harder"]),
        (
            evidence({"correct": 8, "wrong_answer": 8}, groups=4),
            "equal_rewards",
            ["train.group_size", "reward.correct = 0.9"],
        ),
    ],
)
def test_cause_and_cure_fit_the_counts(found: Evidence, kind: str, words: list[str]) -> None:
    finding = diagnose(found, setting())
    assert finding is not None and finding.kind == kind
    assert "Cause: " in finding.text and "Cure: " in finding.text
    assert [word for word in words if word not in finding.text] == []


@pytest.mark.parametrize(
    "found",
    [
        evidence({}),
        evidence({"no_think_start": 7}),
        evidence({"no_think_start": 60, "wrong_answer": 4}),
        evidence({"wrong_answer": 63}, groups=3),
        # Rewards 0.1 and 0: groups that are not complete yet may differ inside.
        evidence({"wrong_answer": 90, "no_boxed": 10}),
        # A single group with different rewards can be learned from.
        evidence({"no_think_start": 99, "correct": 1}, groups=10, flat=9),
        evidence({"correct": 30, "wrong_answer": 30}, groups=0),
    ],
)
def test_nothing_is_named_before_there_is_evidence_or_when_learning_is_possible(
    found: Evidence,
) -> None:
    assert diagnose(found, setting()) is None


def test_after_a_while_little_evidence_is_enough() -> None:
    one = evidence({"no_think_start": 1})
    assert diagnose(one, setting(), is_late=True).kind == "ill_formed"
    flat = evidence({"wrong_answer": 4}, groups=1)
    assert diagnose(flat, setting(), is_late=True).kind == "never_correct"
    assert diagnose(evidence({}), setting(), is_late=True) is None


def test_cure_leaves_out_what_the_run_has_already() -> None:
    found = evidence({"no_think_start": 8})
    assert "say so in render.system_prompt; or teach it by a cold start" in (
        diagnose(found, setting('render.system_prompt=""')).text
    )
    has = setting("render.system_prompt=Think.", "sft.steps=9")
    assert "more plainly in render.system_prompt; or give the cold start more" in (
        diagnose(found, has).text
    )


@pytest.mark.parametrize("task", ["math", "exact", "reasoning_gym", "code"])
def test_gate_that_the_cure_names_can_be_configured(task: str, tmp_path: Path) -> None:
    reason = "no_think_start"
    text = diagnose(evidence({reason: 8}), setting(task=task)).text
    gate, compare, name = re.search(
        r'gate = "(\w+)".* beside compare = "(\w+)" in \[reward\.tasks\.(\w+)\]', text
    ).groups()
    path = tmp_path / "c.toml"
    path.write_text(f'[reward.tasks.{name}]\ngate = "{gate}"\ncompare = "{compare}"\n')
    changed, default = load_config(path, []), Config()
    assert name == task
    assert changed.reward.all_tasks[task].gate != default.reward.all_tasks[task].gate
    assert changed.reward.all_tasks[task].compare == default.reward.all_tasks[task].compare


def test_keys_that_cures_name_exist() -> None:
    config = Config().model_dump()
    texts = [
        diagnose(found, setting()).text
        for found in (
            evidence({"no_think_start": 8}), evidence({"unfinished": 8}),
            evidence({"empty_response": 8}), evidence({"wrong_answer": 64}, truncated=40),
            evidence({"correct": 8, "wrong_answer": 8}, groups=4),
        )
    ]  # fmt: skip
    sections = "|".join(config)
    named = set(re.findall(rf"\b({sections})\.([a-z_]+)", " ".join(texts)))
    assert len(named) >= 8
    assert [f"{section}.{key}" for section, key in named if key not in config[section]] == []


def test_records_are_named_only_when_there_are_some() -> None:
    found = evidence({"wrong_answer": 64})
    assert "dropped_000000.jsonl" not in diagnose(found, setting()).text
    path = Path("runs/x/rollouts/dropped_000000.jsonl")
    assert str(path) in diagnose(found, setting(), records=path).text


def test_every_refusal_of_a_gate_is_known() -> None:
    boxes = ["", "\\boxed{", "\\boxed{}", "\\boxed{1}"]
    blocks = ["```\nx\n```", "```py\n", "```py\n```", "```py\nx\n```"]
    parts = [*boxes, *blocks]
    thoughts = ["", "<think>", "<think>a</think>", "<think>a</think></think>"]
    thoughts += [f"<think>{part}</think>" for part in parts]
    texts = [thought + part for thought in thoughts for part in parts]
    refusals = {gate(text).refusal for gate in GATES.values() for text in texts} - {""}
    assert len(refusals) >= 12
    assert refusals | CUT_OFF_REFUSALS | {"unfinished"} == REFUSALS
