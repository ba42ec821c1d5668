"""Publishes to several generators with a link of their own each take as long as one to one."""

import math
from dataclasses import replace
from pathlib import Path

from megatron_rl.weights.layout.trainer_layout import hf_shapes
from tests.weights.made_up import SHAPE
from tests.weights.plays import publish, versions
from tests.weights.scripted_generators import Generator

WIDE = replace(SHAPE, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=4096)
NBYTES = 4 * sum(math.prod(size) for size in hf_shapes(WIDE).values())
LINK_BYTES_PER_S = 2_000_000
"""So little that four links together need a hundredth of a core: noise is small beside it."""


def seconds_of_one_and_four(folder: Path, **options: object) -> tuple[float, float]:
    """The trainer's wait for a publish to one generator, and for one to four of them."""
    shape = {"shape": WIDE}
    generators = [
        Generator("a", **shape), *(Generator(each, **shape, starts_after=1) for each in "bcd")
    ]  # fmt: skip
    steps, notes = publish(
        folder, generators, "publish 0, publish 1, admit 4, publish 2",
        shape=WIDE, bucket_bytes=400_000, deadline_s=20, link_bytes_per_s=LINK_BYTES_PER_S,
        **options,
    )  # fmt: skip
    for name in "abcd":
        assert versions(notes[name])[-1] == 2
    one, four = steps[1], steps[3]
    assert [step.outcomes[-1].wire_bytes for step in (one, four)] == [NBYTES, 4 * NBYTES]
    # Each takes all bytes over its own link, and the kernel lets no link carry more.
    assert min(one.seconds, four.seconds) > 0.9 * NBYTES / LINK_BYTES_PER_S
    return one.seconds, four.seconds


def test_four_generators_at_the_end_of_slow_links_wait_about_as_long_as_one(
    tmp_path: Path,
) -> None:
    one_s, four_s = seconds_of_one_and_four(tmp_path, data=2)
    assert four_s <= 1.3 * one_s


def test_served_in_turn_by_two_copies_four_wait_for_two(tmp_path: Path) -> None:
    # As over NCCL: what the bound above would find if lanes waited for each other.
    one_s, four_s = seconds_of_one_and_four(tmp_path, data=2, is_concurrent=False)
    assert 1.7 * one_s <= four_s <= 2.6 * one_s
