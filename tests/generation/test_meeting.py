"""The parts of an engine across nodes: how they meet, and what the end of one does to the others.

The leader's and the followers' code is the real one; a sleeping process stands for SGLang's server.
"""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from generation import follower, meeting
from generation.child import ServerChild
from generation.meeting import Call, Meeting, answer, call_path, read_call
from generation.sglang_command import server_command, server_environment
from generation.sglang_nodes import node_setup
from generation.sglang_orders import ORDERS_VARIABLE, Nothing, read_order, write_order
from generation.weight_client import room_wait
from megatron_rl.config.files import load_config
from megatron_rl.protocol.exports import COLD_START
from megatron_rl.protocol.wire import DeadlineExceeded
from tests.generation.test_engine_contract import make_setup

LIMIT_S = 60
HERE, MEETS_AT = "127.0.0.1", "127.0.0.1:4321"


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, LIMIT_S))


def test_a_follower_learns_whether_the_run_or_a_life_is_over(tmp_path: Path) -> None:
    async def play(*, is_over: bool) -> bool:
        path = call_path(tmp_path, 3)
        leader = Meeting(path, HERE, 1, MEETS_AT)
        await leader.open()
        call, listener = await answer(path, 1, known="", patience_s=30)
        assert call.session == leader.session
        waiting = asyncio.ensure_future(listener.wait())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await leader.close(is_over=is_over)
        assert read_call(path) is None
        return await waiting

    assert run(play(is_over=True)) is True
    assert run(play(is_over=False)) is False


@pytest.mark.parametrize("end", ["closes", "falls silent"])
def test_the_leader_notices_a_follower_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(meeting, "SILENT_S", 50.0 if end == "closes" else 0.5)

    async def play() -> tuple[str, float]:
        leader = Meeting(tmp_path / "call", HERE, 2, MEETS_AT)
        await leader.open()
        pairs = [await answer(tmp_path / "call", rank, known="", patience_s=30) for rank in (1, 2)]
        # Nobody beats for them: the first is silent by itself.
        if end == "closes":
            pairs[1][1].close()
        began = time.monotonic()
        reason = await leader.lost()
        await leader.close(is_over=False)
        return reason, time.monotonic() - began

    reason, took_s = run(play())
    part = 2 if end == "closes" else 1
    assert f"the engine's part {part} of 3, on another node, ended or fell silent" in reason
    assert took_s < 20


def test_strangers_and_second_comers_are_sent_away(tmp_path: Path) -> None:
    async def play() -> list[bytes]:
        leader = Meeting(tmp_path / "call", HERE, 1, MEETS_AT)
        await leader.open()
        call, _ = await answer(tmp_path / "call", 1, known="", patience_s=30)
        await asyncio.sleep(0.1)
        found = []
        known = [f"{call.session} {rank}" for rank in (1, 2, 0)]
        for line in (*known, "0" * 32 + " 1", "GET /"):
            reader, writer = await asyncio.open_connection(call.address, call.port)
            writer.write(line.encode() + b"\n")
            found.append(await reader.read())
            writer.close()
        await leader.close(is_over=False)
        return found

    # Not even a beat: their connections are closed.
    assert run(play()) == [b""] * 5


def test_a_call_of_an_earlier_job_is_replaced_and_none_ends_the_wait(tmp_path: Path) -> None:
    path = call_path(tmp_path, 0)
    path.parent.mkdir()
    # Port 1 of this host refuses.
    path.write_text(json.dumps({"address": HERE, "port": 1, "session": "old", "meets_at": ""}))
    assert read_call(path) == Call(HERE, 1, "old", "") and read_call(path, known="old") is None

    async def play() -> str:
        # A call counts although the folder is not there.
        waiting = answer(path, 1, known="", patience_s=10, after=tmp_path / "absent")
        following = asyncio.ensure_future(waiting)
        await asyncio.sleep(1)
        leader = Meeting(path, HERE, 1, MEETS_AT)
        await leader.open()
        call, _ = await following
        assert call.session == leader.session
        await leader.close(is_over=False)
        with pytest.raises(TimeoutError):
            await answer(path, 1, known="", patience_s=0.6)
        return call.session

    assert run(play())


def test_a_follower_runs_one_server_a_life_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First its leader dies, then its own server; in the third life the run ends."""
    commands: list[list[str]] = []
    children: list[ServerChild] = []

    def command(setup: Any, loader: str) -> list[str]:
        commands.append(server_command(setup, loader))
        return [sys.executable, "-c", "import time; time.sleep(600)"]

    class Child(ServerChild):
        def __init__(self, log_path: Path) -> None:
            super().__init__(log_path)
            children.append(self)

    monkeypatch.setattr(follower, "server_command", command)
    monkeypatch.setattr(follower, "ServerChild", Child)
    setup = make_setup(tmp_path, tmp_path / "logs" / "sglang-0.log", start_timeout_s=10.0)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("{}")

    async def begun(count: int) -> int:
        """Process id of the server of life `count`."""
        while len(children) < count or children[-1]._process is None:
            await asyncio.sleep(0.05)
        return children[-1]._process.pid

    async def play() -> None:
        path = call_path(tmp_path, 0)
        following = asyncio.ensure_future(follower.follow(setup, path, 1, 2))
        pids = []
        for life in (1, 2, 3):
            leader = Meeting(path, HERE, 1, MEETS_AT)
            await leader.open()
            pids.append(await begun(life))
            while not leader._writers:
                await asyncio.sleep(0.05)
            if life == 2:
                os.kill(pids[-1], signal.SIGKILL)
                assert "part 1 of 2" in await leader.lost()
            await leader.close(is_over=life == 3)
        await following
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(play())
    assert len(commands) == 3
    for words in commands:
        assert {"--nnodes=2", "--node-rank=1", f"--dist-init-addr={MEETS_AT}"} <= set(words)


def test_a_follower_that_nobody_calls_says_so(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, tmp_path / "sglang-0.log", start_timeout_s=0.3)
    with pytest.raises(
        DeadlineExceeded, match="did not call in 0 s .expert.generator.start_timeout_s"
    ):
        run(follower.follow(setup, call_path(tmp_path, 0), 1, 2))


@pytest.mark.parametrize("has_cold_start", [False, True])
def test_a_follower_waits_as_long_as_its_leader_waits_for_room(
    tmp_path: Path, has_cold_start: bool
) -> None:
    """With a cold start without a limit, until its folder is there."""
    settings = [
        f"run.dir={tmp_path}", "model.path=m", "generator.release_memory=true",
        "generator.colocate=true", "weights.method=folder", "weights.kv_cache=recompute",
        "expert.train.batch_timeout_s=0.6", "expert.generator.start_timeout_s=0.2",
        "expert.weights.join_timeout_s=0.2",
    ]  # fmt: skip
    room = room_wait(load_config(None, settings + ["sft.steps=5"] * has_cold_start))
    folder = tmp_path / "hf" / COLD_START
    assert room == (pytest.approx(1.0), folder if has_cold_start else None)
    setup = make_setup(tmp_path, tmp_path / "sglang-0.log", start_timeout_s=0.2)

    async def play() -> float:
        began = time.monotonic()
        following = asyncio.ensure_future(
            follower.follow(setup, call_path(tmp_path, 0), 1, 2, room=room)
        )
        if has_cold_start:
            await asyncio.sleep(2.5)
            assert not following.done()
            folder.mkdir(parents=True)
            began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="did not call in 1 s .*wait for room"):
            await following
        return time.monotonic() - began

    # 0.2 s to call, and 0.6 + 0.2 + 0.2 s for room.
    assert 1.2 <= run(play()) < 20


def test_all_hosts_of_a_life_have_one_file_of_orders_and_a_log_each(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("{}")
    setup = make_setup(tmp_path, tmp_path / "sglang-3.log")
    lead, second = (
        node_setup(setup, rank, 2, meets_at="10.0.0.9:1", session="0123456789") for rank in (0, 1)
    )
    assert (lead.log_path.name, second.log_path.name) == ("sglang-3.log", "sglang-3-node-1.log")
    orders = {server_environment(one)[ORDERS_VARIABLE] for one in (lead, second)}
    assert orders == {str(tmp_path / "sglang-3.01234567.order.json")}
    words = server_command(lead, "loader")
    assert "--node-rank=0" in words and not any("--nccl-port" in word for word in words)
    assert f"--nccl-port={setup.port + 1}" in server_command(setup, "loader")
    assert not any("--nnodes" in word for word in server_command(setup, "loader"))


def test_an_order_that_was_obeyed_is_not_obeyed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank on another host would, whose file system shows the order before this one."""
    path = tmp_path / "orders.json"
    monkeypatch.setenv(ORDERS_VARIABLE, str(path))
    with pytest.raises(TimeoutError, match="no new order"):
        read_order(patience_s=0.1)
    write_order(path, Nothing())
    first = read_order()
    assert first.number == 1
    with pytest.raises(TimeoutError, match="no new order"):
        read_order(after=first.number, patience_s=0.1)
    write_order(path, Nothing())
    assert read_order(after=first.number).number == 2


@pytest.mark.parametrize(("line", "rank"), [("l\u00ebben 3", 0), ("life 3", 3), ("lif 3", 0)])
def test_a_stranger_may_write_anything_to_the_meeting(line: str, rank: int) -> None:
    async def read() -> int:
        reader = asyncio.StreamReader()
        reader.feed_data(f"{line}\n".encode())
        return await meeting._rank_of(reader, "life")

    assert asyncio.run(read()) == rank
