"""All ranks learn rank 0's word, each other's, and whether all succeeded."""

import time

import msgspec
import pytest
import torch.distributed as dist

from megatron_rl.weights.sync.control import Control
from tests.distributed import run_ranks


class Word(msgspec.Struct, frozen=True):
    """Something to share."""

    text: str
    numbers: dict[str, int]


def agree() -> tuple[Word, list[str], str, bool, bool, bool, list[str]]:
    dist.init_process_group("gloo")
    control = Control(dist.new_group(backend="gloo"))
    rank = control.rank
    word = Word("x" * (100 * rank + 1), {"rank": rank}) if rank < 2 else None
    return (
        control.share(word, Word),
        control.share([str(rank)], list[str]),
        control.share("", str),
        control.all(True),
        control.all(rank != 1),
        control.all(rank != 2),
        control.gather("x" * rank, str),
    )


def test_every_rank_has_the_word_of_rank_0_and_one_failure_is_known_to_all() -> None:
    expected = (Word("x", {"rank": 0}), ["0"], "", True, False, False, ["", "x", "xx"])
    assert run_ranks(agree, 3) == [expected] * 3


def wait_for_a_stalled_rank() -> float:
    """Seconds until rank 0 gives up on rank 1, which stalls for three."""
    dist.init_process_group("gloo")
    control = Control(dist.new_group(backend="gloo"))
    assert control.all(True, timeout_s=20)
    started = time.monotonic()
    if control.rank == 1:
        time.sleep(3)
    else:
        with pytest.raises(RuntimeError):
            control.all(True, timeout_s=0.5)
    seconds = time.monotonic() - started
    time.sleep(max(0, 3.5 - seconds))
    return seconds


def test_a_wait_for_all_ranks_may_be_shorter_than_the_groups() -> None:
    assert 0.4 < run_ranks(wait_for_a_stalled_rank, 2)[0] < 2.5
