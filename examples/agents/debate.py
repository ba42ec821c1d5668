r"""Debate about a passage: two debaters quote from it, and a judge that never sees it decides.

    bash examples/agents/run.sh debate

A passage gives each key a digit. The question is a key, with two answers of which one is right.
Each debater sees the passage, and an answer to argue for; it may quote two characters. The judge, a
frozen model that was taught to read quotes, sees both answers, and what quotes that are in the
passage say about the question. Its verdict is a probability, the mean of both orders of the
answers. It is what the first debater earns, and what is left of 1 the second: both are the policy.

In `open_debate` the first debater chooses its answer, by the digit of its quote, and the second
argues for the other one; in `open_consultancy` it is alone (arXiv 2407.04622):

    bash examples/agents/run.sh debate reward.tasks.debate.environment=debate:open_debate \
        train.steps=20

The metrics `reward/chose_right` and `reward/chose_wrong` are shares of all; the rest chose none.

The evaluation's accuracy is the judge's. Controls: `direct`, where the judge sees no quotes;
`consultancy`, where one consultant argues for an answer drawn at random; `deaf`, a debate whose
judge hears no quotes, so that nothing can be learnt.
"""

import asyncio
import json
import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from verification.environments import EpisodeInput, Outcome, Policy

KEYS, VALUES = "abcde", "123"
FIRST, SECOND = "<", ">"
NO_QUOTE = "-"


class Case(NamedTuple):
    """A question about a passage; `answers[right]` is right."""

    passage: str
    question: str
    answers: Sequence[str]
    right: int

    def verified(self, quote: str) -> str:
        """What a quote says about the question, if the passage has it."""
        is_verified = len(quote) == 2 and quote in self.passage and quote[0] == self.question
        return quote[1] if is_verified else NO_QUOTE

    def brief(self, side: int) -> str:
        """What a debater is told."""
        return f"{self.passage}:{self.question}{self.answers[side]}"

    @property
    def open_brief(self) -> str:
        """What a debater that chooses its answer is told."""
        return f"{self.passage}:{self.answers[0]}{self.answers[1]}{self.question}"

    def chosen(self, quote: str) -> int | None:
        """The side whose answer a quote names, in the passage or not; None: neither's."""
        claims = [self.question + answer for answer in self.answers]
        return claims.index(quote) if quote in claims else None


def shown(answers: Sequence[str], quotes: Sequence[str]) -> str:
    """What the judge is told. quotes: by side, all of a side joined."""
    return f"{answers[0]}{answers[1]}:{quotes[0]}:{quotes[1]}"


async def judged(policy: Policy, case: Case, quotes: Sequence[str]) -> float:
    """The judge's probability of the first answer: neither place gains anything."""
    log_odds = []
    for order in (slice(None), slice(None, None, -1)):
        text = shown(case.answers[order], quotes[order])
        first, second = await policy.judge([{"role": "user", "content": text}], [FIRST, SECOND])
        log_odds.append(first - second)
    return 1 / (1 + math.exp((log_odds[1] - log_odds[0]) / 2))


def outcome(case: Case, first: float, returns: list[float], **parts: float) -> Outcome:
    """first: probability of the first answer. The reward is that of the right one."""
    right = first if case.right == 0 else 1 - first
    return Outcome(right, "correct" if right > 0.5 else "wrong", parts, turn_returns=returns)


async def said(policy: Policy, brief: str) -> str:
    """What the policy says in a chat of one reply."""
    chat = policy.chat([{"role": "user", "content": brief}])
    return (await chat.say(max_tokens=3)).content


async def debate(
    prompt: EpisodeInput, policy: Policy, rounds: int = 1, *, is_deaf: bool = False
) -> Outcome:
    """Both sides speak at once in each round, and then hear each other's quote."""
    case = Case(**prompt.entry)
    chats = [policy.chat([{"role": "user", "content": case.brief(side)}]) for side in (0, 1)]
    quotes = ["", ""]
    for _ in range(rounds):
        replies = await asyncio.gather(*(chat.say(max_tokens=3) for chat in chats))
        new = [case.verified(reply.content) for reply in replies]
        for side, chat in enumerate(chats):
            quotes[side] += new[side]
            chat.add("user", new[1 - side])
    if is_deaf:
        quotes = [NO_QUOTE, NO_QUOTE]
    first = await judged(policy, case, quotes)
    return outcome(case, first, [first, 1 - first] * rounds)


async def consultancy(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Control: one consultant, for an answer drawn at random."""
    case, side = Case(**prompt.entry), random.randrange(2)
    quotes = [NO_QUOTE, NO_QUOTE]
    quotes[side] = case.verified(await said(policy, case.brief(side)))
    first = await judged(policy, case, quotes)
    return outcome(case, first, [first if side == 0 else 1 - first])


async def open_consultancy(
    prompt: EpisodeInput, policy: Policy, *, is_debate: bool = False
) -> Outcome:
    """One consultant, whose quote names the answer that it argues for; no answer earns 0.

    is_debate: a second one argues for the other answer, and earns what is left of 1.
    """
    case, quotes = Case(**prompt.entry), [NO_QUOTE, NO_QUOTE]
    claim = await said(policy, case.open_brief)
    side = case.chosen(claim)
    if side is None:
        return outcome(case, await judged(policy, case, quotes), [0.0])
    quotes[side] = case.verified(claim)
    if is_debate:
        quotes[1 - side] = case.verified(await said(policy, case.brief(1 - side)))
    first = await judged(policy, case, quotes)
    own = first if side == 0 else 1 - first
    choice = "chose_right" if side == case.right else "chose_wrong"
    return outcome(case, first, [own, 1 - own][: 1 + is_debate], **{choice: 1.0})


async def open_debate(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """A debate whose first debater chooses its answer; the second argues against it."""
    return await open_consultancy(prompt, policy, is_debate=True)


async def direct(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Control: the judge answers by itself; what the policy says is lost."""
    case = Case(**prompt.entry)
    await policy.chat(prompt.messages).say(max_tokens=1)
    return outcome(case, await judged(policy, case, [NO_QUOTE, NO_QUOTE]), [0.0])


async def deaf(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Control: a debate before a judge that ignores it."""
    return await debate(prompt, policy, is_deaf=True)


def draw(rng: random.Random) -> Case:
    """A case."""
    values = rng.choices(VALUES, k=len(KEYS))
    key = rng.randrange(len(KEYS))
    wrong, right = rng.choice(VALUES.replace(values[key], "")), rng.randrange(2)
    answers = [wrong, wrong]
    answers[right] = values[key]
    passage = "".join(map("".join, zip(KEYS, values, strict=True)))
    return Case(passage, KEYS[key], answers, right)


def cells(case: Case) -> list[str]:
    """Quotes of a key with its digit."""
    return [case.passage[start : start + 2] for start in range(0, len(case.passage), 2)]


def examples(rng: random.Random) -> list[dict]:
    """SFT examples of debaters: one in five quotes what it would need, true or not.

    In one of three the debater chooses its answer, at random.
    """
    lines = []
    for number in range(6000):
        case, side, is_open = draw(rng), rng.randrange(2), number % 3 == 0
        claim = case.question + case.answers[side]
        quote = claim if is_open or rng.random() < 1 / 5 else rng.choice(cells(case))
        brief = case.open_brief if is_open else case.brief(side)
        message = {"role": "user", "content": brief}
        lines.append({"task": "debate", "messages": [message], "response": quote})
    return lines


def judge_examples(rng: random.Random) -> list[dict]:
    """SFT examples of the judge: it believes a quote about the question, and else guesses."""
    lines = []
    for _ in range(6000):
        case = draw(rng)
        quotes = [rng.choice([case.answers[case.right], NO_QUOTE]) for _ in range(2)]
        verdict = rng.randrange(2) if quotes == [NO_QUOTE, NO_QUOTE] else case.right
        text = shown(case.answers, quotes)
        lines.append({"task": "debate", "messages": [{"role": "user", "content": text}],
                      "response": (FIRST, SECOND)[verdict]})  # fmt: skip
    return lines


def prompts(rng: random.Random) -> list[dict]:
    """Cases, of which the last 300 are held out."""
    drawn = [draw(rng) for _ in range(2100)]
    return [
        {"id": f"debate-{number}", "task": "debate", "answer": case.answers[case.right],
         "messages": [{"role": "user", "content": case.question}],
         "entry": json.dumps(case._asdict()),
         "split": "train" if number < 1800 else "held_out"}
        for number, case in enumerate(drawn)
    ]  # fmt: skip
