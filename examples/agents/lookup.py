"""A tool in two turns: the policy asks for the value of a key, and answers with what it was told.

    bash examples/agents/run.sh lookup

A question is a key. The policy may write "=" and a key: a table that changes with every prompt
gives the key's value, a digit. Any other reply is its answer. The policy's teacher calls a wrong
key in a third of its examples, and answers with a wrong digit in two of five. The tool of the
control, `withheld`, always says "none".
"""

import json
import random
from collections.abc import Callable

from verification.environments import EpisodeInput, Outcome, Policy

KEYS, VALUES = "abc", "12345"
REPLY_TOKENS = 3


def find(table: dict[str, str], key: str) -> str:
    """The tool: the value of a key."""
    return table.get(key, "none")


async def lookup(
    prompt: EpisodeInput, policy: Policy, tool: Callable[[dict[str, str], str], str] = find
) -> Outcome:
    """Reward 1 for the value of the key; one call is allowed."""
    chat = policy.chat(prompt.messages)
    reply = await chat.say(max_tokens=REPLY_TOKENS)
    has_called = reply.content.startswith("=")
    if has_called:
        chat.add("tool", tool(prompt.entry, reply.content[1:]))
        reply = await chat.say(max_tokens=REPLY_TOKENS)
    is_right = reply.content == prompt.answer
    how = "wrong_answer" if has_called else "no_call"
    return Outcome(float(is_right), "correct" if is_right else how)


async def withheld(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """The same with a tool that answers "none"."""
    return await lookup(prompt, policy, tool=lambda table, key: "none")


def examples(rng: random.Random) -> list[dict]:
    """SFT examples of a teacher that is often wrong, by either turn."""
    lines = []
    for number in range(2000):
        key, value = rng.choice(KEYS), rng.choice(VALUES)
        question = {"role": "user", "content": key}
        call = "=" + (key if rng.random() < 1 / 2 else rng.choice(KEYS))
        answer = value if rng.random() < 1 / 2 else rng.choice(VALUES)
        called = [question, {"role": "assistant", "content": call},
                  {"role": "tool", "content": value}]  # fmt: skip
        lines.append({"task": "lookup", "messages": called if number % 2 else [question],
                      "response": answer if number % 2 else call})  # fmt: skip
    return lines


def prompts(rng: random.Random) -> list[dict]:
    """Prompts, each with a table of its own; the last 200 are held out."""
    lines = []
    for number in range(2000):
        table = {key: rng.choice(VALUES) for key in KEYS}
        key = rng.choice(KEYS)
        lines.append({"id": f"lookup-{number}", "task": "lookup", "answer": table[key],
                      "messages": [{"role": "user", "content": key}], "entry": json.dumps(table),
                      "split": "train" if number < 1800 else "held_out"})  # fmt: skip
    return lines
