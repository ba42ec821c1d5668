"""Environments that hang, crash, flood, fork and kill: contained, named and cleaned up."""

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.verification.environments.running import (
    FOLDER,
    PATIENCE_S,
    Running,
    is_alive,
    processes,
    prompt,
    replies,
    run,
    settings,
    wait_until,
)
from verification.environments.episode import Clock
from verification.environments.host import EnvironmentHost
from verification.environments.keeper import MAX_LOGGED_BYTES
from verification.environments.policy import (
    JudgeInput,
    Outcome,
    PolicyLimit,
    Reply,
    Say,
    Verdict,
)
from verification.environments.settings import EnvironmentFailed

TURN_TIMEOUT_S = 4.0
GOOD = "Outcome(1, 'x')"
SAY = {
    "say": 1, "chat": 1, "parent": None, "parent_turns": 0, "messages": [], "tools": [],
    "max_tokens": None,
}  # fmt: skip
JUDGE = {"judge": 1, "messages": [], "verdicts": ["Yes"], "max_tokens": 0}
ROOT = Path(__file__).resolve().parents[3]


class Hostile(Running):
    """Environments of hostile.py, by name."""

    def start(self, name: str, entry: Any = None, **fields: Any) -> Coroutine[Any, Any, Outcome]:
        """An episode that gets no turn."""
        task = prompt(task=name, entry=entry, **fields)
        return self.host.run("hostile:named", task, self._refuse, judge=self._judge)

    def failure(self, name: str, entry: Any = None) -> tuple[str, str]:
        """(kind, reason) of an episode's failure."""
        with pytest.raises(EnvironmentFailed) as failed:
            self.wait(self.start(name, entry))
        return failed.value.kind, failed.value.reason

    @staticmethod
    async def _refuse(say: Say) -> Reply:
        """A policy that reached its limit, at once or later."""
        await asyncio.sleep(say.max_tokens or 0)
        raise PolicyLimit("out_of_tokens")

    @staticmethod
    async def _judge(asked: JudgeInput) -> Verdict:
        return Verdict([], "", "none is there")

    def log(self) -> str:
        """The log so far."""
        return (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    folder = tmp_path_factory.mktemp("hostile")
    limits = {"turn_timeout_s": TURN_TIMEOUT_S, "memory_bytes": 1 << 30}
    with Hostile(folder, **limits, max_message_bytes=1 << 16) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "entry", "kind", "reason"),
    [
        ("abort", None, "crash", r"process ended .*SIGABRT.*/hostile.py\", line \d+ in abort"),
        ("crash", None, "crash", r"process ended .*SIGSEGV.*in string_at"),
        ("leave", None, "crash", r"process ended \(exit code 0"),
        ("exit", None, "exception", r"SystemExit: 3 \(.*/hostile.py:\d+ in exit\)"),
        ("fail", None, "exception", r"ZeroDivisionError: .*/hostile.py:\d+ in fail\)"),
        ("fail_together", None, "exception", r"^ZeroDivisionError: first; KeyError: 'second'$"),
        ("eat", None, "exception", r"MemoryError \(.*/hostile.py:\d+ in eat\)"),
        ("ask_much", None, "flood", "over 64 requests at once"),
        ("swallow", None, "flood", "after 256 were refused: out_of_tokens"),
        ("send", "ffffffff", "flood", "4294967295 bytes, allowed are 65536"),
        ("send", "0000000566666666", "crash", "malformed message"),
        ("send", "000000025b5d", "crash", "a list, expected an object"),
        ("return_it", "None", "bad_outcome", "returned a NoneType, expected an Outcome"),
        ("return_it", "1.0", "bad_outcome", "returned a float"),
        ("return_it", "Outcome(float('nan'), 'x')", "bad_outcome", "reward is nan"),
        ("return_it", "Outcome(1e300, 'x')", "bad_outcome", r"reward is 1e\+300.*-1e\+24 to 1e"),
        ("return_it", "Outcome(10**400, 'x')", "bad_outcome", "reward is 1000.* to 1e"),
        ("return_it", "Outcome('1', 'x')", "bad_outcome", "reward is '1'"),
        ("return_it", "policy.chat([{'role': 'user'}])", "exception", "is no message: expected"),
        (
            "return_it",
            "policy.chat().say(max_tokens=2.5).send(None)",
            "exception",
            "=2.5: expected",
        ),
        ("return_it", "Outcome(1, 'x' * 201)", "bad_outcome", "reason is 'xxx"),
        ("return_it", "Outcome(1, '')", "bad_outcome", "reason is ''"),
        ("return_it", "Outcome(1, 'x', {'a': 1e999})", "bad_outcome", "a is inf"),
        ("return_it", "Outcome(1, 'x', {'environment': 1})", "bad_outcome", "leave .*: rename it"),
        ("return_it", "Outcome(1, 'x', turn_rewards=None)", "bad_outcome", "turn_rewards are None"),
        ("return_it", "Outcome(1, 'x', turn_returns='1')", "bad_outcome", "turn_returns are '1'"),
        ("return_it", "Outcome(1, 'x', [1])", "bad_outcome", r"parts are \[1\]"),
    ],
)
def test_what_an_environment_does_wrong_has_its_kind_and_place(
    hostile: Hostile, name: str, entry: Any, kind: str, reason: str
) -> None:
    found_kind, found_reason = hostile.failure(name, entry)
    assert found_kind == kind
    assert re.search(reason, found_reason), found_reason


@pytest.mark.parametrize(
    "message",
    [
        {"say": 0}, {"say": None, "chat": 0}, {"outcome": {}}, {"outcome": []}, {},
        {"outcome": {"reward": 1.0, "reason": "x", "parts": {}, "more": 1}},
        {**SAY, "chat": -1}, {**SAY, "chat": 1.0}, {**SAY, "messages": ["x"]},
        {**SAY, "messages": [{"role": "user"}]}, {**SAY, "tools": {}}, {**SAY, "more": 1},
        {**SAY, "parent": 0, "parent_turns": 1},
        {**JUDGE, "temperature": -0.1}, {**JUDGE, "temperature": math.nan},
        {**JUDGE, "temperature": True}, {**JUDGE, "draw": -1}, {**JUDGE, "draw": 1 << 48},
        {**JUDGE, "verdicts": [1]}, {**JUDGE, "messages": [1]}, {**JUDGE, "more": 1},
    ],
)  # fmt: skip
def test_malformed_messages_are_refused(hostile: Hostile, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    kind, reason = hostile.failure("send", (len(body).to_bytes(4, "big") + body).hex())
    assert kind == "crash" and "malformed" in reason


def test_output_is_logged_up_to_a_bound_and_the_episode_goes_on(hostile: Hostile) -> None:
    before = len(hostile.log())
    # 20,000 lines of 101 bytes.
    assert hostile.wait(hostile.start("print_much", id="9")) == Outcome(1.0, "printed")
    logged = hostile.log()[before:].splitlines()
    assert logged[0] == "[hostile:named 9] " + f"{0:100}"
    assert logged[-1] == "[hostile:named 9] [further output is not logged]"
    assert abs(len(logged) - MAX_LOGGED_BYTES / 101) < 3


def test_a_forked_child_says_nothing_to_the_host_and_is_named_once(tmp_path: Path) -> None:
    with Hostile(tmp_path, turn_timeout_s=TURN_TIMEOUT_S) as hostile:
        for what in ("returns", "raises", "awaits", "asks", "listens") * 2:
            end = hostile.wait(hostile.start("fork_and_go_on", what))
            assert end == Outcome(1.0, "out_of_tokens"), what
        assert hostile.log().count("hostile:named forked and its child returned") == 1
        assert hostile.wait(hostile.start("ask_processes")) == Outcome(0.25, "exit_0")


def test_hung_episodes_are_given_up_in_time_and_delay_no_other(
    hostile: Hostile, tmp_path: Path
) -> None:
    async def body() -> tuple[float, list[Any]]:
        started_s = time.monotonic()
        names = ("hang", "wait", "multiply")
        hung = [asyncio.ensure_future(hostile.start(name, str(tmp_path))) for name in names]
        await asyncio.gather(*(hostile.start("return_it", GOOD) for _ in range(5)))
        # The others have ended before any of these is given up.
        assert not any(episode.done() for episode in hung)
        failures = await asyncio.gather(*hung, return_exceptions=True)
        return time.monotonic() - started_s, failures

    used_s, failures = hostile.wait(body())
    assert TURN_TIMEOUT_S < used_s < TURN_TIMEOUT_S + 60
    assert [failure.kind for failure in failures] == ["hang"] * 3
    lines = ("in hang", "in _wait_for_nobody", "in multiply")
    for failure, line in zip(failures, lines, strict=True):
        assert "longer than expert.environments.turn_timeout_s " in failure.reason
        assert re.search(rf"was killed .*/hostile.py\", line \d+ {line}", failure.reason)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) >= 20 and not any(map(is_alive, pids))


@pytest.mark.parametrize(
    ("name", "count"),
    [("fork", 20), ("kill_keeper", 3), ("kill_server", 3)],
)
def test_what_an_episode_leaves_behind_is_killed(
    hostile: Hostile, tmp_path: Path, name: str, count: int
) -> None:
    if name == "fork":
        assert hostile.wait(hostile.start(name, str(tmp_path))) == Outcome(1.0, "forked")
    else:
        kind, _ = hostile.failure(name, str(tmp_path))
        assert kind == "crash"
        # The next one above does it then, the fork server within a second.
        wait_until(lambda: not any(is_alive(int(path.name)) for path in tmp_path.iterdir()))
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) >= count
    assert [pid for pid in pids if is_alive(pid)] == []
    assert hostile.wait(hostile.start("return_it", GOOD)) == Outcome(1.0, "x")


def test_cancelling_kills_the_episode(hostile: Hostile, tmp_path: Path) -> None:
    async def body() -> list[int]:
        playing = asyncio.ensure_future(hostile.start("kill_later", str(tmp_path)))
        while len(list(tmp_path.iterdir())) < 3:
            await asyncio.sleep(0.005)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        return [int(path.name) for path in tmp_path.iterdir()]

    assert [pid for pid in hostile.wait(body()) if is_alive(pid)] == []


def test_the_clock_stops_while_the_policy_generates(tmp_path: Path) -> None:
    async def think(say: Say) -> Reply:
        await asyncio.sleep(1.2)
        return Reply("", "")

    limits = {"turn_timeout_s": 1.0, "episode_timeout_s": 1.0}
    clock = Clock(settings(tmp_path, **limits))
    # As a proxy does for a turn of its own.
    clock.stop()

    async def body() -> list[Outcome | BaseException]:
        runs = [
            running.host.run("games:sleep", prompt(entry=[0.01]), think),
            running.host.run("games:sleep", prompt(entry=[1.2]), replies("1"), clock=clock),
            # 1.5 s in all, although no turn takes longer than allowed.
            running.host.run("games:sleep", prompt(entry=[0.3] * 5), replies(*"12345")),
        ]
        return await asyncio.gather(*runs, return_exceptions=True)

    with Running(tmp_path, **limits) as running:
        first, second, third = running.wait(body())
    assert first == second == Outcome(1.0, "slept")
    assert isinstance(third, EnvironmentFailed) and third.kind == "hang"


def test_a_limited_number_of_episodes_runs_at_once(tmp_path: Path) -> None:
    count = 16
    now: list[int] = []

    async def body() -> list[Outcome]:
        # Opens only when so many wait.
        barrier = asyncio.Barrier(count)

        async def answer(say: Say) -> Reply:
            now.append(len(processes(tmp_path)))
            await asyncio.wait_for(barrier.wait(), PATIENCE_S)
            return Reply("", "")

        async with EnvironmentHost(settings(tmp_path, max_episodes=count)) as host:
            asleep = prompt(entry=[0.0])
            return await asyncio.gather(
                *(host.run("games:sleep", asleep, answer) for _ in range(4 * count))
            )

    assert asyncio.run(body()) == [Outcome(1.0, "slept")] * 4 * count
    # Each has a keeper; the fork server too. An ended keeper is reaped a little later.
    assert len(now) == 4 * count and max(now) <= 2 * count + 2


def _flaky(folder: Path, condition: str) -> None:
    """A module that counts its imports in `folder`."""
    (folder / "flaky.py").write_text(
        "import os, pathlib\n"
        f"count = pathlib.Path({str(folder / 'count')!r})\n"
        "number = int(count.read_text()) + 1 if count.exists() else 1\n"
        "count.write_text(str(number))\n"
        f"if {condition}: raise ImportError(f'start {{number}} failed')\n"
        "from hostile import return_it\n"
    )


def _play_flaky(folder: Path, runs: int, **changes: Any) -> list[str]:
    async def body() -> list[str]:
        found = []
        limits = settings(folder, paths=(FOLDER, str(folder)), first_pause_s=0.001, **changes)
        async with EnvironmentHost(limits) as host:
            for _ in range(runs):
                try:
                    task = prompt(entry=GOOD)
                    outcome = await host.run("flaky:return_it", task, replies())
                    found.append(outcome.reason)
                except EnvironmentFailed as error:
                    assert error.kind == "start"
                    found.append(error.reason)
        return found

    return asyncio.run(body())


def test_an_environment_that_fails_nine_of_ten_starts_works_once_started(tmp_path: Path) -> None:
    _flaky(tmp_path, "number % 10")
    found = _play_flaky(tmp_path, 12, max_starts=20)
    for number, reason in enumerate(found[:9], 1):
        assert 'flaky.py", line 5, in <module>' in reason
        assert reason.endswith(f"ImportError: start {number} failed")
    assert found[9:] == ["x"] * 3
    assert (tmp_path / "count").read_text() == "10"


def test_an_environment_that_never_starts_is_given_up(tmp_path: Path) -> None:
    _flaky(tmp_path, "True")
    found = _play_flaky(tmp_path, 6, max_starts=3)
    assert (tmp_path / "count").read_text() == "3"
    assert all("3 starts failed in a row" in reason for reason in found[3:])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import os; print('last'); os.abort()", "SIGABRT; its last words: last"),
        ("while True: print('x' * 1000)", "the import took over 0.5 s"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_module_that_does_not_import_fails_the_start(
    tmp_path: Path, body: str, reason: str
) -> None:
    (tmp_path / "broken.py").write_text(body)
    start_timeout_s = 0.5 if "0.5 s" in reason else 60
    with pytest.raises(EnvironmentFailed, match=reason):
        run(tmp_path, "broken:x", paths=(str(tmp_path),), start_timeout_s=start_timeout_s)
    assert (tmp_path / "log").stat().st_size < 2 * MAX_LOGGED_BYTES


def test_a_closed_host_leaves_nothing_and_fails_what_runs(tmp_path: Path) -> None:
    daemons = tmp_path / "daemons"
    daemons.mkdir()

    async def body() -> None:
        host = EnvironmentHost(settings(tmp_path))
        playing = [
            asyncio.ensure_future(
                host.run("hostile:kill_later", prompt(entry=str(daemons)), replies())
            )
            for _ in range(3)
        ]
        while len(list(daemons.iterdir())) < 3:
            await asyncio.sleep(0.005)
        await host.close()
        assert processes(tmp_path) == []
        for run_ in playing:
            with pytest.raises(EnvironmentFailed, match="crash"):
                await run_
        with pytest.raises(EnvironmentFailed, match="the host is closed"):
            await host.run("hostile:fork", prompt(), replies())

    asyncio.run(body())
    assert [path for path in daemons.iterdir() if is_alive(int(path.name))] == []


def test_environments_die_with_a_killed_host(tmp_path: Path) -> None:
    daemons = tmp_path / "daemons"
    daemons.mkdir()
    program = f"""
import asyncio
from pathlib import Path
from tests.verification.environments.running import prompt, replies, settings
from verification.environments.episode import Clock
from verification.environments.host import EnvironmentHost
async def body():
    async with EnvironmentHost(settings(Path({str(tmp_path)!r}))) as host:
        await host.run("hostile:kill_later", prompt(entry={str(daemons)!r}), replies())
asyncio.run(body())
"""
    host = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        wait_until(lambda: len(list(daemons.iterdir())) >= 3)
    finally:
        os.kill(host.pid, signal.SIGKILL)
        host.wait(60)
    wait_until(lambda: processes(tmp_path) == [])
    assert [path for path in daemons.iterdir() if is_alive(int(path.name))] == []
