"""Sockets with keys: the run's own peers get through, nobody else does."""

import stat
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from megatron_rl.protocol.keys import Keys, load_keys, make_keys
from megatron_rl.protocol.types import NextBatch, Stop
from megatron_rl.protocol.wire import DeadlineExceeded, Dealer, Router
from tests.ports import free_port

ADDRESS = "127.0.0.2"
"""Not one of wire.LOOPBACK, so that it needs keys."""
SILENCE_S = 0.5


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    make_keys(tmp_path / "keys")
    found = load_keys(tmp_path / "keys")
    assert found is not None
    return found


def test_peers_with_the_keys_exchange_messages(keys: Keys) -> None:
    port = free_port()
    with Router(ADDRESS, port, keys) as router, Dealer(f"{ADDRESS}:{port}", "a", keys) as dealer:
        dealer.send(NextBatch(1, 0, 1))
        assert router.receive(60.0) == ("a", NextBatch(1, 0, 1))
        assert router.send("a", Stop("x")) and dealer.receive(60.0) == Stop("x")


def test_a_peer_without_the_keys_is_not_heard(keys: Keys, tmp_path: Path) -> None:
    make_keys(tmp_path / "other")
    port = free_port()
    with Router(ADDRESS, port, keys) as router:
        for strange in (None, load_keys(tmp_path / "other")):
            with Dealer(f"{ADDRESS}:{port}", "stranger", strange) as dealer:
                # What it cannot send must not hold up its end.
                dealer.socket.setsockopt(zmq.LINGER, 0)
                # A refusal that comes before the message leaves it nowhere to wait.
                with suppress(DeadlineExceeded):
                    dealer.send(NextBatch(1, 0, 1))
                assert router.receive(SILENCE_S) is None
                assert not router.send("stranger", Stop())


def test_keys_are_for_this_user_alone_and_never_made_twice(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    files = list((tmp_path / "keys").iterdir())
    assert len(files) == 2 and {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    first = load_keys(tmp_path / "keys")
    with pytest.raises(FileExistsError):
        make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    assert first is not None and first != load_keys(tmp_path / "others")
    assert load_keys(None) is None
