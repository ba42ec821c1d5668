"""Parcels arrive whole or are known to be damaged; nobody waits longer than the deadline."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.weights.exchange.packets import (
    ALONE_BYTES,
    TRAILER_BYTES,
    Packet,
    digest_in_place,
    end_of,
    pack,
    unpack,
)
from megatron_rl.weights.exchange.parcels import outgoing
from megatron_rl.weights.exchange.plan import PARCEL_OVERHEAD_BYTES, Move, Parcel
from tests.weights.made_up import buffer_bytes

VERSION = 7


def filled(*size: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(rows: int, columns: int) -> Parcel:
    """All of `a` into all of `b`."""
    return Parcel(0, 1, (Move(rows, columns, "a", 0, 0, "b", 0, 0),))


def lent(
    parameters: dict[str, Tensor], parcel: Parcel, dtype: torch.dtype, *, is_sender: bool
) -> list[Packet]:
    """A parcel's packets, with buffers."""
    packets = end_of(parameters, parcel, dtype, is_sender=is_sender).packets
    lend(packets)
    return packets


def lend(packets: list[Packet]) -> None:
    """Give those that are staged a buffer."""
    for packet in packets:
        if packet.is_staged:
            packet.data = torch.empty(packet.nbytes, dtype=torch.uint8)


def packed(
    parameters: dict[str, Tensor], parcel: Parcel, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """What travels."""
    packets = lent(parameters, parcel, dtype, is_sender=True)
    digest_in_place(packets)
    pack(packets, dtype, version=VERSION)
    return [packet.data for packet in packets]


def unpacked(
    parameters: dict[str, Tensor],
    parcel: Parcel,
    dtype: torch.dtype,
    sent: list[Tensor],
    version: int = VERSION,
) -> bool:
    """Whether what arrives is damaged."""
    packets = lent(parameters, parcel, dtype, is_sender=False)
    for packet, data in zip(packets, sent, strict=True):
        packet.data.copy_(data)
    return bool(unpack(packets, dtype, version))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5, 7])
def test_a_parcel_of_any_size_arrives_at_its_places(dtype: torch.dtype, columns: int) -> None:
    sent = {"a": filled(6, 9, dtype=dtype), "v": filled(5, dtype=dtype, seed=2)}
    got = {"b": torch.zeros(2, 4, 9, dtype=dtype), "w": torch.zeros(8, dtype=dtype)}
    moves = (
        Move(3, columns, "a", 2, 1, "b", 4, 2),
        Move(3, 1, "v", 1, 0, "w", 5, 0),
    )
    parcel = Parcel(0, 1, moves)
    [buffer] = packed(sent, parcel, dtype)
    assert buffer.nbytes == buffer_bytes(parcel, dtype) and buffer.nbytes % 8 == 0
    assert buffer.nbytes <= parcel.size * dtype.itemsize + PARCEL_OVERHEAD_BYTES
    assert not unpacked(got, parcel, dtype, [buffer])
    expected = torch.zeros(8, 9, dtype=dtype)
    expected[4:7, 2 : 2 + columns] = sent["a"][2:5, 1 : 1 + columns]
    assert torch.equal(got["b"].view(8, 9), expected)
    assert got["w"].tolist() == [0] * 5 + sent["v"][1:4].tolist()


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
def test_elements_are_converted_to_the_dtype_of_the_wire_and_of_the_receiver(
    kept: torch.dtype, wire: torch.dtype
) -> None:
    sent, got = {"a": filled(3, 3)}, {"b": torch.zeros(3, 3, dtype=kept)}
    assert not unpacked(got, whole(3, 3), wire, packed(sent, whole(3, 3), wire))
    assert torch.equal(got["b"], sent["a"].to(wire).to(kept))


SENT = {"a": filled(3, 8197)}
"""With padding behind."""
PARCEL = whole(*SENT["a"].shape)
[BUFFER] = packed(SENT, PARCEL)
TARGET = {"b": torch.zeros_like(SENT["a"])}


def is_damaged(buffer: Tensor, version: int = VERSION) -> bool:
    return unpacked(TARGET, PARCEL, torch.float32, [buffer], version)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 8 * BUFFER.nbytes - 1))
def test_every_flipped_bit_is_noticed(place: int) -> None:
    buffer = BUFFER.clone()
    buffer[place // 8] ^= 1 << place % 8
    assert is_damaged(buffer)


def test_bits_of_the_padding_and_the_trailer_are_noticed_too() -> None:
    for place in range(8 * (BUFFER.nbytes - TRAILER_BYTES - 8), 8 * BUFFER.nbytes):
        buffer = BUFFER.clone()
        buffer[place // 8] ^= 1 << place % 8
        assert is_damaged(buffer), place


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_exchanged_runs_of_bytes_are_noticed(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([8, 1024, 32768]))
    last = (BUFFER.nbytes - TRAILER_BYTES) // size - 1
    one, other = data.draw(st.lists(st.integers(0, last), min_size=2, max_size=2, unique=True))
    buffer = BUFFER.clone()
    buffer[one * size : (one + 1) * size] = BUFFER[other * size : (other + 1) * size]
    buffer[other * size : (other + 1) * size] = BUFFER[one * size : (one + 1) * size]
    assert is_damaged(buffer)


def test_another_version_is_noticed() -> None:
    assert not is_damaged(BUFFER)
    assert is_damaged(BUFFER, VERSION + 1) and is_damaged(BUFFER, VERSION - 1)


def test_a_lost_tail_and_zeros_are_noticed() -> None:
    cut = BUFFER.clone()
    cut[BUFFER.nbytes // 2 :] = 0
    assert is_damaged(cut) and is_damaged(torch.zeros_like(BUFFER))


LARGE = Parcel(
    0,
    1,
    (
        Move(256, 512, "a", 0, 0, "b", 4, 0),
        Move(3, 5, "a", 1, 1, "c", 0, 0),
        Move(512, 256, "a", 256, 128, "c", 3, 0),
    ),
)
"""A large move that is one run at both ends, a small one, a large one that is none."""


def large_ends() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return {"a": filled(1024, 512)}, {"b": torch.zeros(260, 512), "c": torch.zeros(600, 300)}


def test_large_moves_travel_alone_and_from_where_they_lie() -> None:
    sent, got = large_ends()
    assert all(move.size * 4 >= ALONE_BYTES for move in (LARGE.moves[0], LARGE.moves[2]))
    for parameters, is_sender, start in ((sent, True, sent["a"]), (got, False, got["b"][4:])):
        packets = lent(parameters, LARGE, torch.float32, is_sender=is_sender)
        assert [packet.is_staged for packet in packets] == [False, True, True]
        assert packets[0].data.data_ptr() == start.data_ptr()
    travelling = packed(sent, LARGE)
    assert sum(data.nbytes for data in travelling) == buffer_bytes(LARGE, torch.float32)
    assert not unpacked(got, LARGE, torch.float32, travelling)
    assert torch.equal(got["b"][4:], sent["a"][:256]) and not got["b"][:4].any()
    assert torch.equal(got["c"][3:515, :256], sent["a"][256:768, 128:384])
    assert torch.equal(got["c"][:3, :5], sent["a"][1:4, 1:6])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_flipped_bit_in_any_packet_of_a_parcel_is_noticed(number: int) -> None:
    sent, got = large_ends()
    travelling = [data.clone() for data in packed(sent, LARGE)]
    travelling[number][17] ^= 8
    assert unpacked(got, LARGE, torch.float32, travelling)


def test_a_sender_digests_beforehand_what_lies_in_one_run_and_notices_a_later_change() -> None:
    sent, got = large_ends()
    [[end]] = outgoing([[LARGE]], sent, torch.float32)
    assert end.peer == 1
    assert [packet.digest is not None for packet in end.packets] == [True, False, False]
    for is_changed in (False, True):
        lend(end.packets)
        sent["a"][0, 0] += is_changed
        pack(end.packets, torch.float32, version=VERSION)
        travelling = [packet.data for packet in end.packets]
        assert unpacked(got, LARGE, torch.float32, travelling) == is_changed


def test_a_packed_parcel_is_packed_anew_for_a_second_attempt() -> None:
    """Digests of what is staged are taken of what the parameters hold then."""
    sent, got = large_ends()
    [[end]] = outgoing([[LARGE]], sent, torch.float32, stages_all=True)
    for number in range(2):
        sent["a"][:, 0] = number
        lend(end.packets)
        pack(end.packets, torch.float32, version=VERSION)
        assert not unpacked(got, LARGE, torch.float32, [p.data for p in end.packets])
        assert (got["b"][4:, 0] == number).all()


def test_packets_that_took_each_others_place_are_noticed() -> None:
    sent, got = large_ends()
    first, second, last = packed(sent, LARGE)
    assert first.nbytes == second.nbytes
    assert unpacked(got, LARGE, torch.float32, [second.clone(), first.clone(), last])


def test_what_lies_elsewhere_than_on_eight_bytes_or_in_another_dtype_is_staged() -> None:
    flat = torch.zeros(256 * 512 + 1)
    parcel = Parcel(0, 1, (Move(256, 512, "a", 0, 0, "a", 0, 0),))
    for parameter in (flat[1:].view(256, 512), flat[:-1].view(256, 512).double()):
        first, _ = end_of({"a": parameter}, parcel, torch.float32, is_sender=True).packets
        assert first.is_staged
