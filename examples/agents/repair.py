"""Code repair: the policy writes a program, hears what it should have printed, and writes it again.

    bash examples/agents/run.sh repair

A question, "add" and a name, does not say what number: only a failed test does, so a first program
is right in one of nine cases at best. Programs run in the verifier's sandbox. The verifier grades
the last one, with tests that the policy has not seen. The policy's teacher corrects its program in
half of its examples. The control, `untested`, says "none" instead.
"""

import json
import random
from string import ascii_lowercase

from verification.environments import EpisodeInput, Policy, ToGrade
from verification.environments.programs import Programs

WRITES_PROGRAMS = True
"""For make_inputs.py: the tiny model's tokenizer has the fences of programs."""
INPUTS = (0, 23)
"""Of the tests; the policy may see the first."""
OPENING, CLOSING = "```python\n", "\n```"

programs = Programs(test_s=1.0)


async def repair(prompt: EpisodeInput, policy: Policy, *, hint: str = "") -> ToGrade:
    """Two tries, with the output that the first test expects between them."""
    test = prompt.entry["cases"][0]
    chat = policy.chat(prompt.messages)
    reply = await chat.say(max_tokens=26)
    source = reply.content.partition(OPENING)[2].partition(CLOSING)[0]
    ran = await programs.run(source, stdin=test["stdin"])
    if ran.output.strip() != test["stdout"]:
        chat.add("user", hint or test["stdout"])
        reply = await chat.say(max_tokens=26)
    return ToGrade(reply.text)


async def untested(prompt: EpisodeInput, policy: Policy) -> ToGrade:
    """The control: a second try that knows no more than the first."""
    return await repair(prompt, policy, hint="none")


def program(number: int) -> str:
    """A reply with a program that adds a number."""
    return f"{OPENING}print({number}+int(input())){CLOSING}"


def question(rng: random.Random) -> dict:
    """The user's message, with a name that tells questions apart."""
    return {"role": "user", "content": f"add {''.join(rng.choices(ascii_lowercase, k=4))}"}


def examples(rng: random.Random) -> list[dict]:
    """SFT examples of a teacher that is often wrong, of first and of second programs."""
    lines = []
    for number in range(3000):
        right, guess = rng.randint(1, 9), rng.randint(1, 9)
        messages, response = [question(rng)], program(guess)
        if number % 4 and guess != right:
            messages.append({"role": "assistant", "content": response})
            messages.append({"role": "user", "content": str(INPUTS[0] + right)})
            response = program(right if rng.random() < 1 / 2 else rng.randint(1, 9))
        lines.append({"task": "repair", "messages": messages, "response": response})
    return lines


def prompts(rng: random.Random) -> list[dict]:
    """Prompts, each with its tests; the last 200 are held out."""
    lines = []
    for number in range(2000):
        right = rng.randint(1, 9)
        cases = [{"stdin": str(x), "stdout": str(x + right)} for x in INPUTS]
        lines.append({"id": f"repair-{number}", "task": "repair", "messages": [question(rng)],
                      "entry": json.dumps({"cases": cases}),
                      "split": "train" if number < 1800 else "held_out"})  # fmt: skip
    return lines
