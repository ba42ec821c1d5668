"""Frames that a broken or hostile peer could send, made from frames that a sound peer sends."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, get_args

import msgspec
import psutil
import zmq

from megatron_rl.protocol.frames import Frame, encode_frames
from megatron_rl.protocol.wire import Router, WireError, labelled

Frames = list[bytes]
HOSTILE: list[Any] = [
    math.nan, math.inf, -math.inf, 1e308, -1, 0, 1, 7, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64 - 1,
    "", "x" * 9000, "\x1b[31m\n", "i", "f", "B", "h", b"", b"\x00" * 5, b"\xff" * 400, None, True,
    [], {}, [[]], [-1], {"x": -1}, [0] * 5000,
]  # fmt: skip
NESTED, HUGE = b"\x91" * 3000, b"\xdd\xff\xff\xff\xff"
"""An array in an array in an array; the head of an array of 4 billion elements."""
LABEL = "run"
GROWTH_BYTES = 48 << 20
"""What a receiver may grow by after the first half of its frames."""
BATCH = 200


class Fuzzer:
    """Spoils frames; the same seed spoils them in the same way."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._seen: deque[Frames] = deque(maxlen=100)
        self._ways: list[Callable[[Frames], Frames]] = [
            self._noise, self._cut, self._flip, self._lengthen, self._change, self._change,
            self._change, self._shuffle, self._replay,
        ]  # fmt: skip

    def spoil(self, message: Any) -> Frames:
        """The frames of a message, spoilt in one of many ways; some stay sound."""
        frames = [bytes(frame) for frame in encode_frames(message)]
        self._seen.append(frames)
        return self.chance.choice(self._ways)(frames) or [b""]

    def _noise(self, frames: Frames) -> Frames:
        return [self.chance.randbytes(self.chance.randrange(200)) for _ in range(len(frames))]

    def _pick(self, frames: Frames, change: Callable[[bytes], bytes]) -> Frames:
        place = self.chance.randrange(len(frames))
        return [change(frame) if n == place else frame for n, frame in enumerate(frames)]

    def _cut(self, frames: Frames) -> Frames:
        return self._pick(frames, lambda frame: frame[: self.chance.randrange(len(frame) + 1)])

    def _flip(self, frames: Frames) -> Frames:
        def flip(frame: bytes) -> bytes:
            found = bytearray(frame or b"\x00")
            for _ in range(self.chance.randrange(1, 9)):
                found[self.chance.randrange(len(found))] ^= 1 << self.chance.randrange(8)
            return bytes(found)

        return self._pick(frames, flip)

    def _lengthen(self, frames: Frames) -> Frames:
        more = self.chance.choice([NESTED, HUGE, b"\x00" * 70_000, frames[0]])
        return self._pick(
            frames, lambda frame: frame[: self.chance.randrange(len(frame) + 1)] + more
        )

    def _shuffle(self, frames: Frames) -> Frames:
        found = [*frames, self.chance.choice(frames), self.chance.randbytes(40_000)]
        self.chance.shuffle(found)
        return found[: self.chance.randrange(1, 4)]

    def _replay(self, frames: Frames) -> Frames:
        return self.chance.choice(self._seen)

    def _change(self, frames: Frames) -> Frames:
        """Put a hostile value into a field, however deep."""
        value = msgspec.msgpack.decode(frames[0])
        return [msgspec.msgpack.encode(self._changed(value)), *frames[1:]]

    def _changed(self, value: Any) -> Any:
        if isinstance(value, dict) and value:
            key = self.chance.choice([*value])
            if self.chance.random() < 0.05:
                return {k: v for k, v in value.items() if k != key}
            # The kind stays, mostly: an unknown one is refused at once.
            if key == "type" and self.chance.random() < 0.9:
                return self._changed(value)
            return {**value, key: self._changed(value[key])}
        if isinstance(value, list) and value and self.chance.random() < 0.8:
            place = self.chance.randrange(len(value))
            return [self._changed(v) if n == place else v for n, v in enumerate(value)]
        if isinstance(value, bytes) and value and self.chance.random() < 0.6:
            step = 4 * self.chance.randrange(1, 3)
            return self.chance.choice(
                [value[:-step], value + value[:step], value[:-1], b"\xff" * 4]
            )
        return self.chance.choice(HOSTILE)


def of_kinds(messages: list[Any], kinds: Any) -> list[Any]:
    """The messages of a union of kinds."""
    return [one for one in messages if isinstance(one, get_args(kinds) or kinds)]


@contextmanager
def replayable(frames: list[Frame]) -> Iterator[None]:
    """A refusal passes; any other error tells the frames that led to it."""
    try:
        yield
    except WireError:
        pass
    except Exception as error:
        told = [bytes(frame)[:4000].hex() for frame in frames]
        raise AssertionError(
            f"{error!r} after the frames (hex, first 4000 bytes) {told}"
        ) from error


class Memory:
    """Resident memory of this process after the first half of a number of frames."""

    def __init__(self, frames: int) -> None:
        self._half, self._base = frames // 2, 0

    def look(self, sent: int) -> None:
        """Note the memory; fails if it has grown."""
        now = psutil.Process().memory_info().rss
        if sent <= self._half or not self._base:
            self._base = now
        assert now - self._base < GROWTH_BYTES, (sent, self._base, now)


class Counted(Router):
    """A ROUTER that counts what it hears."""

    heard = raised = 0

    def _hear(self, arrived: list[Frame]) -> Any:
        try:
            found = super()._hear(arrived)
        except WireError:
            self.raised += 1
            raise
        self.heard += found is not None
        return found

    @property
    def arrived(self) -> int:
        return self.heard + self.raised + self.turned_away.total()


class Attack:
    """DEALERs that send spoilt frames to a ROUTER: one has a known name, and one no label."""

    def __init__(self, address: str, honest: str, seed: int) -> None:
        self.fuzzer, self.sent = Fuzzer(seed), 0
        self._context = zmq.Context()
        self._dealers = []
        for identity in (labelled(honest, LABEL), labelled("stranger", LABEL), b"\x00\xff\n"):
            dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, identity)
            dealer.connect(f"tcp://{address}")
            self._dealers.append(dealer)
        self.last: deque[Frames] = deque(maxlen=BATCH)

    def send(self, messages: list[Any], count: int) -> None:
        """Send spoilt frames of these messages."""
        for _ in range(count):
            frames = self.fuzzer.spoil(self.fuzzer.chance.choice(messages))
            self.last.append(frames)
            self.fuzzer.chance.choices(self._dealers, (5, 4, 1))[0].send_multipart(frames)
            self.sent += 1
        for dealer in self._dealers:
            while dealer.poll(0):
                dealer.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def run_attack(
    attack: Attack,
    router: Counted,
    *,
    frames: int,
    messages: Callable[[], list[Any]],
    read: Callable[[], None],
) -> None:
    """Send frames in batches; `read` handles what has arrived. Everything is counted."""
    memory = Memory(frames)
    while attack.sent < frames:
        attack.send(messages(), min(BATCH, frames - attack.sent))
        ends_at = time.monotonic() + 60
        while router.arrived < attack.sent:
            assert time.monotonic() < ends_at, (router.arrived, attack.sent)
            with replayable([frame for one in attack.last for frame in one]):
                read()
        memory.look(attack.sent)
    assert router.arrived == attack.sent
    assert router.refused.total() >= router.raised > 0 and router.heard > 0
    assert router.turned_away.total() > 0
