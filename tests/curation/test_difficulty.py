"""The two stages of the difficulty filter, and planted wrong labels, through real comparisons."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig, VerifierConfig
from megatron_rl.config.thinking import ThinkTags
from megatron_rl.curation.difficulty import (
    DifficultyOptions,
    Outcome,
    filter_difficulty,
    open_classes,
)
from megatron_rl.curation.rows import Row, read_rows
from megatron_rl.curation.samples import Graded, Sample, SampleFile, read_samples
from megatron_rl.protocol.types import ScoreFailed

SAMPLES = 16
Filter = Callable[..., Outcome]
ALL = {"above": -1.0, "up_to": 1.0}


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def filtered() -> Iterator[Filter]:
    """The tool with real grading processes: f(rows, samples, options)."""
    with open_classes(RewardConfig(), VerifierConfig()) as classify:
        yield lambda rows, graded, options: filter_difficulty(
            rows,
            graded if isinstance(graded, SampleFile) else SampleFile(graded, 0),
            options=options,
            reward=RewardConfig(),
            classify=classify,
        )


class Problem:
    """A problem whose true answer is value / 4, and how a model answers it."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.value = 4 * rng.randrange(100, 900) + rng.choice((0, 1, 2, 3))
        # A third never or hardly solved, the others all the way up to always.
        self.p = rng.choice((0.0, 0.05, rng.random(), rng.uniform(0.8, 1.0), rng.uniform(0.8, 1.0)))
        # One in 200 is got wrong in one way: no vote can tell it from a wrong label.
        concentration = 0.85 if number % 200 == 7 else rng.uniform(0.05, 0.35)
        self.p = 0.05 if number % 200 == 7 else self.p
        self.wrong = [concentration, *([(1 - concentration) / 12] * 12)]
        self.is_flipped = number % 20 == 0
        self.label = self.value
        if self.is_flipped:
            # Half of the wrong labels are a mistake that the model makes now and then.
            self.label += 4 * (rng.randrange(2, 13) if number % 40 else 99)

    def answer(self, rng: random.Random) -> int:
        if rng.random() < self.p:
            return self.value
        return self.value + 4 * rng.choices(range(1, 14), self.wrong)[0]


def spelled(value: int, rng: random.Random) -> str:
    """value / 4 in one of several spellings."""
    forms = (f"\\frac{{{value}}}{{4}}", f"{value / 4:g}", f"{value}/4", f"x = {value / 4:g}")
    return rng.choice(forms)


def test_planted_wrong_labels_are_found_and_right_ones_are_kept(
    tmp_path: Path, filtered: Filter
) -> None:
    rng = random.Random(4)
    problems = [Problem(number, rng) for number in range(1600)]
    rows = read_rows(
        write(
            tmp_path / "prompts.jsonl",
            [
                {"id": f"p{i}", "question": f"What is number {i}?", "answer": f"{p.label}/4"}
                for i, p in enumerate(problems)
            ],
        )
    )
    graded = []
    for i, problem in enumerate(problems):
        drawn = [problem.answer(rng) for _ in range(SAMPLES)]
        samples = [Sample(value == problem.label, spelled(value, rng)) for value in drawn]
        graded.append(Graded(f"p{i}", "", samples))
    options = DifficultyOptions(**ALL, labels="relabel")
    outcome = filtered(rows, graded, options)
    kept = {row.prompt.id: row for row in outcome.rows}
    dropped = {drop.id for drop in outcome.report.drops if drop.reason == "label_disagrees"}
    relabelled = {name for name, row in kept.items() if "original_answer" in row.fields}
    assert len(kept) + len(dropped) == len(problems)
    solved = {f"p{i}" for i, p in enumerate(problems) if p.is_flipped and p.p >= 0.8}
    sound = {f"p{i}" for i, p in enumerate(problems) if not p.is_flipped}
    found = (dropped | relabelled) & solved
    false = (dropped | relabelled) & sound
    print(f"found {len(found)} of {len(solved)}, false {len(false)} of {len(sound)}")
    assert len(solved) >= 30 and len(found) >= 0.9 * len(solved)
    assert 0 < len(false) <= 0.01 * len(sound)
    # What the majority says of a problem that is solved is its true answer.
    for name in relabelled & solved:
        text = kept[name].prompt.answer.removeprefix("x = ").removeprefix("\\frac{")
        numbers = [float(part.strip("}")) for part in text.replace("}{", "/").split("/")]
        value = numbers[0] / numbers[1] if len(numbers) == 2 else numbers[0]
        assert value == problems[int(name[1:])].value / 4
    assert outcome.report.changed == {"relabelled": len(relabelled)}


def row(tmp_path: Path, **fields: Any) -> list[Row]:
    line = {"id": "p", "question": "q?", "answer": "7", "split": "train", "level": 3} | fields
    return read_rows(write(tmp_path / "p.jsonl", [line]))


@pytest.mark.parametrize(
    ("correct", "reason"),
    [(0, "too_hard"), (1, ""), (12, ""), (13, "too_easy"), (16, "too_easy")],
)
def test_never_and_mostly_solved_problems_go(
    tmp_path: Path, filtered: Filter, correct: int, reason: str
) -> None:
    samples = [Sample(i < correct, None) for i in range(SAMPLES)]
    outcome = filtered(row(tmp_path), [Graded("p", "", samples)], DifficultyOptions())
    assert outcome.report.dropped == ({reason: 1} if reason else {})
    if not reason:
        assert outcome.rows[0].fields["pass_rate"] == correct / 16


def test_a_problem_with_few_samples_or_none_is_dropped(tmp_path: Path, filtered: Filter) -> None:
    samples = [Sample(i == 0, None) for i in range(7)]
    outcome = filtered(row(tmp_path), [Graded("p", "", samples)], DifficultyOptions())
    assert outcome.report.dropped == {"too_few_samples": 1}
    assert filtered(row(tmp_path), [], DifficultyOptions()).report.dropped == {"too_few_samples": 1}


def test_the_second_stage_takes_back_what_only_the_first_model_could_not_solve(
    tmp_path: Path, filtered: Filter
) -> None:
    lines = [{"id": n, "question": f"{n}?", "answer": "7"} for n in ("hard", "mid", "easy", "bad")]
    rows = read_rows(write(tmp_path / "all.jsonl", lines))

    def solved(**counts: int) -> list[Graded]:
        return [
            Graded(name, "", [Sample(True, "7")] * n + [Sample(False, "9")] * (SAMPLES - n))
            for name, n in counts.items()
        ]

    base = filtered(rows, solved(hard=0, mid=8, easy=15, bad=0), DifficultyOptions())
    assert [row.prompt.id for row in base.rows] == ["mid"]
    assert base.report.dropped == {"too_hard": 2, "too_easy": 1}
    checked = DifficultyOptions(labels="drop")
    trained = filtered(rows, solved(hard=5, mid=12, easy=16, bad=0), checked)
    assert [row.prompt.id for row in trained.rows] == ["hard", "mid"]
    assert trained.report.dropped == {"too_easy": 1, "label_disagrees": 1}


def test_a_relabelled_problem_is_judged_by_its_new_label(tmp_path: Path, filtered: Filter) -> None:
    samples = [Sample(False, "8") for _ in range(14)] + [Sample(False, None)] * 2
    rules = DifficultyOptions(labels="relabel", up_to=0.8)
    strict = filtered(row(tmp_path), [Graded("p", "", samples)], rules)
    assert strict.report.dropped == {"too_easy_when_relabelled": 1}
    wide = DifficultyOptions(up_to=0.9, labels="relabel")
    kept = filtered(row(tmp_path), [Graded("p", "", samples)], wide).rows[0]
    assert kept.prompt.answer == "8"
    line = kept.line()
    assert (line["answer"], line["original_answer"], line["pass_rate"]) == ("8", "7", 14 / 16)
    assert bytes(line["level"]) == b"3"


def test_an_answer_that_only_leaves_work_undone_is_no_rival_of_the_label(
    tmp_path: Path, filtered: Filter
) -> None:
    # All samples box 2*4 - 1, which earned nothing, but means the label.
    samples = [Sample(False, "2 \\cdot 4 - 1")] * SAMPLES
    options = DifficultyOptions(**ALL, labels="drop")
    outcome = filtered(row(tmp_path), [Graded("p", "", samples)], options)
    assert outcome.report.dropped == {} and outcome.report.figures["labels_compared"] == 1


def test_a_label_that_could_not_be_compared_is_dropped_under_its_own_reason(
    tmp_path: Path,
) -> None:
    outcome = filter_difficulty(
        row(tmp_path),
        SampleFile([Graded("p", "", [Sample(False, "8")] * SAMPLES)], 0),
        options=DifficultyOptions(**ALL, labels="drop"),
        reward=RewardConfig(),
        classify=lambda requests: [ScoreFailed(0, "no time") for _ in requests],
    )
    assert outcome.report.dropped == {"label_not_comparable": 1}
    assert outcome.report.drops[0].detail == "no time"


def test_programs_have_no_vote_on_their_label(tmp_path: Path, filtered: Filter) -> None:
    samples = [Sample(False, "print(8)")] * SAMPLES
    options = DifficultyOptions(**ALL, labels="drop")
    outcome = filtered(row(tmp_path, task="code"), [Graded("p", "", samples)], options)
    assert outcome.report.figures["labels_not_checked"] == 1 and len(outcome.rows) == 1
    with pytest.raises(InputError, match="unknown task 'mine'"):
        filtered(row(tmp_path, task="mine"), [Graded("p", "", samples)], options)


def test_samples_are_read_from_the_rollouts_of_a_run(tmp_path: Path, filtered: Filter) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    record = {
        "prompt_id": "p", "group": 1, "task": "math", "problem": "q?", "language": "",
        "answer": "7", "reward": 0.1, "parts": {}, "tokens": 2, "versions": [0],
        "finish_reason": "stop", "seed": 0, "prompt_tail": "",
    }  # fmt: skip
    eight = "<think>a</think>\\boxed{8}"
    lines = [
        record | {"index": i, "text": eight, "reason": "wrong_answer"} for i in range(SAMPLES)
    ] + [record | {"index": 99, "text": "", "reason": "ungradable", "reward": None}]
    write(folder / "eval_before.jsonl", lines)
    write(folder / "step_000000.jsonl", lines[:1])
    found = read_samples(tmp_path, RewardConfig(), label="before")
    assert found.ungraded == 1 and len(found.graded) == SAMPLES
    assert read_samples(tmp_path, RewardConfig()).graded[0].samples == [Sample(False, "8")]
    square = ThinkTags(open="[THINK]", close="[/THINK]")
    other = read_samples(tmp_path, RewardConfig(), tags=square)
    assert other.graded[0].samples == [Sample(False, None)]
    options = DifficultyOptions(**ALL, labels="drop")
    outcome = filtered(row(tmp_path), found, options)
    assert outcome.report.dropped == {"label_disagrees": 1}
    with pytest.raises(InputError, match="no rollouts of an evaluation 'after'"):
        read_samples(tmp_path, RewardConfig(), label="after")


def test_samples_belong_to_the_question_when_line_numbers_have_moved(
    tmp_path: Path, filtered: Filter
) -> None:
    rows = read_rows(
        write(
            tmp_path / "f.jsonl",
            [{"question": "one?", "answer": "1"}, {"question": "two?", "answer": "2"}],
        )
    )
    graded = [
        Graded("f:2", "One?", [Sample(i < 8, None) for i in range(SAMPLES)]),
        Graded("f:1", "gone?", [Sample(True, None)]),
    ]
    outcome = filtered(rows, graded, DifficultyOptions())
    assert [kept.prompt.question for kept in outcome.rows] == ["one?"]
    assert outcome.report.figures["samples_of_no_problem"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"correct": [True]}, "neither id nor problem"),
        ({"id": "p", "correct": [True], "answers": ["1", "2"]}, "2 answers"),
        ({"id": "p"}, "correct"),
    ],
)
def test_bad_samples_are_refused(tmp_path: Path, line: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_samples(write(tmp_path / "s.jsonl", [line]), RewardConfig())
