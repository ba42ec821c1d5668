"""Environments with programs, for tests."""

import os

from verification.environments import EpisodeInput, Outcome, Policy, Unavailable, tools_episode
from verification.environments.programs import Programs, python_tool, repair_program

programs = Programs(test_s=1.0, test_memory_bytes=256 << 20, output_bytes=1 << 16)


async def runs(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Runs what the policy says on an input; the result is in the outcome's name and reward."""
    reply = await policy.chat(prompt.messages).say()
    ran = await programs.run(reply.text, stdin="20 22", language=prompt.answer or "python")
    has_error = float("ZeroDivisionError: division by zero" in ran.errors)
    return Outcome(float(len(ran.output)), ran.reason or ran.output.strip(), {"error": has_error})


async def keeps_secrets(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Runs a program that looks for this process's descriptors, variables and parents."""
    os.environ["SECRET"] = "x"
    reply = await policy.chat(prompt.messages).say()
    return Outcome(1.0, (await programs.run(reply.text)).output.strip())


calculator = tools_episode([python_tool(programs)], max_turns=3)


async def repairs(prompt: EpisodeInput, policy: Policy) -> object:
    """Two tries, of which the first case may be seen."""
    return await repair_program(prompt, policy, programs, max_turns=3)


def fails() -> str:
    """A tool whose service is gone."""
    raise Unavailable("no service")


gone = tools_episode([fails])
