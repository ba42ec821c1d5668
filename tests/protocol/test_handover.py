"""A ROUTER outlives connections that their peers replaced, and that then break."""

import subprocess
import sys
import time

import zmq

from megatron_rl.protocol import wire
from megatron_rl.protocol.types import Stop
from megatron_rl.protocol.wire import Dealer, Router
from tests.cable import Cable
from tests.ports import free_port

BEAT_MS = 300


def test_a_router_outlives_a_connection_that_was_replaced_and_then_breaks() -> None:
    # libzmq aborts the process at its fault, so another one plays it.
    played = subprocess.run([sys.executable, "-m", __name__], timeout=200, capture_output=True)
    assert played.returncode == 0, played.stderr.decode()


def _play() -> None:
    options = {zmq.HEARTBEAT_IVL: BEAT_MS, zmq.HEARTBEAT_TIMEOUT: 20_000, zmq.HEARTBEAT_TTL: 2_000}
    wire._HEARTBEATS.update(options)
    port = free_port()
    cable = Cable(port)
    with Router("127.0.0.1", port) as router, Dealer(f"127.0.0.1:{cable.port}", "a") as dealer:
        dealer.send(Stop())
        assert router.receive(60) == ("a", Stop())
        time.sleep(5 * BEAT_MS / 1000)
        cable.cut()
        dealer.send(Stop())
        time.sleep(BEAT_MS / 1000)
        dealer.redial()
        dealer.send(Stop())
        assert router.receive(60) == ("a", Stop())
        cable.break_off()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            router.send("a", Stop())
            assert dealer.receive(60) == Stop()
        assert cable.connections == 2
    cable.close()


if __name__ == "__main__":
    _play()
