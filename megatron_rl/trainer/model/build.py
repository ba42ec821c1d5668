"""The policy as a Megatron-Core GPTModel with data parallelism. Runs on every trainer rank.

The order on a rank:

    shape = read_shape(cfg.model.path)                  # InputError before anything is built
    check_parallel(shape, cfg.parallel)
    backend = select_backend(cfg.model)
    backend.init_distributed(cfg.parallel, seed=cfg.run.seed, timeout_s=120)
    model = build_model(backend, cfg, shape)            # the rank's chunks; weights still unset
    load_weights(model, shape, cfg.model.path)          # megatron_rl.weights.folders.load
    optimizer = build_optimizer(cfg.optimizer, model)   # copies the masters: after the load

Forward: `model[0](tokens, position_ids, None, packed_seq_params=packed_params(starts, lengths))`,
with tokens and position_ids [1, positions] int64. The sequences fill the positions (padding is a
sequence too); a context rank gives its own positions, but the starts of whole sequences. The
trainer calls it within `last_stage.without_output_layer`. Then the last pipeline stage returns
hidden states [1, positions, hidden], divided by positions under sequence parallelism.
`logprobs.py` computes their logits for some rows at a time. Outside of it that stage returns logits
[1, positions, padded_vocab / tensor ranks], whose columns from `shape.vocab` on are padding. Under
bf16 Megatron's wrapper converts what a last stage returns to float32, unless `fp32_output=False`.

Gradients are sums: over microbatches, and over data-parallel ranks. The loss function given to
Megatron's schedule returns (loss, tokens as an int tensor, report) and nothing divides by tokens.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_rl.backend import fp8, fusions, tensor_overlap
from megatron_rl.backend.cpu.folding import FoldedSeqParams, Folding
from megatron_rl.backend.device import Backend
from megatron_rl.backend.norms import Norms
from megatron_rl.config.errors import InputError
from megatron_rl.config.parallel import ParallelConfig, stage_layers
from megatron_rl.config.trainer import ModelConfig
from megatron_rl.config.tree import Config
from megatron_rl.trainer.model.mixture import mark_divided, mixture_fields
from megatron_rl.trainer.model.rotation import set_factor, set_rotation
from megatron_rl.weights.layout.rotary import rotation_factor, softmax_scale
from megatron_rl.weights.layout.shape import ModelShape

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_model(backend: Backend, cfg: Config, shape: ModelShape) -> list[DistributedDataParallel]:
    """This rank's part of the model, a chunk for each virtual stage; parameters not yet filled."""
    config = transformer_config(backend, cfg, shape)
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=cfg.parallel.distributed_optimizer,
        overlap_grad_reduce=cfg.parallel.overlap_gradients,
        overlap_param_gather=cfg.parallel.overlap_parameters,
        fp8_param_gather=cfg.model.fp8_parameters,
        # The optimizer step skips and counts non-finite gradients; Megatron's check would raise.
        check_for_nan_in_grad=False,
    )
    chunks = [
        DistributedDataParallel(
            config,
            data_parallel,
            _build_chunk(backend, config, shape, number),
            # The reductions of later chunks hide behind the backward passes of earlier ones.
            disable_bucketing=number > 0,
        )
        for number in range(cfg.parallel.virtual_stages)
    ]
    if cfg.parallel.overlap_gradients:
        # Otherwise each microbatch's backward pass would reduce the sum of the earlier ones again.
        holds = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = holds if len(holds) > 1 else holds[0]
    return chunks


def build_frozen(backend: Backend, cfg: Config, shape: ModelShape) -> list[torch.nn.Module]:
    """The same without gradients, for a model that is never trained.

    The buffers of expert.parallel.overlap_tensor belong to the policy, so this model uses none.
    """
    plain = cfg.parallel.model_copy(update={"overlap_tensor": False})
    config = transformer_config(backend, cfg.model_copy(update={"parallel": plain}), shape)
    chunks = [
        _build_chunk(backend, config, shape, number)
        for number in range(cfg.parallel.virtual_stages)
    ]
    return [chunk.requires_grad_(False) for chunk in chunks]


def gather_parameters(model: Sequence[DistributedDataParallel]) -> None:
    """Gather the parameters that the next forward pass would gather. Collective.

    Call before parameters are read outside a forward pass: with
    expert.parallel.overlap_parameters, an optimizer step updates only each rank's own part.
    """
    for chunk in model:
        if chunk.ddp_config.overlap_param_gather:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def _build_chunk(
    backend: Backend, config: TransformerConfig, shape: ModelShape, number: int
) -> torch.nn.Module:
    """Chunk `number` of the rank, in the compute dtype."""
    stage = {"ignore_virtual": False, "vp_stage": number}
    module: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=backend.layer_spec(
            config, number, Norms(shape.norms_behind, shape.norms_all_heads)
        ),
        vocab_size=shape.padded_vocab(config.tensor_model_parallel_size),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**stage),
        post_process=parallel_state.is_pipeline_last_stage(**stage),
        share_embeddings_and_output_weights=shape.is_tied,
        position_embedding_type="rope",
        rotary_percent=shape.rotated_dim / shape.head_dim,
        rotary_base=shape.rope_theta,
        parallel_output=True,
        vp_stage=number,
    )
    set_rotation(module, shape, backend.device)
    module.to(backend.device)
    mark_divided(module)
    if not config.bf16:
        return module
    wrapped = Float16Module(config, module)
    for router in module.modules():
        if isinstance(router, TopKRouter):
            # The wrapper has rounded the correction's buffer; Megatron widens it in a forward pass.
            router._maintain_float32_expert_bias()
    return wrapped


def transformer_config(backend: Backend, cfg: Config, shape: ModelShape) -> TransformerConfig:
    """Megatron's description of `shape` under the run's dtype and parallel sizes."""
    ends = (cfg.parallel.first_stage_layers, cfg.parallel.last_stage_layers)
    stages = stage_layers(shape.layers, cfg.parallel.pipeline, *ends)
    values = {
        **_sizes(shape),
        **mixture_fields(shape),
        "moe_enable_routing_replay": bool(shape.experts) and cfg.train.router_replay,
        **_parameters(cfg.model),
        **_split(cfg.parallel),
        "cp_comm_type": backend.context_exchange(
            cfg.parallel,
            has_window=shape.sliding_window is not None,
            has_sinks=shape.has_sinks,
        ),
        **_pipeline(cfg),
        **fusions.dispatcher_fields(
            cfg.parallel,
            has_experts=shape.experts > 0,
            has_engine=backend.layers == "transformer_engine",
        ),
        "sequence_parallel": cfg.parallel.divides_positions,
        **tensor_overlap.transformer_fields(cfg.parallel),
        # Without this the schedule divides losses by tokens and DDP averages over its ranks.
        "calculate_per_token_loss": True,
        "finalize_model_grads_func": sum_gradients,
        **_recompute(cfg.model, has_experts=shape.experts > 0, backend=backend),
        **fp8.transformer_fields(
            cfg.model,
            stage_layers=min(stages[0], stages[-1]),
            has_experts=shape.experts > 0,
            gathered_width=shape.hidden if cfg.parallel.divides_positions else 0,
        ),
        **backend.transformer_overrides(deterministic=cfg.train.deterministic),
        **fusions.transformer_fields(
            cfg.model,
            has_experts=shape.experts > 0,
            has_engine=backend.layers == "transformer_engine",
        ),
    }
    if not shape.kv_rank:
        config = TransformerConfig(**values)
        set_factor(config, rotation_factor(shape))
        return config
    return MLATransformerConfig(**{**values, **_latents(shape)})


def _parameters(model: ModelConfig) -> dict[str, Any]:
    """The parameters' dtype; they stay unset until weights are loaded."""
    dtype = DTYPES[model.dtype]
    # Rounding uninitialized memory to FP8 could leave scales that are not finite.
    leave_unset = torch.nn.init.zeros_ if model.fp8_parameters else _leave_unset
    return {
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        # load_weights fills every parameter, and proves it. perform_initialization=False would also
        # leave out the marks by which the gradient norm knows a parameter's tensor shards.
        "init_method": leave_unset,
        "output_layer_init_method": leave_unset,
        "embedding_init_method": leave_unset,
    }


def _split(parallel: ParallelConfig) -> dict[str, Any]:
    """Parallel sizes."""
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "virtual_pipeline_model_parallel_size": parallel.interleaved_chunks,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers or None,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
    }


def _pipeline(cfg: Config) -> dict[str, Any]:
    """What pipeline stages send each other."""
    has_stages, is_interleaved = cfg.parallel.pipeline > 1, cfg.parallel.virtual_stages > 1
    return {
        "pipeline_dtype": DTYPES[cfg.model.dtype],
        # Stages tell each other the shape of each microbatch, unless all have the same one.
        # Megatron then refuses the default token dispatcher even for models without experts.
        "variable_seq_lengths": has_stages and not cfg.train.pad_microbatches,
        # A stage keeps the graph of what it sent, not the values. Megatron 0.16.1 drops the values
        # of interleaved stages while they are being sent (schedules.py:1522).
        "deallocate_pipeline_outputs": has_stages and not is_interleaved,
        # Two stages that exchange both directions in one batch would mix them up.
        "overlap_p2p_comm": is_interleaved,
        "batch_p2p_comm": not is_interleaved,
    }


def _sizes(shape: ModelShape) -> dict[str, Any]:
    window = shape.sliding_window
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "kv_channels": shape.head_dim,
        "softmax_scale": softmax_scale(shape),
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "gated_linear_unit": True,
        "activation_func": quick_gelu if shape.glu_limit else F.silu,
        "activation_func_clamp_value": shape.glu_limit or None,
        "glu_linear_offset": 1.0 if shape.glu_limit else 0.0,
        "softmax_type": "learnable" if shape.has_sinks else "vanilla",
        "add_bias_linear": shape.has_biases,
        "add_qkv_bias": shape.has_qkv_bias,
        # Megatron would sum the gradients of these norms over tensor ranks, which may divide them.
        "qk_layernorm": shape.has_qk_norm and not shape.norms_all_heads,
        "window_size": (window - 1, 0) if window else None,
        # Megatron counts all layers of the model, on each stage. 1: the window holds.
        "window_attn_skip_freq": _marks(shape, shape.full_layers, inside=0),
        "no_rope_freq": _marks(shape, shape.unrotated_layers, inside=1),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _latents(shape: ModelShape) -> dict[str, Any]:
    """What latent attention (MLATransformerConfig) has besides ordinary one, or otherwise."""
    scaling = shape.rope_scaling
    return {
        "q_lora_rank": shape.q_rank or None,
        "kv_lora_rank": shape.kv_rank,
        "qk_head_dim": shape.nope_dim,
        "qk_pos_emb_head_dim": shape.rotary_dim,
        "v_head_dim": shape.value_dim,
        "qk_layernorm": True,
        # Megatron's own embedding for yarn is not used: see `set_angles`. Its factor of scores is.
        "rope_type": "rope",
        "rotary_base": shape.rope_theta,
        "rotary_scaling_factor": scaling.factor if scaling else 1.0,
        "mscale_all_dim": scaling.mscale_all_dim if scaling else 0.0,
        # The fused kernel takes the angles of that embedding.
        "apply_rope_fusion": False,
    }


def _marks(shape: ModelShape, layers: Collection[int], *, inside: int) -> list[int] | None:
    """For each layer of the model: `inside` for those of `layers`; None: there are none."""
    if not layers:
        return None
    return [inside if layer in layers else 1 - inside for layer in range(shape.layers)]


def _leave_unset(weight: torch.Tensor) -> None:
    """Initialization that leaves the memory as it is."""


def _recompute(model: ModelConfig, *, has_experts: bool, backend: Backend) -> dict[str, Any]:
    """Raises InputError for a module that the model or its layers do not have."""
    match model.recompute:
        case "selective":
            modules = list(model.recompute_modules)
            foreign = {"mlp"} if has_experts else {"moe", "moe_act"}
            if foreign & set(modules):
                kind, instead = ("a mixture of experts", "moe") if has_experts else (
                    "a dense model", "mlp"
                )  # fmt: skip
                raise InputError(
                    f"model.recompute_modules={modules}: {model.path} is {kind}, which has no "
                    f"{' or '.join(sorted(foreign & set(modules)))}; nearest possible: {instead!r}"
                )
            engines = sorted({"layernorm", "moe_act"} & set(modules))
            if engines and backend.layers != "transformer_engine":
                # Megatron 0.16.1 asks TransformerEngine for its FP8 state (random.py:589).
                raise InputError(
                    f"model.recompute_modules={modules}: {' and '.join(engines)} need "
                    "TransformerEngine's layers, which this run does not have; nearest possible: "
                    f"{'moe' if has_experts else 'mlp'!r}"
                )
            return {"recompute_granularity": "selective", "recompute_modules": modules}
        case "full":
            return {
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            }
    return {}


def sum_gradients(
    model: list[DistributedDataParallel],
    num_tokens: torch.Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Megatron's gradient reductions without its division by the count of tokens.

    The loss is a weighted sum whose weights already hold the denominator.
    """
    finalize_model_grads(model, None, pg_collection, force_all_reduce)


def packed(lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedSeqParams:
    """Description of sequences packed into a [1, tokens] input."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return packed_params(bounds.to(device), lengths)


def packed_params(
    bounds: torch.Tensor, lengths: Sequence[int], folding: Folding | None = None
) -> PackedSeqParams:
    """The same with cumulative lengths: bounds [sequences + 1] int32, from 0.

    folding: how the input leaves out positions that sequences share.
    """
    longest = max(lengths)
    return FoldedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        # Megatron 0.16.1 takes the longest length for rotary angles; were it the total of several
        # sequences, positions would not restart (rope_utils.py:_apply_rotary_pos_emb_thd).
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        folding=folding,
    )
