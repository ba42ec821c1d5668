"""A calculator: the policy writes an expression for Python, and answers with what Python printed.

    bash examples/agents/run.sh calculate

A question is a product of two numbers. The policy may write "=" and an expression, whose value the
verifier's sandbox prints. Any other reply is its answer. The policy's teacher calls a wrong
expression, and answers with a wrong number, in a third of its examples. The tool of the control,
`withheld`, prints nothing. A model that calls tools needs no code: it gets the tool `python` of
`verification.environments.programs`.
"""

import random
from typing import Any

from verification.environments import EpisodeInput, Outcome, Policy
from verification.environments.programs import Programs

MOST_SHOWN = 8
programs = Programs(test_s=2, test_memory_bytes=128 << 20)


async def calculate(prompt: EpisodeInput, policy: Policy, *, is_run: bool = True) -> Outcome:
    """Reward 1 for the value of the expression; one call is allowed."""
    chat = policy.chat(prompt.messages)
    reply = await chat.say(max_tokens=8)
    has_called = reply.content.startswith("=")
    if has_called:
        chat.add("tool", await printed(reply.content[1:]) if is_run else "none")
        reply = await chat.say(max_tokens=6)
    is_right = reply.content == prompt.answer
    how = "wrong_answer" if has_called else "no_call"
    return Outcome(float(is_right), "correct" if is_right else how)


async def withheld(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """The same with a tool that prints nothing."""
    return await calculate(prompt, policy, is_run=False)


async def printed(expression: str) -> str:
    """What Python prints for an expression; "none" after an error."""
    ran = await programs.run(f"print({expression})")
    return "none" if ran.reason else ran.output.strip()[:MOST_SHOWN] or "none"


def draw(rng: random.Random) -> tuple[str, str]:
    """(expression, value)."""
    first, second = rng.randint(2, 9), rng.randint(10, 99)
    return f"{first}*{second}", str(first * second)


def examples(rng: random.Random) -> list[dict[str, Any]]:
    """SFT examples of a teacher that is often wrong, by either turn."""
    lines = []
    for number in range(6000):
        expression, value = draw(rng)
        question = {"role": "user", "content": expression}
        call = "=" + (expression if rng.random() < 2 / 3 else draw(rng)[0])
        answer = value if rng.random() < 2 / 3 else draw(rng)[1]
        called = [question, {"role": "assistant", "content": call},
                  {"role": "tool", "content": value}]  # fmt: skip
        lines.append({"task": "calculate", "messages": called if number % 2 else [question],
                      "response": answer if number % 2 else call})  # fmt: skip
    return lines


def prompts(rng: random.Random) -> list[dict[str, Any]]:
    """Prompts; the last 200 are held out."""
    lines = []
    for number in range(2000):
        expression, value = draw(rng)
        lines.append({"id": f"calculate-{number}", "task": "calculate", "answer": value,
                      "messages": [{"role": "user", "content": expression}],
                      "split": "train" if number < 1800 else "held_out"})  # fmt: skip
    return lines
