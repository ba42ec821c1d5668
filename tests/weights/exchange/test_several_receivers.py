"""What several receivers of the same bytes have in common, and what each copy of a model sends."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from megatron_rl.weights.exchange import packets
from megatron_rl.weights.exchange.packets import ALONE_BYTES, pack, unpack
from megatron_rl.weights.exchange.parcels import Ends, for_another, incoming, outgoing
from megatron_rl.weights.exchange.plan import Move, Parcel, make_plan
from megatron_rl.weights.layout.copies import model_copies
from megatron_rl.weights.layout.trainer_layout import place_of
from tests.weights.exchange.test_plan import Case, carry_out, cases, filled, numbered

VERSION, DTYPE = 4, torch.float32
ROWS = ALONE_BYTES // 4 // 64
"""Of 64 columns: a move that travels by itself, from where it lies."""


def lend(ends: Ends) -> list[torch.Tensor]:
    """Buffers for the staged packets; all packets' bytes."""
    for packet in (packet for parcels in ends for end in parcels for packet in end.packets):
        if packet.is_staged:
            packet.data = torch.empty(packet.nbytes, dtype=torch.uint8)
    return [packet.data for parcels in ends for end in parcels for packet in end.packets]


def test_digests_are_taken_once_for_all_receivers_of_a_parcel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = {"a": torch.randn(ROWS, 64), "b": torch.randn(9, 5)}
    # By itself; by itself but staged, as it is a part of rows; and together with the digest.
    rows = (Move(ROWS, 64, "a", 0, 0, "a", 0, 0), Move(3, 4, "b", 1, 1, "b", 1, 1))
    rounds = [[Parcel(0, 1, rows)], [Parcel(0, 1, (Move(2, 5, "b", 6, 0, "b", 6, 0),))]]
    digested: list[int] = []
    real = packets.digest

    def counted(payload: torch.Tensor) -> torch.Tensor:
        digested.append(payload.numel())
        return real(payload)

    monkeypatch.setattr(packets, "digest", counted)
    # Of packets alone, not of their digests.
    monkeypatch.setattr(packets, "fold", lambda found: real(torch.cat(found).view(torch.uint8)))
    found = outgoing(rounds, source, DTYPE)
    assert digested == [4 * ROWS * 64]
    sent = []
    for _ in range(3):
        ends = for_another(found)
        sent.append(lend(ends))
        for end in (end for parcels in ends for end in parcels):
            pack(end.packets, DTYPE, version=VERSION)
    # 12 and 10 elements; nothing was digested again for the second and the third receiver.
    assert digested == [4 * ROWS * 64, 48, 40]
    for data in sent[1:]:
        assert all(torch.equal(one, other) for one, other in zip(sent[0], data, strict=True))
        # Buffers are each one's own: a receiver that is late must not see the next round's bytes.
        owners = [
            one.data_ptr() == other.data_ptr() for one, other in zip(sent[0], data, strict=True)
        ]
        assert owners == [True, False, False]
    got = {"a": torch.zeros(ROWS, 64), "b": torch.zeros(9, 5)}
    ends = incoming(rounds, got, DTYPE)
    for place, data in zip(lend(ends), sent[2], strict=True):
        place.copy_(data)
    assert not any(bool(unpack(e.packets, DTYPE, VERSION)) for each in ends for e in each)
    assert torch.equal(got["a"], source["a"])
    assert torch.equal(got["b"][1:4, 1:5], source["b"][1:4, 1:5])
    assert torch.equal(got["b"][6:8], source["b"][6:8])


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(cases())
def test_every_copy_sends_each_element_once_by_a_rank_of_its_own(case: Case) -> None:
    tensors = numbered(case.shape)
    places = [place_of(rank, case.world_size, case.like) for rank in range(case.world_size)]
    copies = model_copies(case.shape, places)
    slices = case.senders()
    members = len(copies.slices)
    for ranks in case.engines:
        receivers = {
            members + rank - case.world_size: parts for rank, parts in case.receivers(ranks).items()
        }
        plan = make_plan(
            dict(enumerate(copies.slices)), receivers,
            itemsize=case.itemsize, bucket_bytes=case.bucket_bytes,
        )  # fmt: skip
        wanted = {rank: filled(parts, tensors) for rank, parts in receivers.items()}
        for copy in copies.ranks:
            # Made from the world ranks' own slices: the plan must fit every copy.
            sent = {place: filled(slices[rank], tensors) for place, rank in enumerate(copy)}
            got = carry_out(plan, sent, wanted)
            for rank, parameters in wanted.items():
                for name, matrix in parameters.items():
                    assert (got[rank][name] == matrix).all()
