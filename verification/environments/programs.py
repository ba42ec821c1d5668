"""Programs of the policy in the verifier's sandbox, for environments; and two environments of them.

    [reward.tasks.math]
    environment = "verification.environments.programs:python"     # a Python tool
    [reward.tasks.code]
    environment = "verification.environments.programs:repair"     # what failed, and another try

Runs in the environment's process, under the run's own interpreter: the sandbox needs our packages.
The verifier grades the last reply of both environments, by the task's `compare`.
"""

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from verification.code.grading import Ran, grade, run_program
from verification.code.problem import CodeTests, parse_tests
from verification.code.setup import CodeLimits, resolve
from verification.environments.policy import (
    EpisodeInput,
    Policy,
    PolicyLimit,
    ToGrade,
    Unavailable,
)
from verification.environments.tools import tools_episode
from verification.format import code as find_program
from verification.verdict import GradingError, Verdict

T = TypeVar("T")

MAX_SHOWN_CHARS = 4000
"""Of a program's output the policy sees the start."""
MAX_TURNS = 4
_ENDINGS = {
    "test_timeout": "it took too long", "test_memory": "it ran out of memory",
    "output_limit": "it printed too much", "compile_error": "it is no valid program",
    "compile_timeout": "compiling took too long", "runtime_error": "it ended with an error",
}  # fmt: skip


class Programs:
    """Runs programs, one at a time. Make one when your module is imported: that tries the sandbox.

    A program that fails is a result. Our own failure raises Unavailable, so that the episode is
    retried.
    """

    def __init__(self, **limits: Any) -> None:
        """limits: of `CodeLimits`, such as test_s=2. Raises GradingError without a sandbox."""
        self._limits = CodeLimits(**limits)
        resolve(self._limits)
        self._turn = asyncio.Lock()

    async def run(self, source: str, *, stdin: str = "", language: str = "python") -> Ran:
        """Run a program on an input. Raises Unavailable."""
        return await self._call(
            functools.partial(run_program, source, language, stdin=stdin, limits=self._limits)
        )

    async def check(
        self, source: str, tests: CodeTests, *, language: str = "python", seed: int = 0
    ) -> Verdict:
        """The verdict of tests, as the verifier finds it. Raises Unavailable."""
        return await self._call(
            functools.partial(grade, source, language, tests, seed=seed, limits=self._limits)
        )

    async def _call(self, body: Callable[[], T]) -> T:
        # In a thread, so that the episode's event loop stays free.
        async with self._turn:
            try:
                return await asyncio.to_thread(body)
            except GradingError as error:
                raise Unavailable(f"a program could not be run: {error}") from error


def python_tool(programs: Programs) -> Callable[[str], Coroutine[Any, Any, str]]:
    """The tool `python` for `tools_episode`."""

    async def python(code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The whole program. Nothing remains of earlier programs.
        """
        return describe(await programs.run(code))

    return python


def describe(ran: Ran) -> str:
    """What came of a program, for the policy."""
    shown = ran.output[:MAX_SHOWN_CHARS]
    if not ran.reason:
        return shown or "It printed nothing."
    how = _ENDINGS.get(ran.reason, ran.reason)
    return f"{shown}\nError: {how}\n{ran.errors[-MAX_SHOWN_CHARS:]}".strip()


async def repair_program(
    prompt: EpisodeInput, policy: Policy, programs: Programs, *, shown: int = 1,
    max_turns: int = MAX_TURNS, max_tokens: int | None = None,
) -> ToGrade:  # fmt: skip
    """Let the policy write a program, and correct it by the failures of tests that it may see.

    prompt.entry: the tests of a code prompt. Their first `shown` cases are run; unit tests are run
    whole. It ends when these pass, or with the last of max_turns replies.
    """
    tests = visible_tests(prompt.entry, shown)
    chat = policy.chat(prompt.messages)
    reply = await chat.say(max_tokens=max_tokens)
    for _ in range(max_turns - 1):
        fault = await _find_fault(programs, reply.content, tests, prompt.seed)
        if not fault:
            break
        chat.add("user", fault)
        try:
            reply = await chat.say(max_tokens=max_tokens)
        except PolicyLimit:
            break
    return ToGrade(reply.text)


def visible_tests(entry: Any, shown: int) -> CodeTests:
    """The tests that the policy may see. Raises GradingError for an entry that has none."""
    tests = parse_tests(entry if isinstance(entry, str) else json.dumps(entry))
    return msgspec.structs.replace(tests, cases=tests.cases[:shown])


async def _find_fault(programs: Programs, reply: str, tests: CodeTests, seed: int) -> str:
    """What is wrong with the reply's program, for the policy; "" if its tests pass."""
    found = find_program(reply, "")
    if found.refusal:
        return "Write the program in one fenced block with a language tag, such as ```python."
    verdict = await programs.check(found.answer, tests, language=found.tag, seed=seed)
    return "" if verdict.is_correct else describe_fault(verdict)


def describe_fault(verdict: Verdict) -> str:
    """What a program's first failed test found, for the policy."""
    how = _ENDINGS.get(verdict.reason, verdict.reason.replace("_", " "))
    return f"The program is wrong: {how}. {verdict.detail}\nWrite the whole program again."


@functools.cache
def _programs() -> Programs:
    return Programs()


async def python(prompt: EpisodeInput, policy: Policy) -> Any:
    """The policy may call a Python tool; the verifier grades its last reply."""
    return await tools_episode([python_tool(_programs())])(prompt, policy)


async def repair(prompt: EpisodeInput, policy: Policy) -> ToGrade:
    """The policy writes a program, and may correct it; the verifier grades the last one."""
    return await repair_program(prompt, policy, _programs())


# Called once, before episodes are forked.
python.__dict__["prepare"] = repair.__dict__["prepare"] = _programs
