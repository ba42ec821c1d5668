"""Tiny Hugging Face folders, and the same model on gloo ranks; shared by tests of the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_rl.backend.device import Backend, select_backend
from megatron_rl.config.tree import Config, ModelConfig, ParallelConfig
from megatron_rl.trainer.model.build import build_model, packed
from megatron_rl.weights.folders.load import load_weights
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape

PLAIN = [
    "parallel.sequence=false",
    "parallel.distributed_optimizer=false",
    "parallel.overlap_gradients=false",
    "expert.train.max_mismatch=0",
]
"""What derived defaults would add to a split that a test names, and to made-up logprobs."""
VOCAB = 250
CORRECTION = ".gate.e_score_correction_bias"
"""Name ending of buffers that are float32 in every folder."""
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
}
QWEN3_MOE = {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
"""Options of a family whose experts differ in size from `intermediate_size`."""
GLM4_MOE = {
    "head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "use_qk_norm": True,
    "attention_bias": True,
}
"""Options of a family whose first layer is dense, and whose choice of experts is corrected."""

GPT_OSS = {
    "head_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 48,
    # Small enough that gates and ups are clamped.
    "swiglu_limit": 1.5,
    "sliding_window": 12,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
"""Options of gpt-oss, whose layers see a window and all positions in turn."""
MIXED_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "no_rope_layers": [1, 1, 0, 0],
}
"""Options of SmolLM3: all four kinds of a layer, with and without a window, rotated and not."""
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
}
"""Options of families with latent attention; their routers choose groups of experts first."""


OLMO3 = {
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
"""Options of a family whose layers have windows, or else stretched angles."""
MINISTRAL3 = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3,
    },
    "head_dim": 24,
}  # fmt: skip
"""Options of a family whose queries grow with their position, here at every eighth."""


def write_model(
    folder: Path,
    *,
    family: str = "Llama",
    is_tied: bool = False,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> torch.nn.Module:
    """Write a random model of `family` to `folder` and return it, a transformers model."""
    import transformers

    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, "pad_token_id": None, "tie_word_embeddings": is_tied, **options}
    )
    model = disturb(getattr(transformers, f"{family}ForCausalLM")(config)).eval()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(dtype)
    for name, buffer in model.named_buffers():
        # As in published files, and when transformers loads them.
        if name.endswith(CORRECTION):
            buffer.data = buffers[name]
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def disturb(model: torch.nn.Module) -> torch.nn.Module:
    """The model with other vectors: norms and biases of 1 and 0 would hide that they are used."""
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION):
            buffer.add_(torch.randn_like(buffer) * 0.3)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@dataclass(frozen=True)
class Loaded:
    """What a rank has after the start of a trainer."""

    backend: Backend
    cfg: Config
    shape: ModelShape
    model: list[DistributedDataParallel]


def load_on_rank(
    folder: Path,
    parallel: ParallelConfig,
    dtype: str = "float32",
    *,
    recompute: str = "none",
    modules: Sequence[str] = ("core_attn",),
) -> Loaded:
    """Start Megatron on this rank and load `folder`; call inside run_ranks."""
    cfg = Config(
        model=ModelConfig(
            path=folder, dtype=dtype, recompute=recompute, recompute_modules=tuple(modules)
        ),
        parallel=parallel,
    )
    shape = read_shape(folder)
    check_parallel(shape, parallel)
    backend = select_backend(cfg.model)
    backend.init_distributed(parallel, seed=1, timeout_s=30)
    model = build_model(backend, cfg, shape)
    load_weights(model, shape, folder)
    return Loaded(backend, cfg, shape, model)


def full_logits(loaded: Loaded, ids: Tensor, lengths: Sequence[int] | None = None) -> Tensor | None:
    """[batch, length, vocab] float32 on the last pipeline stage, None elsewhere.

    With `lengths`, `ids` is [1, tokens]: packed sequences.
    """
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    extra = {}
    if lengths is not None:
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        extra["packed_seq_params"] = packed(lengths)

    def forward(data: Any, chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        output = chunk(ids, positions, None, **extra)
        return output, lambda logits, non_loss_data: logits

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=loaded.model,
            num_microbatches=1,
            seq_length=ids.shape[1],
            micro_batch_size=ids.shape[0],
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not parallel_state.is_pipeline_last_stage():
        return None
    gathered = tensor_parallel.gather_from_tensor_model_parallel_region(outputs[0].float())
    return gathered[..., : loaded.shape.vocab]


def accumulate_gradients(
    loaded: Loaded, batches: Sequence[Tensor], scale: float = 1.0
) -> float | None:
    """Backward of `scale` * sum of next-token cross entropies over this rank's [1, tokens] batches.

    Returns the rank's loss on the last pipeline stage, None elsewhere.
    """

    def forward(data: Any, chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        ids = next(data)
        positions = torch.arange(ids.shape[1])[None]
        output = chunk(ids, positions, None, packed_seq_params=packed([ids.shape[1]]))

        def loss(logits: Tensor) -> tuple[Tensor, Tensor, float]:
            full = tensor_parallel.gather_from_tensor_model_parallel_region(logits.float())
            full = full[0, :-1, : loaded.shape.vocab]
            value = scale * torch.nn.functional.cross_entropy(full, ids[0, 1:], reduction="sum")
            return value, torch.tensor(ids.shape[1] - 1, dtype=torch.int), value.item()

        return output, loss

    for chunk in loaded.model:
        chunk.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=loaded.model,
        num_microbatches=len(batches),
        seq_length=batches[0].shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    return sum(reports) if reports else None
