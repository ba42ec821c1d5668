"""All ranks learn rank 0's word, each other's, and whether all succeeded."""

import msgspec
import torch.distributed as dist

from megatron_rl.weights.publish.control import Control
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
