"""Weight syncs to several generators with a link of their own each take as long as one to one."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rl.weights.layout.trainer_layout import hf_shapes
from tests.weights.made_up import SHAPE
from tests.weights.plays import sync, versions
from tests.weights.scripted_generators import Generator

WIDE = replace(SHAPE, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=4096)
NBYTES = 4 * sum(math.prod(size) for size in hf_shapes(WIDE).values())
LINK_BYTES_PER_S = 2_000_000
"""So little that four links together need a hundredth of a core: noise is small beside it."""


def seconds_of_one_and_all(
    folder: Path, others: str = "bcd", links: int = 1, **options: object
) -> tuple[float, float]:
    """The trainer's wait for a weight sync to one generator, and for one to it and the others.

    links: of the first generator, one for each root.
    """
    shape, number = {"shape": WIDE}, 1 + len(others)
    generators = [
        Generator("a", **shape), *(Generator(each, **shape, starts_after=1) for each in others)
    ]  # fmt: skip
    # Groups are formed in the first weight sync to all. A stall spoils one of the others at most.
    steps, notes = sync(
        folder, generators, f"sync 0, sync 1, admit {number}, sync 2, sync 3, sync 4",
        shape=WIDE, bucket_bytes=40_000, link_bytes_per_s=LINK_BYTES_PER_S,
        **options,
    )  # fmt: skip
    for name in notes:
        assert versions(notes[name])[-1] == 4
    one, all_ = steps[1], min(steps[-2:], key=lambda step: step.seconds)
    assert [step.outcomes[-1].wire_bytes for step in (one, all_)] == [NBYTES, number * NBYTES]
    # Each takes all bytes over its own link, and the kernel lets no link carry more.
    assert one.seconds > 0.9 * NBYTES / LINK_BYTES_PER_S / links
    assert all_.seconds > 0.9 * NBYTES / LINK_BYTES_PER_S
    return one.seconds, all_.seconds


@pytest.mark.parametrize(("others", "at_most"), [("bcd", 2.0), ("bcdefgh", 3.0)])
def test_generators_in_a_row_wait_about_as_long_as_one(
    tmp_path: Path, others: str, at_most: float
) -> None:
    """Of 60 rounds the last of four engines gets each three rounds later than the first.

    One after the other they would wait four and eight times as long.
    """
    one_s, all_s = seconds_of_one_and_all(tmp_path, others)
    assert all_s <= at_most * one_s


def test_data_parallel_ranks_share_what_they_send(tmp_path: Path) -> None:
    """Two roots have two links to the first engine; those behind it have one each."""
    one_s, four_s = seconds_of_one_and_all(tmp_path, data=2, links=2)
    assert four_s <= 4 * one_s


def test_of_two_groups_one_generates_while_the_other_is_served(tmp_path: Path) -> None:
    generators = [Generator(name, shape=WIDE) for name in "abcd"]
    steps, notes = sync(
        tmp_path, generators, "sync 0, sync 1, sync 2", shape=WIDE, bucket_bytes=40_000,
        link_bytes_per_s=LINK_BYTES_PER_S, groups=2,
    )  # fmt: skip
    last = steps[-1]
    assert last.failed == {} and last.seconds > 2 * 0.9 * NBYTES / LINK_BYTES_PER_S
    assert last.metrics["weight_sync/pause_s"] < 0.75 * last.seconds
    assert all(versions(lines) == [0, 1, 2] for lines in notes.values())
