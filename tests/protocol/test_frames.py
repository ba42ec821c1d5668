"""Long arrays travel in frames of their own, uncopied."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from megatron_rl.protocol.frames import (
    APART_BYTES,
    Frame,
    WireError,
    decode,
    decode_frames,
    encode,
    encode_frames,
    join_frames,
    split_frames,
)
from megatron_rl.protocol.types import NextBatch, Rollout, RolloutDone, VersionSpan
from megatron_rl.protocol.wire import Dealer, Router
from tests.ports import free_port
from tests.protocol.test_wire import same

EDGE = APART_BYTES // 4
"""Tokens whose ids are just long enough."""


def done(tokens: int, choices: int = 0) -> RolloutDone:
    chance = np.random.default_rng(tokens)
    return RolloutDone(
        Rollout(
            3,
            1,
            np.arange(4, dtype=np.int32),
            chance.integers(0, 2**31 - 1, tokens, dtype=np.int32),
            -chance.random(tokens, dtype=np.float32),
            [VersionSpan(0, 0, tokens)],
            "stop",
            "text",
            expert_choices=chance.integers(-(2**15), 2**15, choices, dtype=np.int16),
        )
    )


@pytest.mark.parametrize(
    ("tokens", "choices", "frames"),
    [(EDGE - 1, 0, 1), (EDGE, 0, 3), (EDGE - 1, 2 * EDGE - 1, 1), (EDGE - 1, 2 * EDGE, 2)],
)
def test_an_array_that_is_long_enough_has_a_frame_of_its_own(
    tokens: int, choices: int, frames: int
) -> None:
    message = done(tokens, choices)
    sent = encode_frames(message)
    assert len(sent) == frames
    assert same(decode_frames(sent), message) and same(decode(encode(message)), message)
    joined = join_frames(sent)
    assert same(decode_frames(split_frames(joined)), message)


@pytest.mark.parametrize("choices", [APART_BYTES - 1, APART_BYTES, APART_BYTES + 3])
def test_bytes_stay_bytes_in_and_beside_the_message(choices: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 256, choices, dtype=np.uint8)
    rollout = msgspec.structs.replace(done(4).rollout, expert_choices=numbers)
    message = RolloutDone(rollout)
    sent = encode_frames(message)
    assert len(sent) == (1 if choices < APART_BYTES else 2)
    assert same(decode_frames(sent), message) and same(decode(encode(message)), message)
    # Frames of any length, also odd ones, leave those behind them where they may lie.
    assert same(decode_frames(split_frames(join_frames(sent))), message)
    assert decode_frames(sent).rollout.expert_choices.dtype == np.uint8


def test_long_arrays_are_not_copied_on_either_side() -> None:
    rollout = done(EDGE, 2 * EDGE).rollout
    received = decode_frames(encode_frames(RolloutDone(rollout))).rollout
    for name in ("token_ids", "logprobs", "expert_choices"):
        assert np.shares_memory(getattr(rollout, name), getattr(received, name))
    assert not np.shares_memory(rollout.prompt_ids, received.prompt_ids)


def test_arrays_of_joined_frames_are_aligned_whatever_the_message_is_long() -> None:
    for extra in range(8):
        rollout = msgspec.structs.replace(done(EDGE).rollout, text="x" * extra)
        frames = split_frames(join_frames(encode_frames(RolloutDone(rollout))))
        received = decode_frames(frames).rollout
        assert received.token_ids.flags.aligned and received.logprobs.flags.aligned
        assert received.text == "x" * extra and received.logprobs.dtype == np.float32


def replaced(frames: list[Frame], old: bytes, new: bytes) -> list[Frame]:
    assert bytes(frames[0]).count(old) == 1
    return [bytes(frames[0]).replace(old, new), *frames[1:]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: frames[:2],
        lambda frames: [*frames, b"1234"],
        lambda frames: replaced(frames, b"\xa1f\x02", b"\xa1f\x01"),
        lambda frames: replaced(frames, b"\xa1f\x02", b"\xa1f\x03"),
        lambda frames: replaced(frames, b"\xa1f\x02", b"\xa1f\xff"),
        lambda frames: replaced(frames, b"\xa1f\x02", b"\xa1q\x02"),
        lambda frames: [frames[0], bytes(frames[1])[:-1], frames[2]],
    ],
    ids=["one lacks", "one too many", "twice", "beyond", "negative", "kind", "cut"],
)
def test_frames_that_do_not_belong_together_are_a_wire_error(
    spoil: Callable[[list[Frame]], list[Frame]],
) -> None:
    frames = encode_frames(done(EDGE))
    assert same(decode_frames(frames), done(EDGE))
    with pytest.raises(WireError, match="that is no message"):
        decode_frames(spoil(frames))
    # What went wrong with one message is forgotten with the next.
    assert decode(encode(NextBatch(1, 0, 1))) == NextBatch(1, 0, 1)


def test_sockets_carry_long_arrays_both_ways_and_pass_them_on() -> None:
    port, message = free_port(), done(3 * EDGE + 1, 100_001)
    with Router("127.0.0.1", port) as router, Dealer(f"127.0.0.1:{port}", "a") as dealer:
        dealer.send(message)
        received = router.receive(60)
        assert received is not None and received[0] == "a" and same(received[1], message)
        arrived = received[1].rollout
        assert arrived.token_ids.flags.aligned and arrived.logprobs.flags.aligned
        assert router.send("a", received[1])
        del received, arrived
        frames = dealer.receive_frames(5.0)
        assert frames is not None and len(frames) == 4 and same(decode_frames(frames), message)
