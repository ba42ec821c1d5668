"""The copies of the model: trainer ranks that together hold the whole model once.

Used by trainer ranks and the launcher; pure functions of places, which need no torch. Data- and
context-parallel ranks repeat the parameters of others, so each of them belongs to another copy. If
experts are divided among more ranks than the rest of the model, a copy has that many ranks: they
hold each expert once, and the rest several times.

The generators of a copy may relay weights in a binomial tree:

    copy ── 1 ── 3 ── 7
     │      └─── 5
     ├───── 2 ── 6
     └───── 4

Place n gets its weights from the place n without its highest bit. Each place serves its children
one after the other, so the number of places with a version doubles with every transfer: place n has
it after `turns_before(n)` transfers; the copy alone would need n.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.layout.trainer_layout import Place, place_of, trainer_slices


@dataclass(frozen=True)
class Copies:
    """All copies. Their members hold the same slices in the same order: one plan serves all."""

    ranks: tuple[tuple[int, ...], ...]
    """World ranks of each copy."""
    slices: tuple[list[Slice], ...]
    """Slices of each member of a copy."""


def copies_of(places: Sequence[Place]) -> tuple[tuple[int, ...], ...]:
    """World ranks of each copy; places: of all world ranks.

    The k-th ranks of all places are copy k. Raises ValueError when places are not equally frequent.
    """
    seen: Counter[Place] = Counter()
    copies: list[list[int]] = []
    for rank, place in enumerate(places):
        number = seen[place]
        seen[place] += 1
        if number == len(copies):
            copies.append([])
        copies[number].append(rank)
    if len(set(seen.values())) > 1:
        raise ValueError(f"places of trainer ranks are not equally frequent: {seen}")
    return tuple(map(tuple, copies))


def model_copies(shape: ModelShape, places: Sequence[Place]) -> Copies:
    """The copies with the slices of their members; places: of all world ranks."""
    ranks = copies_of(places)
    return Copies(ranks, tuple(trainer_slices(shape, places[rank]) for rank in ranks[0]))


def places_of(parallel: ParallelConfig) -> tuple[Place, ...]:
    """The place of every world rank of a trainer that is not running."""
    like = Place(
        Share(0, parallel.tensor),
        Share(0, parallel.pipeline),
        Share(0, parallel.expert),
        Share(0, parallel.expert_tensor),
        parallel.virtual_stages,
        (parallel.first_stage_layers, parallel.last_stage_layers),
    )
    ranks = range(parallel.world_size)
    return tuple(place_of(rank, len(ranks), like) for rank in ranks)


def source_of(place: int) -> int:
    """The place that serves this one (from 1 on); 0 is the copy."""
    return place - (1 << (place.bit_length() - 1))


def turns_before(place: int) -> int:
    """Transfers, one after the other, after which the place has a version."""
    return place.bit_length()


def turns_busy(place: int, places: int) -> int:
    """Transfers after which the place has also passed the version on; places: their number."""
    own = turns_before(place)
    later = range(own, places.bit_length())
    return max((turn + 1 for turn in later if place + (1 << turn) <= places), default=own)
