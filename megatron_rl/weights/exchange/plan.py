"""The plan of an exchange: which slice goes from which trainer rank to which engine rank, and when.

A pure function of slices: trainer ranks and engine ranks compute the same plan from a few hundred
bytes (`Layouts`), and `megatron-rl plan-weights` prints it. It serves all engines of a kind: what
rank r of one engine receives, rank r of each one receives. Every element comes from exactly one
sender. Where several senders hold it, as data-parallel ranks do, the plan chooses the sender
(`_choose`). The exchange goes in rounds: in each, no rank sends and none receives more than
`bucket_bytes`.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from megatron_rl.protocol.types import Hello
from megatron_rl.weights.layout.engine_layout import (
    engine_slices,
    expert_place,
    hf_slices,
    trained_parameters,
)
from megatron_rl.weights.layout.place import Place, place_of
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share, Slice, unmatched_text
from megatron_rl.weights.layout.trainer_layout import trained_slices

T = TypeVar("T")

PARCEL_OVERHEAD_BYTES = 32
"""Most bytes of a parcel's buffer that are not payload: digest and version take 24, padding less
than 8."""
_PIECES = 8
"""A bucket holds at least this number of pieces, so that loads and rounds come out even."""


class Move(NamedTuple):
    """A rectangle of a sender's parameter and its place in a receiver's; see `as_matrix`."""

    rows: int
    columns: int
    source: str
    source_row: int
    source_column: int
    target: str
    target_row: int
    target_column: int

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.columns


class Parcel(NamedTuple):
    """What one rank sends another in one round, one move after the other."""

    sender: int
    receiver: int
    moves: tuple[Move, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(move.size for move in self.moves)


Rounds = Sequence[Sequence[Parcel]]
"""Parcels of one rank, round by round."""


@dataclass(frozen=True)
class Plan:
    """All rounds of an exchange with the engines of one kind."""

    rounds: tuple[tuple[Parcel, ...], ...]
    itemsize: int
    """Bytes of an element on the wire."""
    senders: int
    """Ranks that may send; the receivers' numbers come after theirs."""

    @property
    def receivers(self) -> list[int]:
        """All receivers, in ascending order."""
        return sorted({parcel.receiver for each in self.rounds for parcel in each})

    def sent_bytes(self) -> dict[int, int]:
        """Payload by sender."""
        return self._bytes("sender")

    def received_bytes(self) -> dict[int, int]:
        """Payload by receiver."""
        return self._bytes("receiver")

    def of_sender(self, rank: int) -> Rounds:
        """What a trainer rank sends, round by round."""
        return [[parcel for parcel in each if parcel.sender == rank] for each in self.rounds]

    def of_receiver(self, rank: int) -> Rounds:
        """What an engine rank receives, round by round."""
        return [[parcel for parcel in each if parcel.receiver == rank] for each in self.rounds]

    def roots(self, receiver: int) -> list[int]:
        """The senders of a receiver, in ascending order."""
        parcels = (parcel for each in self.rounds for parcel in each)
        return sorted({parcel.sender for parcel in parcels if parcel.receiver == receiver})

    def peak_bytes(self) -> int:
        """Upper bound of a rank's memory without its parameters: two rounds are in flight."""
        most = 0
        for first, second in zip(self.rounds, [*self.rounds[1:], ()], strict=True):
            held: dict[tuple[str, int], int] = defaultdict(int)
            for parcel in (*first, *second):
                size = parcel.size * self.itemsize + PARCEL_OVERHEAD_BYTES
                held["sender", parcel.sender] += size
                held["receiver", parcel.receiver] += size
            most = max(most, *held.values()) if held else most
        return most

    def _bytes(self, end: str) -> dict[int, int]:
        total: dict[int, int] = defaultdict(int)
        for parcel in (parcel for each in self.rounds for parcel in each):
            total[getattr(parcel, end)] += parcel.size * self.itemsize
        return dict(total)


class Offer(NamedTuple):
    """A rectangle that a receiver needs, and where each rank that holds it has it."""

    receiver: int
    move: Move
    """Its source is that of the first holder."""
    holders: tuple[tuple[int, Slice], ...]


def make_plan(
    senders: Mapping[int, Sequence[Slice]],
    receivers: Mapping[int, Sequence[Slice]],
    *,
    itemsize: int,
    bucket_bytes: int,
    few_senders: bool = False,
) -> Plan:
    """The exchange that fills every slice of the receivers from those of the senders.

    few_senders: see `Layouts`. Raises ValueError when an element is held by nobody, or one row of a
    tensor exceeds a bucket.
    """
    # In a round a rank has at most one parcel with each rank of the other side.
    overhead_bytes = PARCEL_OVERHEAD_BYTES * max(len(senders), len(receivers))
    limit = (bucket_bytes - overhead_bytes) // itemsize
    offers = [piece for offer in _offers(senders, receivers) for piece in _cut(offer, limit)]
    fullest = max(sum(need.size for need in parts) for parts in receivers.values())
    moves = _choose(offers, fullest if few_senders else 0)
    return Plan(_rounds(moves, _places(offers), limit), itemsize, len(senders))


def _choose(offers: Sequence[Offer], free: int) -> list[tuple[int, int, Move]]:
    """(sender, receiver, move) of each offer.

    A holder that sends to the receiver already is chosen while it sends at most `free` elements to
    all. Otherwise the holder with the least to send is chosen.
    """
    loads: dict[int, int] = defaultdict(int)
    known: dict[int, set[int]] = defaultdict(set)
    chosen: dict[int, tuple[int, int, Move]] = {}
    # What few ranks hold is assigned first: what many hold can then even out the loads.
    for number in sorted(range(len(offers)), key=lambda n: len(offers[n].holders)):
        receiver, move, holders = offers[number]
        near = [
            holder
            for holder in holders
            if holder[0] in known[receiver] and loads[holder[0]] + move.size <= free
        ]
        rank, source = min(near or holders, key=lambda holder: loads[holder[0]])
        loads[rank] += move.size
        known[receiver].add(rank)
        chosen[number] = rank, receiver, _from(offers[number], source)
    return [chosen[number] for number in range(len(offers))]


def _offers(
    senders: Mapping[int, Sequence[Slice]], receivers: Mapping[int, Sequence[Slice]]
) -> Iterator[Offer]:
    held = _by_area(senders)
    needed = {need.hf for parts in receivers.values() for need in parts}
    if lacking := needed - held.keys():
        raise ValueError(unmatched_text(held.keys() - needed, lacking))
    # In a fixed order, as are the senders: every trainer rank makes the plan for itself.
    for receiver in sorted(receivers):
        for need in receivers[receiver]:
            covered = 0
            for holders in held.get(need.hf, {}).values():
                move = _overlap(holders[0][1], need)
                if move is not None:
                    # Trainer ranks divide a tensor alike: areas are the same or do not overlap, so
                    # no element counts twice.
                    covered += move.size
                    yield Offer(receiver, move, tuple(holders))
            if covered != need.size:
                raise ValueError(
                    f"of the {need.size} elements that rank {receiver} needs of {need.hf}, the "
                    f"senders hold {covered}: {need}"
                )


def _by_area(
    senders: Mapping[int, Sequence[Slice]],
) -> dict[str, dict[tuple[int, int, int, int], list[tuple[int, Slice]]]]:
    """HF tensor -> area of it -> who holds exactly that area."""
    held: dict[str, dict[tuple[int, int, int, int], list[tuple[int, Slice]]]] = {}
    for rank in sorted(senders):
        for part in senders[rank]:
            area = (part.row, part.column, part.rows, part.columns)
            held.setdefault(part.hf, {}).setdefault(area, []).append((rank, part))
    return held


def _overlap(have: Slice, need: Slice) -> Move | None:
    row, column = max(have.row, need.row), max(have.column, need.column)
    rows = min(have.row + have.rows, need.row + need.rows) - row
    columns = min(have.column + have.columns, need.column + need.columns) - column
    if rows <= 0 or columns <= 0:
        return None
    return Move(
        rows, columns,
        have.local, have.local_row + row - have.row, have.local_column + column - have.column,
        need.local, need.local_row + row - need.row, need.local_column + column - need.column,
    )  # fmt: skip


def _cut(offer: Offer, limit: int) -> Iterator[Offer]:
    """The offer in pieces of whole rows, each well below a bucket."""
    move = offer.move
    # At least a row, even if a few of them fill a bucket.
    rows = max(1, limit // _PIECES // move.columns)
    if move.columns > limit:
        raise ValueError(
            f"a bucket (expert.weights.bucket_bytes) holds {limit} elements, but one row of "
            f"{move.source} has {move.columns}: give it more"
        )
    for start in range(0, move.rows, rows):
        piece = move._replace(
            rows=min(rows, move.rows - start),
            source_row=move.source_row + start,
            target_row=move.target_row + start,
        )
        yield offer._replace(move=piece)


def _from(offer: Offer, source: Slice) -> Move:
    """The offer's move, from another holder of the same area."""
    first, move = offer.holders[0][1], offer.move
    return move._replace(
        source=source.local,
        source_row=move.source_row - first.local_row + source.local_row,
        source_column=move.source_column - first.local_column + source.local_column,
    )


Stage = frozenset[int]
"""Ranks that hold any element of a target: those of a pipeline stage."""


def _places(offers: Sequence[Offer]) -> dict[str, tuple[Stage, int]]:
    """By target its stage, and its turn there: in the order in which the receivers need them."""
    holders: dict[str, set[int]] = defaultdict(set)
    for offer in offers:
        holders[offer.move.target].update(rank for rank, _ in offer.holders)
    turns: Counter[Stage] = Counter()
    places = {}
    for target, ranks in holders.items():
        stage = frozenset(ranks)
        places[target] = stage, turns[stage]
        turns[stage] += 1
    return places


def _rounds(
    moves: Sequence[tuple[int, int, Move]], places: Mapping[str, tuple[Stage, int]], limit: int
) -> tuple[tuple[Parcel, ...], ...]:
    """Moves in rounds in which sender and receiver have room, target after target.

    A receiver gets the targets of one stage in order: where an engine quantises what has arrived
    whole, few layers are in flight. Stages send at the same time.
    """
    filled: dict[tuple[str, int, int], int] = defaultdict(int)
    last: dict[tuple[int, Stage], int] = defaultdict(int)
    found: dict[int, dict[tuple[int, int], list[Move]]] = defaultdict(lambda: defaultdict(list))
    for sender, receiver, move in sorted(moves, key=lambda each: places[each[2].target][1]):
        ends = (("sender", sender), ("receiver", receiver))
        line = receiver, places[move.target][0]
        number = last[line]
        while any(filled[(*end, number)] + move.size > limit for end in ends):
            number += 1
        last[line] = number
        found[number][sender, receiver].append(move)
        for end in ends:
            filled[(*end, number)] += move.size
    return tuple(
        tuple(
            Parcel(sender, receiver, tuple(held))
            for (sender, receiver), held in sorted(found[number].items())
        )
        for number in sorted(found)
    )


# --- what both ends know of each other ------------------------------------------------------------


class EngineKind(msgspec.Struct, frozen=True):
    """All on which the slices of an engine depend; see `Hello` for the fields."""

    engine: str
    world_size: int
    ffn_multiple: int = 1
    expert_parallel: int = 1

    def slices(self, shape: ModelShape, rank: int) -> list[Slice]:
        """Slices of one rank. Raises ValueError for ranks that do not divide the model."""
        if self.engine == "hf":
            return hf_slices(shape)
        return engine_slices(
            shape,
            Share(rank, self.world_size),
            expert_parallel=self.expert_parallel,
            ffn_multiple=self.ffn_multiple,
        )

    def trained(self, shape: ModelShape, rank: int, parameters: Mapping[str, T]) -> dict[str, T]:
        """Those parameters of one rank that its slices cover."""
        place = expert_place(Share(rank, self.world_size), self.expert_parallel)
        return trained_parameters(shape, parameters, place)


def kind_of(hello: Hello) -> EngineKind:
    """Kind of a generator's engine."""
    return EngineKind(hello.engine, hello.world_size, hello.ffn_multiple, hello.expert_parallel)


class Layouts(msgspec.Struct, frozen=True):
    """How trainer and engines of one kind divide the model, and how it is cut for transport."""

    shape: ModelShape
    like: Place
    """Place of any trainer rank: its shares have the sizes of all."""
    trainer_ranks: int
    kind: EngineKind
    itemsize: int
    """Bytes of an element on the wire."""
    bucket_bytes: int
    few_senders: bool
    """Whether few trainer ranks send to an engine rank, because a communicator joins them. No rank
    then sends more than the fullest engine rank receives, if others hold it too. Without
    communicators all ranks share the sending evenly."""

    def plan(self) -> Plan:
        """The plan; rank r of each engine is receiver `trainer_ranks + r`. Raises ValueError."""
        return _plan_of(self)


@functools.lru_cache(maxsize=4)
def _plan_of(layouts: Layouts) -> Plan:
    shape, trainers = layouts.shape, layouts.trainer_ranks
    places = [place_of(rank, trainers, layouts.like) for rank in range(trainers)]
    # Once for all data-parallel copies: of a large model this takes seconds.
    slices = {place: trained_slices(shape, place) for place in set(places)}
    senders = {rank: slices[place] for rank, place in enumerate(places)}
    receivers = {
        trainers + rank: layouts.kind.slices(shape, rank) for rank in range(layouts.kind.world_size)
    }
    return make_plan(
        senders,
        receivers,
        itemsize=layouts.itemsize,
        bucket_bytes=layouts.bucket_bytes,
        few_senders=layouts.few_senders,
    )
