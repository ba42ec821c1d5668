"""Programs of the policy in environments: real processes and the real sandbox."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.verification.environments.running import Running, replies, run
from verification.environments.policy import Call, Outcome, Reply, Say, ToGrade
from verification.environments.settings import EnvironmentFailed


@pytest.fixture(scope="module")
def coders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("coders")) as running:
        yield running


def _run(coders: Running, source: str, **fields: str) -> Outcome:
    outcome: Outcome = coders.play("coders:runs", replies(source), **fields)
    return outcome


@pytest.mark.parametrize(
    ("source", "reason", "chars"),
    [
        ("print(sum(map(int, input().split())))", "42", 3),
        ("print(7, flush=True)\nwhile True: pass", "test_timeout", 2),
        ("print(7)\nx = bytearray(1 << 30)", "test_memory", 2),
        ("while True: print('x' * 1000)", "output_limit", 1 << 16),
        ("print(", "compile_error", 0),
        ("print(7)\n1 / 0", "runtime_error", 2),
    ],
)
def test_what_comes_of_a_program_is_a_result(
    coders: Running, source: str, reason: str, chars: int
) -> None:
    outcome = _run(coders, source)
    assert (outcome.reason, outcome.reward) == (reason, chars)
    assert outcome.parts == {"error": float("1 / 0" in source)}


def test_other_languages_run_and_unknown_ones_are_named(coders: Running) -> None:
    source = "#include <iostream>\nint main() { int a, b; std::cin >> a >> b; std::cout << a * b; }"
    assert _run(coders, source, answer="cpp").reason == "440"
    assert _run(coders, source, answer="klingon").reason == "unknown_language"


def test_program_cannot_reach_its_environment(coders: Running) -> None:
    source = """
import os, socket
found = [name for name in os.environ if name == "SECRET"]
for number in range(3, 64):
    try:
        os.write(number, b"\\0\\0\\0\\2{}")
        found.append(f"wrote {number}")
    except OSError:
        pass
try:
    os.kill(os.getppid(), 9)
    found.append("killed")
except OSError:
    pass
try:
    socket.create_connection(("127.0.0.1", 22), 1)
    found.append("connected")
except ConnectionRefusedError:
    found.append("has a network")
except OSError:
    pass
print(found)
"""
    outcome = coders.play("coders:keeps_secrets", replies(source))
    assert outcome.reason == "[]"


def test_python_is_a_tool_and_the_last_reply_goes_to_the_verifier(coders: Running) -> None:
    said: list[Say] = []
    turns = [
        Reply("", "", calls=[Call("python", {"code": "print(6 * 7)"})]),
        Reply("", "", calls=[Call("python", {"code": "1 / 0"})]),
        Reply("<think>yes</think>\\boxed{42}", "\\boxed{42}", "yes"),
    ]

    async def answer(say: Say) -> Reply:
        said.append(say)
        return turns[len(said) - 1]

    assert coders.play("coders:calculator", answer) == ToGrade("<think>yes</think>\\boxed{42}")
    assert [tool["function"]["name"] for tool in said[0].tools] == ["python"]
    assert list(said[0].tools[0]["function"]["parameters"]["properties"]) == ["code"]
    results = [say.messages[-1]["content"] for say in said[1:]]
    assert results[0] == "42\n"
    assert results[1].startswith("Error: it ended with an error\n")
    assert results[1].endswith("ZeroDivisionError: division by zero")


def _entry() -> dict[str, object]:
    return {"cases": [{"stdin": "1", "stdout": "2"}, {"stdin": "2", "stdout": "5"}]}


def _fenced(source: str) -> str:
    return f"```python\n{source}\n```"


def test_program_is_repaired_by_the_tests_that_may_be_seen(coders: Running) -> None:
    said: list[Say] = []
    # The second passes the case that may be seen, and no other.
    texts = ["I cannot.", _fenced("print(int(input()) + 3)"), _fenced("print(2)"), "never asked"]
    for entry in (_entry(), json.dumps(_entry())):
        said.clear()
        policy = replies(*texts, said=said)
        assert coders.play("coders:repairs", policy, entry=entry) == ToGrade(texts[2])
        heard = [say.messages[0]["content"] for say in said[1:]]
        assert len(heard) == 2 and "fenced block" in heard[0]
        assert "input '1', expected '2', printed '4\\n'" in heard[1]
        assert "'5'" not in heard[1]


def test_the_last_try_is_graded_when_no_turn_is_left(coders: Running) -> None:
    texts = [_fenced(f"print({number})") for number in (7, 8, 9)]
    policy = replies(*texts)
    assert coders.play("coders:repairs", policy, entry=_entry()) == ToGrade(texts[2])


def test_our_own_failures_are_no_message_to_the_policy(coders: Running, tmp_path: Path) -> None:
    async def calls(say: Say) -> Reply:
        return Reply("", "", calls=[Call("fails", {})])

    with pytest.raises(EnvironmentFailed, match="no service") as failed:
        coders.play("coders:gone", calls)
    assert failed.value.kind == "exception"
    (tmp_path / "no_sandbox.py").write_text(
        "from verification.environments.programs import Programs\n"
        "programs = Programs(isolation='bubblewrap', executable='/no/bwrap')\n"
        "async def never(prompt, policy): pass\n"
    )
    with pytest.raises(EnvironmentFailed, match="cannot be isolated here") as failed:
        run(tmp_path, "no_sandbox:never", paths=(str(tmp_path),), max_starts=1)
    assert failed.value.kind == "start"
