"""`expert.train.pad_microbatches` changes no loss, gradient, logprob or count: real ranks in
float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.backend.device import select_backend
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.trainer.model.build import build_frozen
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.reference import Teacher
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.load import unwrap
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import RanksFailed, run_ranks
from tests.tiny_batches import VOCAB, make_sequences, my_share
from tests.tiny_models import PLAIN, QWEN3_MOE, write_model

BUDGET = 25
POSITIONS = 600
"""More than one piece of filling in each microbatch."""
TOLERANCE = 1e-5
SEQUENCE = "tensor=2 sequence=true"
SETTINGS = [
    "model.dtype=float32",
    "algorithm.policy_loss.old_logprobs=recompute",
    "algorithm.reference.policy=start",
    "algorithm.kl.placement=loss",
    "algorithm.kl.coefficient=0.1",
    "optimizer.warmup_steps=0",
    "optimizer.lr=0.01",
]
TIMED = {
    "train/tokens_per_s",
    "train/tokens_per_s_per_gpu",
    "train/update_s",
    "train/optimizer_s",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("dense", "mixture")}
    write_model(made["dense"], vocab_size=VOCAB)
    write_model(made["mixture"], family="Qwen3Moe", vocab_size=VOCAB, **QWEN3_MOE)
    return made


def config_of(folder: Path, layout: str, *more: str, is_padded: bool) -> Config:
    padding = [f"train.microbatch_tokens={POSITIONS}", "generator.context_tokens=512",
               "sampling.max_new_tokens=500", "expert.train.pad_microbatches=true"]  # fmt: skip
    keys = [f"parallel.{key}" for key in layout.split()]
    return load_config(
        None,
        [*PLAIN, *SETTINGS, f"model.path={folder}", *keys, *more, *(padding if is_padded else [])],
    )


def one_step(cfg: Config) -> dict:
    """What is found of a minibatch in packs of BUDGET tokens: by every pass, and by the step."""
    with open_policy(cfg) as policy:
        objective = find_objective(cfg.algorithm)
        trainer = Trainer(policy, objective, cfg.optimizer, 2, train=cfg.train)
        share = my_share(BUDGET, has_groups=True)
        exchanges = count_shape_exchanges()
        (prepared,) = trainer.prepare([share])
        sent: list[Tensor] = []
        for chunk in policy.chunks:
            chunk.register_forward_hook(lambda module, inputs, output: sent.append(output))
        totals = trainer.accumulate(share, version=0, prepared=prepared)
        gradients = [p.main_grad.clone() for c in policy.chunks for p in c.parameters()]
        metrics = trainer.update(share, version=0, prepared=prepared)
        sizes = {batch.tokens.shape[1] for batch, _ in trainer._passes.inputs(share)}
        lengths = [sum(len(s.token_ids) for s in batch) for batch in share.microbatches]
        return {
            "sizes": sizes,
            "shape_exchanges": len(exchanges),
            # Of a stage that is not the last one: only the graph of what it sent is kept.
            "sent": {output.numel() for output in sent} if not is_last_stage() else {1},
            "microbatches": lengths,
            "sums": totals.sums,
            "gradients": torch.cat([g.flatten() for g in gradients]),
            "reference": [k.reference_logprobs for k in prepared],
            "own": [k.proximal_logprobs for k in prepared],
            "metrics": {m.name: (m.value, m.count) for m in metrics},
        }


def is_last_stage() -> bool:
    return parallel_state.is_pipeline_last_stage(ignore_virtual=True)


def count_shape_exchanges() -> list[int]:
    """A list that grows with every exchange of shapes between stages."""
    exchanges: list[int] = []
    real = P2PCommunicator._communicate_shapes

    def counted(self: P2PCommunicator, *args: Any, **options: Any) -> Any:
        exchanges.append(1)
        return real(self, *args, **options)

    P2PCommunicator._communicate_shapes = counted
    return exchanges


LAYOUTS = [
    ("dense", SEQUENCE),
    ("dense", ""),
    ("dense", f"pipeline=2 {SEQUENCE}"),
    ("dense", "data=2 distributed_optimizer=true"),
    ("mixture", f"{SEQUENCE} expert=2"),
    ("mixture", "pipeline=2 virtual_stages=2"),
]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_padded_steps_are_the_same(folders: dict[str, Path], kind: str, layout: str) -> None:
    plain, padded = (
        run_ranks(one_step, cfg.parallel.world_size, cfg)
        for cfg in (
            config_of(folders[kind], layout, is_padded=is_padded) for is_padded in (False, True)
        )
    )
    for one, other in zip(plain, padded, strict=True):
        assert other["sizes"] == {POSITIONS} and len(one["sizes"]) > 1
        assert (one["shape_exchanges"] > 0) == ("pipeline" in layout)
        assert other["shape_exchanges"] == 0
        if "pipeline" in layout and "virtual" not in layout:
            assert one["sent"] == other["sent"] == {1}
        norm = one["gradients"].norm()
        assert norm > 0 and (other["gradients"] - one["gradients"]).norm() <= TOLERANCE * norm
        for name in ("reference", "own"):
            assert_near(other[name], one[name])
        for name in one["sums"].keys() - {"padded_tokens", "filling"}:
            assert other["sums"][name] == pytest.approx(one["sums"][name], rel=TOLERANCE, abs=1e-6)
        for name in one["metrics"].keys() - TIMED - {"train/padded_tokens"}:
            assert other["metrics"][name] == pytest.approx(
                one["metrics"][name], rel=1e-4, abs=1e-5
            ), name


def assert_near(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_positions_that_fill_are_in_no_count(folders: dict[str, Path]) -> None:
    found = run_ranks(one_step, 2, config_of(folders["dense"], SEQUENCE, is_padded=True))
    # Tensor ranks that divide positions need an even count of them.
    expected = sum(length + length % 2 for length in found[0]["microbatches"])
    assert found[0]["sums"]["padded_tokens"] == expected < POSITIONS
    assert found[0]["metrics"]["train/padded_tokens"][0] == expected
    share = 1 - expected / (POSITIONS * len(found[0]["microbatches"]))
    filling, positions = found[0]["metrics"]["train/filling_share"]
    assert filling / positions == pytest.approx(share)
    assert found[0]["sums"]["tokens"] == sum(len(s.generator_logprobs) for s in make_sequences())


def fill_too_much(cfg: Config) -> str:
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1, train=cfg.train)
        try:
            trainer.prepare([my_share(2 * BUDGET)])
        except InputError as error:
            return str(error)
    return ""


def test_a_microbatch_that_is_too_long_is_refused_before_any_pass(folders: dict[str, Path]) -> None:
    cfg = config_of(folders["dense"], "", is_padded=True)
    small = cfg.model_copy(update={"train": cfg.train.model_copy(update={"microbatch_tokens": 40})})
    [message] = run_ranks(fill_too_much, 1, small)
    assert "do not fit into the 40 positions of a microbatch; raise" in message


def teachers_logprobs(cfg: Config) -> tuple[list[Tensor | None], set[int]]:
    """Of a teacher of another size, and how many positions its microbatches have."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 1, train=cfg.train)
        assert isinstance(trainer.reference, Teacher)
        share = my_share(BUDGET)
        (prepared,) = trainer.prepare([share])
        inputs = trainer.reference._passes.inputs(share)
        sizes = {batch.tokens.shape[1] for batch, _ in inputs}
        return [k.reference_logprobs for k in prepared], sizes


def test_a_teachers_microbatches_are_not_padded(folders: dict[str, Path], tmp_path: Path) -> None:
    write_model(tmp_path, vocab_size=VOCAB, num_hidden_layers=2, hidden_size=32)
    teacher = [f"algorithm.reference.policy={tmp_path}"]
    plain, padded = (
        run_ranks(
            teachers_logprobs,
            2,
            config_of(folders["dense"], SEQUENCE, *teacher, is_padded=is_padded),
        )[0]
        for is_padded in (False, True)
    )
    assert_near(padded[0], plain[0])
    assert padded[1] == plain[1] and POSITIONS not in padded[1]


def frozen(cfg: Config) -> bool:
    """Whether a teacher beside the policy would use the policy's buffers."""
    backend = select_backend(cfg.model)
    backend.init_distributed(cfg.parallel, seed=0, timeout_s=30)
    # A rank that ends closes its connections, and others may not have formed their groups yet.
    dist.barrier()
    [chunk] = build_frozen(backend, cfg, read_shape(cfg.model.path))
    return unwrap(chunk).config.tp_comm_overlap


def test_a_teacher_uses_none_of_the_policys_buffers(folders: dict[str, Path]) -> None:
    """They have the policy's hidden size. Here, without CUDA, the policy itself is refused."""
    cfg = config_of(folders["dense"], SEQUENCE, is_padded=True)
    parallel = cfg.parallel.model_copy(update={"overlap_tensor": True})
    cfg = cfg.model_copy(update={"parallel": parallel})
    assert run_ranks(frozen, 2, cfg) == [False, False]


def test_overlap_is_refused_without_transformer_engine(folders: dict[str, Path]) -> None:
    cfg = config_of(folders["dense"], SEQUENCE, is_padded=True)
    parallel = cfg.parallel.model_copy(update={"overlap_tensor": True})
    with pytest.raises(RanksFailed, match="overlap_tensor=true needs TransformerEngine's layers"):
        run_ranks(one_step, 2, cfg.model_copy(update={"parallel": parallel}))
