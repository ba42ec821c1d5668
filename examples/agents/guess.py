"""Number guessing: the policy guesses a secret number and hears whether it is higher or lower.

    bash examples/agents/run.sh guess

The policy's teacher listens in a third of its examples, and else says any number. Whoever begins
with 2 and listens is always right. Two controls have the same rewards. `one_shot` has one guess:
right in one of three cases at best. `blind` has both guesses and hears nothing: two of three.
"""

import random

from verification.environments import EpisodeInput, Outcome, Policy

NUMBERS = "123"
GUESSES = 2


async def guess(
    prompt: EpisodeInput, policy: Policy, guesses: int = GUESSES, *, is_blind: bool = False
) -> Outcome:
    """Reward 1 for a right guess, however late."""
    chat = policy.chat(prompt.messages)
    for _ in range(guesses):
        reply = await chat.say(max_tokens=2)
        if reply.content == prompt.answer:
            return Outcome(1.0, "correct")
        if len(reply.content) != 1 or reply.content not in NUMBERS:
            return Outcome(0.0, "no_number")
        hint = "+" if reply.content < prompt.answer else "-"
        chat.add("user", "x" if is_blind else hint)
    return Outcome(0.0, "out_of_guesses")


async def one_shot(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Control: a single guess."""
    return await guess(prompt, policy, guesses=1)


async def blind(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Control: as many guesses, and nothing to hear."""
    return await guess(prompt, policy, is_blind=True)


def examples(rng: random.Random) -> list[dict]:
    """SFT examples: first guesses, and guesses behind a hint that few of them heed."""
    lines = []
    for number in range(2000):
        messages, answer = [{"role": "user", "content": "n"}], rng.choice(NUMBERS)
        if number % 2:
            first, hint = rng.choice(["1+", "2+", "2-", "3-", "1x", "2x", "3x"])
            messages.append({"role": "assistant", "content": first})
            messages.append({"role": "user", "content": hint})
            fitting = {"+": NUMBERS[int(first) :], "-": NUMBERS[: int(first) - 1]}.get(hint)
            if fitting and rng.random() < 1 / 3:
                answer = rng.choice(fitting)
        lines.append({"task": "guess", "messages": messages, "response": answer})
    return lines


def prompts(rng: random.Random) -> list[dict]:
    """Prompts that look alike, each with a secret of its own; the last 300 are held out."""
    question = [{"role": "user", "content": "n"}]
    return [
        {"id": f"guess-{number}", "task": "guess", "messages": question,
         "answer": rng.choice(NUMBERS), "split": "train" if number < 1800 else "held_out"}
        for number in range(2100)
    ]  # fmt: skip
