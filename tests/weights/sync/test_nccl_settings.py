"""A generator whose NCCL settings are not the trainer's is refused before a group is formed."""

import os

import torch
import torch.distributed as dist

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.types import Hello
from megatron_rl.weights.layout.trainer_layout import Place
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.full_tensors import Broadcast
from megatron_rl.weights.sync.link import Conversation
from megatron_rl.weights.sync.members import ExchangeSettings, Member, Outcome
from megatron_rl.weights.sync.reshard import Reshard
from tests.distributed import run_ranks
from tests.weights.made_up import SHAPE

AGREED = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "2"}


class Deaf:
    """A link whose generators hear nothing."""

    def tell(self, name: str, message: object) -> None:
        raise AssertionError(f"{name} was told {message}")


def refusals(backend: str) -> list[str]:
    os.environ.update(AGREED)
    dist.init_process_group("gloo")
    control = Control(dist.new_group())
    settings = ExchangeSettings("127.0.0.1", backend, torch.float32, 2048, 5.0, "settings")
    hello = Hello(1, "hf", "1", nccl=AGREED | {"NCCL_CUMEM_ENABLE": "0"})
    parameters = {"a": torch.zeros(1)}
    reshard = Reshard(parameters, Place(), SHAPE, control=control, link=Deaf(), settings=settings)
    broadcast = Broadcast(lambda: iter(()), control=control, link=Deaf(), settings=settings)
    paused = Conversation(Deaf(), [], Outcome(), 5.0)
    found = []
    for ask in (
        lambda: reshard._number(hello),
        lambda: broadcast._join(Member("a", hello), paused),
    ):
        try:
            ask()
        except (InputError, AssertionError) as error:
            found.append(str(error))
    return found


def test_a_generator_of_other_settings_is_refused_under_every_method() -> None:
    [found] = run_ranks(refusals, 1, "nccl")
    assert len(found) == 2
    for text in found:
        assert "NCCL_CUMEM_ENABLE is 1 at the trainer and 0 at the generator" in text


def test_over_gloo_they_do_not_matter() -> None:
    [found] = run_ranks(refusals, 1, "gloo")
    assert len(found) == 1 and "was told JoinGroup" in found[0]
