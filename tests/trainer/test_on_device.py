"""What a rank computes of tokens stays where they are: one tensor of the host would end it on CUDA.

"meta" stands for any device but the CPU. It refuses to mix with the host's tensors, as CUDA does,
and knows shapes alone.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental import _config as meta_config
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_rl.algorithms.objective import Objective, find_objective
from megatron_rl.algorithms.soft_value import SoftValues
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.presets import PRESETS
from megatron_rl.trainer.loss_inputs import Prepared, tokens_of, whole_groups
from megatron_rl.trainer.metrics import SumsLayout
from megatron_rl.trainer.model.collate import MicroBatch, collate
from megatron_rl.trainer.model.logprobs import (
    OutputLayer,
    ReferenceLayer,
    TokenLogprobs,
    token_logprobs,
)
from tests.distributed import run_ranks
from tests.tiny_batches import GROUPS, MEMBERS, VOCAB, make_sequences

DEVICE = torch.device("meta")
HIDDEN, PADDED, CHUNK = 16, VOCAB + 8, 64


def rows(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*sizes, dtype=dtype, device=DEVICE, requires_grad=True)


def values_of(objective: Objective, batch: MicroBatch) -> tuple[TokenLogprobs, list[torch.Tensor]]:
    """As a last stage computes them, and what they are computed from."""
    count = len(batch.targets)
    hidden, weight = rows(count, HIDDEN), rows(PADDED, HIDDEN)
    reference = None
    if objective.cfg.kl.is_exact:
        reference = ReferenceLayer(rows(count, HIDDEN).detach(), rows(PADDED, HIDDEN).detach())
    layer = OutputLayer(
        weight, VOCAB, dist.group.WORLD, 1.0, CHUNK,
        differentiates_entropy=objective.has_entropy_bonus, reference=reference,
    )  # fmt: skip
    return token_logprobs(hidden, batch.targets, layer), [hidden, weight]


def devices_of_a_step(preset: str) -> set[str]:
    """Of the loss, its sums and the gradients."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    # How many tokens a mask keeps depends on data; here it keeps all.
    meta_config.meta_nonzero_assume_all_nonzero = True
    given = {"preset": preset}
    if preset == "distill":
        given["reference"] = {"policy": "/teacher"}
    objective = find_objective(AlgorithmConfig.model_validate(given))
    layout = SumsLayout.of(objective)
    batch = collate(make_sequences(has_groups=True)).moved(lambda tensor: tensor.to(DEVICE))
    values, sources = values_of(objective, batch)
    tokens, sequences = (rows(n, dtype=torch.float32).detach() for n in (
        len(batch.targets), len(batch.target_ends)
    ))  # fmt: skip
    prepared = Prepared(proximal_logprobs=tokens, reference_logprobs=tokens)
    if objective.cfg.has_soft_value:
        prepared = replace(prepared, soft=SoftValues(sequences, sequences))
    seen = tokens_of(
        batch, values.logprobs, prepared, version=1, reference_kl=values.reference_kl,
        values=sequences,
    )  # fmt: skip
    whole = seen
    if objective.needs_groups:
        whole = whole_groups([seen], groups=GROUPS, members=MEMBERS, is_alone=True)
    result = objective.loss(seen, objective.advantages(whole).detach(), values.entropy)
    more = {"loss": result.loss, "entropy": values.entropy.sum(), "tokens": seen.is_real.sum()}
    sizes = {"padded_tokens": batch.rows, "filling": batch.filling}
    more |= {name: result.loss.new_tensor(size) for name, size in sizes.items()}
    sums = layout.stack(result.sums | more)
    result.loss.backward()
    return {each.device.type for each in (result.loss, sums, *(t.grad for t in sources))}


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_step_makes_no_tensor_on_the_host(preset: str) -> None:
    assert run_ranks(devices_of_a_step, 1, preset) == [{"meta"}]
