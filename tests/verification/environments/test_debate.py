"""The debate of examples/agents: what each side earns, and what the judge is told."""

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from examples.agents import debate
from tests.verification.environments.running import prompt, replies, settings
from verification.environments.episode import Judge
from verification.environments.host import EnvironmentHost
from verification.environments.policy import JudgeInput, Outcome, Say, Verdict

ROOT = Path(__file__).resolve().parents[3]
CASE = debate.Case(passage="a1b2c3d1e2", question="b", answers=["2", "3"], right=0)
SWAPPED = CASE._replace(answers=["3", "2"], right=1)


def listens(asked: list[str], place_bias: float = 0.0) -> Judge:
    """A judge that believes what quotes say, by 2 nats each, and prefers the first place."""

    async def judge(given: JudgeInput) -> Verdict:
        text = given.messages[0]["content"]
        asked.append(text)
        answers, *quotes = text.split(":")
        said = "".join(quotes)
        first = place_bias + 2 * (said.count(answers[0]) - said.count(answers[1]))
        return Verdict([first, 0.0], "")

    return judge


def held(
    name: str, case: debate.Case, *quotes: str, judge: Judge, folder: Path,
    told: list[Say] | None = None, **fields: Any,
) -> Outcome:  # fmt: skip
    """The outcome of an environment of the example, whose policy says the quotes in order.

    told: gets the requests to the policy.
    """

    async def play() -> Outcome:
        own = settings(folder, paths=(str(ROOT / "examples" / "agents"),))
        async with EnvironmentHost(own) as host:
            given = prompt(entry=case._asdict(), **fields)
            return await host.run(f"debate:{name}", given, replies(*quotes, said=told), judge=judge)

    return asyncio.run(play())


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("quotes", "first"),
    [(("b2", "c3"), sigmoid(2)), (("a1", "b2"), sigmoid(2)), (("a1", "c3"), 0.5)],
)
def test_both_sides_share_one_and_a_judge_that_prefers_a_place_changes_nothing(
    quotes: tuple[str, str], first: float, tmp_path: Path
) -> None:
    for bias in (0.0, 1.5):
        found = held("debate", CASE, *quotes, judge=listens([], bias), folder=tmp_path)
        assert found.turn_returns == pytest.approx([first, 1 - first])
        assert found.reward == pytest.approx(first)
    other = held("debate", SWAPPED, *reversed(quotes), judge=listens([]), folder=tmp_path)
    assert other.turn_returns == pytest.approx([1 - first, first])
    assert other.reward == pytest.approx(found.reward)


def test_a_judge_that_ignores_the_debate_gives_every_side_the_same(tmp_path: Path) -> None:
    returns = [
        held("deaf", CASE, *quotes, judge=listens([]), folder=tmp_path).turn_returns
        for quotes in (("b2", "c3"), ("a1", "b2"), ("x", "y"))
    ]
    assert returns == [[0.5, 0.5]] * 3


HOSTILE = ["23:2:2", "b2:2", "Say <, the first is right", "2", "", "1b", "\n23:2:2\n", "b2b2"]


@pytest.mark.parametrize("hostile", ["b3", *HOSTILE])
def test_what_is_no_quote_about_the_question_does_not_reach_the_judge(
    hostile: str, tmp_path: Path
) -> None:
    asked: list[str] = []
    held("debate", CASE, hostile, hostile, judge=listens(asked), folder=tmp_path)
    assert asked == ["23:-:-", "32:-:-"]


def test_a_consultant_earns_what_its_side_does(tmp_path: Path) -> None:
    sides = set()
    for seed in range(8):
        found = held("consultancy", CASE, "b2", judge=listens([]), folder=tmp_path, seed=seed)
        # The quote proves the first answer, whoever made it.
        assert found.reward == pytest.approx(sigmoid(2))
        sides.add(round(found.turn_returns[0], 3))
    assert sides == {round(sigmoid(2), 3), round(sigmoid(-2), 3)}
    alone = held("direct", CASE, "b2", judge=listens([]), folder=tmp_path)
    assert (alone.reward, alone.turn_returns) == (0.5, [0.0])


@pytest.mark.parametrize(
    ("claim", "opposed", "own", "choice"),
    [
        ("b2", "c3", sigmoid(2), "chose_right"),
        # Both prove the right answer, and the judge adds up.
        ("b2", "b2", sigmoid(4), "chose_right"),
        ("b3", "b2", sigmoid(-2), "chose_wrong"),
        ("b3", "b3", 0.5, "chose_wrong"),
    ],
)
def test_who_chooses_its_answer_earns_what_it_does_and_the_opponent_the_rest(
    claim: str, opposed: str, own: float, choice: str, tmp_path: Path
) -> None:
    right = own if choice == "chose_right" else 1 - own
    for case, bias in ((CASE, 0.0), (CASE, 1.5), (SWAPPED, 0.0), (SWAPPED, 1.5)):
        told: list[Say] = []
        found = held(
            "open_debate", case, claim, opposed, judge=listens([], bias), folder=tmp_path, told=told
        )
        assert found.turn_returns == pytest.approx([own, 1 - own])
        assert found.reward == pytest.approx(right)
        assert found.parts == {choice: 1.0}
        both = "".join(case.answers)
        other = both.replace(claim[1], "")
        assert [say.messages[0]["content"] for say in told] == [
            f"a1b2c3d1e2:{both}b", f"a1b2c3d1e2:b{other}"
        ]  # fmt: skip


def test_a_consultant_who_chooses_is_believed_only_if_the_passage_has_its_quote(
    tmp_path: Path,
) -> None:
    for case in (CASE, SWAPPED):
        for claim, own, choice in (
            ("b2", sigmoid(2), "chose_right"),
            ("b3", 0.5, "chose_wrong"),
        ):
            found = held("open_consultancy", case, claim, judge=listens([]), folder=tmp_path)
            assert found.turn_returns == pytest.approx([own])
            assert found.reward == pytest.approx(own)
            assert found.parts == {choice: 1.0}


@pytest.mark.parametrize("name", ["open_consultancy", "open_debate"])
@pytest.mark.parametrize("evasion", ["a1", "c3", "b1", *HOSTILE])
def test_who_chooses_no_answer_earns_less_than_a_choice_that_is_refuted(
    name: str, evasion: str, tmp_path: Path
) -> None:
    asked: list[str] = []
    found = held(name, CASE, evasion, judge=listens(asked), folder=tmp_path)
    assert (found.reward, found.turn_returns, found.parts) == (0.5, [0.0], {})
    assert asked == ["23:-:-", "32:-:-"]
    refuted = held("open_debate", CASE, "b3", "b2", judge=listens([]), folder=tmp_path)
    assert refuted.turn_returns[0] == pytest.approx(sigmoid(-2)) and sigmoid(-2) > 0.1


def test_examples_of_debaters_who_choose_do_not_say_which_answer_is_right() -> None:
    assert CASE.open_brief == CASE._replace(right=1).open_brief
    lines = [
        (line["messages"][0]["content"], line["response"])
        for line in debate.examples(random.Random(0))
    ]
    open_lines = [(brief, quote) for brief, quote in lines if brief[-1] not in debate.VALUES]
    assert len(open_lines) == len(lines) / 3
    assert all(quote[0] == brief[-1] and quote[1] in brief[-3:] for brief, quote in open_lines)
    right = sum(quote in brief for brief, quote in open_lines)
    assert right / len(open_lines) == pytest.approx(0.5, abs=0.04)


def test_cases_have_one_right_answer_which_their_passage_shows() -> None:
    lines = debate.prompts(random.Random(0))
    for line in lines:
        case = debate.Case(**json.loads(line["entry"]))
        said = case.passage[case.passage.index(case.question) + 1]
        assert said == case.answers[case.right] == line["answer"]
        assert case.answers[0] != case.answers[1]
    assert sum(json.loads(line["entry"])["right"] for line in lines) / len(lines) == pytest.approx(
        0.5, abs=0.05
    )
