"""A generator whose NCCL settings are not the trainer's is refused before a group is formed."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.types import Hello
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.sync.control import Control
from megatron_rl.weights.sync.leader import ExchangeSettings
from megatron_rl.weights.sync.reshard import Reshard
from tests.distributed import run_ranks
from tests.weights.made_up import SHAPE

AGREED = {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "2"}


class Deaf:
    """A link to nobody."""


def refusal(backend: str) -> str:
    os.environ.update(AGREED)
    dist.init_process_group("gloo")
    control = Control(dist.new_group())
    settings = ExchangeSettings("127.0.0.1", backend, torch.float32, 2048, 5.0, "settings")
    hello = Hello(1, "hf", "1", nccl=AGREED | {"NCCL_CUMEM_ENABLE": "0"})
    parameters = {"a": torch.zeros(1)}
    reshard = Reshard(parameters, Place(), SHAPE, control=control, link=Deaf(), settings=settings)
    try:
        reshard._number(hello)
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_generator_of_other_settings_is_refused_over_nccl(backend: str) -> None:
    [found] = run_ranks(refusal, 1, backend)
    text = "NCCL_CUMEM_ENABLE is 1 at the trainer and 0 at the generator"
    assert (text in found) if backend == "nccl" else not found
