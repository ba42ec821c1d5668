"""Weight syncs to several generators with a link of their own each take as long as one to one."""

import math
from dataclasses import replace
from pathlib import Path

from megatron_rl.weights.layout.trainer_layout import hf_shapes
from tests.weights.made_up import SHAPE
from tests.weights.plays import sync, versions
from tests.weights.scripted_generators import Generator

WIDE = replace(SHAPE, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=4096)
NBYTES = 4 * sum(math.prod(size) for size in hf_shapes(WIDE).values())
LINK_BYTES_PER_S = 2_000_000
"""So little that four links together need a hundredth of a core: noise is small beside it."""


def seconds_of_one_and_all(
    folder: Path, others: str = "bcd", **options: object
) -> tuple[float, float]:
    """The trainer's wait for a weight sync to one generator, and for one to it and the others."""
    shape, number = {"shape": WIDE}, 1 + len(others)
    generators = [
        Generator("a", **shape), *(Generator(each, **shape, starts_after=1) for each in others)
    ]  # fmt: skip
    # Groups are formed in the first weight sync to all.
    steps, notes = sync(
        folder, generators, f"sync 0, sync 1, admit {number}, sync 2, sync 3",
        shape=WIDE, bucket_bytes=400_000, deadline_s=20, link_bytes_per_s=LINK_BYTES_PER_S,
        **options,
    )  # fmt: skip
    for name in notes:
        assert versions(notes[name])[-1] == 3
    one, all_ = steps[1], steps[-1]
    assert [step.outcomes[-1].wire_bytes for step in (one, all_)] == [NBYTES, number * NBYTES]
    # Each takes all bytes over its own link, and the kernel lets no link carry more.
    assert min(one.seconds, all_.seconds) > 0.9 * NBYTES / LINK_BYTES_PER_S
    return one.seconds, all_.seconds


def test_four_generators_at_the_end_of_slow_links_wait_about_as_long_as_one(
    tmp_path: Path,
) -> None:
    one_s, four_s = seconds_of_one_and_all(tmp_path, data=2)
    assert four_s <= 1.3 * one_s


def test_served_in_turn_by_two_copies_four_wait_for_two(tmp_path: Path) -> None:
    # As over NCCL: what the bound above would find if lanes waited for each other.
    one_s, four_s = seconds_of_one_and_all(tmp_path, data=2, is_concurrent=False)
    assert 1.7 * one_s <= four_s <= 2.6 * one_s


def test_seven_that_pass_weights_on_wait_for_three_transfers_of_one_copy(tmp_path: Path) -> None:
    # Served in turn by the copy alone they would wait for seven.
    options = {"is_concurrent": False, "relays": True}
    one_s, seven_s = seconds_of_one_and_all(tmp_path, "bcdefg", **options)
    assert 2.7 * one_s <= seven_s <= 1.2 * 3 * one_s
