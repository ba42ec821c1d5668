"""Which fault is named for which counts, and that keys and files named in the fix exist.

Least counts are those of a binomial: 0.9^44, 0.75^17 and 0.95^90 are the first powers below 1 %.
"""

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.rollout_queue.diagnosis import REFUSALS, Evidence, Setting, diagnose
from tests.rollout_queue.makers import make_prompt
from verification.format import CUT_OFF_REFUSALS, FORMAT_CHECKS


def setting(*overrides: str, task: str = "math") -> Setting:
    return Setting.of(load_config(None, list(overrides)), [make_prompt(task=task)])


def evidence(
    training: dict[str, int], *, groups: int = 0, zero_variance: int | None = None,
    truncated: int = 0, evaluation: dict[str, int] | None = None, prompts: int = 17,
    outcomes: tuple[float, ...] = (),
) -> Evidence:  # fmt: skip
    return Evidence(
        prompts={str(number) for number in range(prompts)},
        reasons=Counter(training) + Counter(evaluation or {}),
        training=Counter(training),
        truncated=truncated,
        groups=groups,
        zero_variance_groups=groups if zero_variance is None else zero_variance,
        outcomes=set(outcomes),
    )


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (evidence({"no_think_start": 44}), "format_failure", ["44 of 44", "<think>...</think>"]),
        # An evaluation before training tells as much about the form.
        (
            evidence({}, evaluation={"no_think_start": 30, "no_boxed": 14}),
            "format_failure",
            ["no_boxed"],
        ),
        # Nine in ten count only when all groups have zero variance.
        (evidence({"no_boxed": 60, "wrong_answer": 4}, groups=17), "format_failure", ["60 of 64"]),
        (evidence({"unfinished": 44}), "length_limit", ["sampling.max_new_tokens = 1024"]),
        (evidence({"empty_response": 44}), "ends_at_once", ["render.chat_template"]),
        (evidence({"wrong_answer": 68}, groups=17), "never_correct", ["None of 68", "easier"]),
        (evidence({"wrong_answer": 90}), "never_correct", ["wrong_answer 90"]),
        (
            evidence({"wrong_answer": 90}, truncated=45),
            "never_correct",
            ["45 were cut", "sampling.max_new_tokens"],
        ),
        (evidence({"correct": 68}, groups=17), "too_easy", ["68 of 68", "harder"]),
        # A lost game earns 0 or less.
        (evidence({"lost": 90}, outcomes=(-1.0,)), "never_correct", ["lost 90"]),
        (evidence({"lost": 8, "correct": 92}, groups=17, outcomes=(0, 1)), "too_easy", ["harder"]),
        # A judge that prefers neither: rewards of 0.5 are no sign of hard prompts.
        (evidence({"worse": 90}, groups=17, outcomes=(0.5,)), "equal_rewards", ["the judge"]),
        (evidence({"graded": 68}, groups=17, outcomes=(0.2, 0.3)), "equal_rewards", ["All 17"]),
        (
            evidence({"correct": 34, "wrong_answer": 34}, groups=17),
            "equal_rewards",
            ["train.group_size", "reward.correct = 0.9"],
        ),
    ],
)
def test_cause_and_fix_fit_the_counts(found: Evidence, kind: str, words: list[str]) -> None:
    finding = diagnose(found, setting())
    assert finding is not None and finding.kind == kind
    assert "Cause: " in finding.text and "Fix: " in finding.text
    assert [word for word in words if word not in finding.text] == []


def test_a_judge_that_refuses_is_named_with_its_room_and_the_prompts_are_not_blamed(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    judged = [
        f"expert.scorer.judge={tmp_path}",
        'reward.tasks.essay.environment="verification.environments.judging:rubric"',
    ]
    rules = setting(*judged, "scorer.kv_tokens=8192")
    found = diagnose(evidence({"judge_refused": 44}), rules)
    assert found is not None and found.kind == "judge_refuses"
    wanted = [str(tmp_path), "44 of 44", "64 tokens", "positions", "logs/scorer-0.log"]
    assert [word for word in wanted if word not in found.text] == []
    assert "prompts" not in found.text and "kv_tokens" not in found.text
    # The other limit is the key's.
    rules = setting(*judged, "scorer.kv_tokens=48")
    mostly = evidence({"judge_refused": 90, "graded": 10}, groups=17)
    assert "raise expert.scorer.kv_tokens = 48" in diagnose(mostly, rules).text
    assert diagnose(evidence({"judge_refused": 43}), rules) is None


@pytest.mark.parametrize(
    "found",
    [
        evidence({}),
        evidence({"no_think_start": 43}),
        evidence({"no_think_start": 60, "wrong_answer": 4}, groups=16),
        evidence({"wrong_answer": 89}, groups=16),
        # Many completions of few prompts: the others may be easier.
        evidence({"wrong_answer": 400}, groups=16, prompts=16),
        # Rewards 0.1 and 0: groups that are not complete yet may differ inside.
        evidence({"wrong_answer": 90, "no_boxed": 10}),
        # A single group with different rewards can be learned from.
        evidence({"no_think_start": 99, "correct": 1}, groups=10, zero_variance=9),
        evidence({"correct": 30, "wrong_answer": 30}, groups=0),
        # Rewards by degrees: groups that are not complete yet may differ inside.
        evidence({"graded": 200}, prompts=40),
        evidence({"worse": 200}, outcomes=(0.1, 0.4)),
        evidence({"correct": 200}, outcomes=(0.7, 0.9)),
    ],
)
def test_nothing_is_named_before_there_is_evidence_or_when_learning_is_possible(
    found: Evidence,
) -> None:
    assert diagnose(found, setting()) is None


def test_after_a_while_less_evidence_is_enough_but_of_the_form_alone() -> None:
    assert diagnose(evidence({"no_think_start": 16}), setting(), is_late=True) is None
    seen = evidence({"no_think_start": 17})
    assert diagnose(seen, setting(), is_late=True).kind == "format_failure"
    # What a first run of the quickstart saw, whose model is right in one of five completions.
    assert diagnose(evidence({"wrong_answer": 18}, groups=2), setting(), is_late=True) is None


@pytest.mark.parametrize(
    ("well_formed", "solvable", "correct"),
    [
        (0.25, 1.0, 0.0),  # a quarter keeps the form, and nothing is right: the form is no fault
        (1.0, 1.0, 0.05),
        (1.0, 0.25, 0.9),
        (1.0, 1.0, 0.19),
    ],
)
def test_fewer_than_one_in_a_hundred_runs_that_could_learn_are_accused(
    well_formed: float, solvable: float, correct: float
) -> None:
    """Groups of 8, told of after each completion, as long as nothing is learned from."""
    chance, accused, runs = random.Random(7), 0, 2000
    rules = setting()
    for _ in range(runs):
        seen, found = Evidence(), None
        for number in range(30):
            rate = correct if chance.random() < solvable else 0.0
            for _ in range(8):
                is_form, is_right = chance.random() < well_formed, chance.random() < rate
                reason = "no_boxed" if not is_form else "correct" if is_right else "wrong_answer"
                seen.reasons[reason] += 1
                seen.training[reason] += 1
                seen.add_prompt(str(number))
                if len(seen.reasons) > 1:
                    break
                found = found or diagnose(seen, rules, is_late=True)
            if len(seen.reasons) > 1 or found:
                break
        accused += found is not None
    # 20 expected at most; 35 is 3.4 standard deviations above.
    assert accused <= 35


def test_fix_leaves_out_what_the_run_has_already() -> None:
    found = evidence({"no_think_start": 44})
    assert "say so in render.system_prompt; or teach it by a cold start" in (
        diagnose(found, setting('render.system_prompt=""')).text
    )
    has = setting("render.system_prompt=Think.", "sft.steps=9")
    assert "more plainly in render.system_prompt; or give the cold start more" in (
        diagnose(found, has).text
    )


@pytest.mark.parametrize("task", ["math", "exact", "reasoning_gym", "code"])
def test_format_check_that_the_fix_names_can_be_configured(task: str, tmp_path: Path) -> None:
    reason = "no_think_start"
    text = diagnose(evidence({reason: 44}), setting(task=task)).text
    name, format_check = re.search(
        r'set reward\.tasks\.(\w+)\.format_check = "(\w+)"', text
    ).groups()
    path = tmp_path / "c.toml"
    path.write_text(f'[reward.tasks.{name}]\nformat_check = "{format_check}"\n')
    changed, default = load_config(path, []), Config()
    assert name == task
    assert (
        changed.reward.all_tasks[task].format_check != default.reward.all_tasks[task].format_check
    )
    assert changed.reward.all_tasks[task].compare == default.reward.all_tasks[task].compare


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("reason", "count", "tag", "task", "choice"),
    [
        ("no_think_end", 64, 1, "math", 'set reward.tasks.math.format_check = "box"'),
        ("no_think_start", 64, 0, "math", 'set reward.tasks.math.format_check = "box"'),
        ("no_think_start", 64, 0, "code", 'set reward.tasks.code.format_check = "code"'),
        ("unfinished", 64, None, "math", 'set reward.tasks.math.format_check = "box"'),
    ],
)
def test_a_model_that_never_writes_a_tag_is_told_which_format_check_to_choose(
    reason: str, count: int, tag: int | None, task: str, choice: str,
    late: bool, tags: tuple[str, str],
) -> None:  # fmt: skip
    given = f'render.thinking={{open = "{tags[0]}", close = "{tags[1]}"}}'
    found = diagnose(evidence({reason: count}), setting(given, task=task), is_late=late)
    assert f"{count} of {count} completions fail the format check" in found.text
    assert choice in found.text
    if tag is not None:
        assert re.search(rf"None (begins with|contains) {re.escape(tags[tag])}\.", found.text)
    # Another form is no cure for thoughts that one completion in 64 has.
    mixed = diagnose(evidence({"no_think_end": 63, "several_think_tags": 1}), setting(given))
    assert "None contains" not in mixed.text


def test_keys_that_fixes_name_exist() -> None:
    config = Config().model_dump()
    texts = [
        diagnose(found, setting()).text
        for found in (
            evidence({"no_think_start": 44}), evidence({"unfinished": 44}),
            evidence({"empty_response": 44}), evidence({"wrong_answer": 90}, truncated=50),
            evidence({"correct": 34, "wrong_answer": 34}, groups=17),
        )
    ]  # fmt: skip
    sections = "|".join(config)
    named = set(re.findall(rf"\b({sections})\.([a-z_]+)", " ".join(texts)))
    assert len(named) >= 8
    assert [f"{section}.{key}" for section, key in named if key not in config[section]] == []


def test_records_are_named_only_when_there_are_some() -> None:
    found = evidence({"wrong_answer": 90})
    assert "dropped_000000.jsonl" not in diagnose(found, setting()).text
    path = Path("runs/x/rollouts/dropped_000000.jsonl")
    assert str(path) in diagnose(found, setting(), records=path).text


def test_every_refusal_of_a_format_check_is_known() -> None:
    boxes = ["", "\\boxed{", "\\boxed{}", "\\boxed{1}"]
    blocks = ["```\nx\n```", "```py\n", "```py\n```", "```py\nx\n```"]
    parts = [*boxes, *blocks]
    thoughts = ["", "<think>", "<think>a</think>", "<think>a</think></think>"]
    thoughts += [f"<think>{part}</think>" for part in parts]
    texts = [thought + part for thought in thoughts for part in parts]
    refusals = {
        format_check(text).refusal for format_check in FORMAT_CHECKS.values() for text in texts
    } - {""}
    assert len(refusals) >= 12
    assert refusals | CUT_OFF_REFUSALS | {"unfinished"} == REFUSALS
