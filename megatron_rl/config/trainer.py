"""The sections `[model]`, `[optimizer]`, `[train]`, `[sft]` and `[checkpoint]` of the tree."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_rl.config.paths import is_hub_name
from megatron_rl.config.section import Section

Fusion = Literal["swiglu", "gradient_accumulation", "moe_permute", "moe_router"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act"]


class ModelConfig(Section):
    """The policy."""

    path: Path = Path("model")
    """Hugging Face folder (config.json, *.safetensors, tokenizer), or the name of a model on the
    Hugging Face Hub, such as "Qwen/Qwen2.5-0.5B-Instruct"."""
    revision: str = ""
    """Branch, tag or commit of a model on the Hub; "": the newest. The run's config.toml holds the
    commit, and a resumed run keeps it. No effect on a folder."""
    megatron_path: Path | None = None
    """Megatron checkpoint whose weights the trainer starts from, instead of the weights in path."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Compute dtype of trainer and generators; master weights are always float32."""
    head_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the softmax's logits in trainer and engines, for model.dtype "bfloat16". float32
    brings the logprobs of trainer and engine closer together. On CUDA the product costs the same,
    and logits take twice the memory. Needs generator.engine "sglang"."""
    layers: Literal["auto", "transformer_engine", "local"] = "auto"
    """Layer implementation; auto takes TransformerEngine's layers where the package is installed
    and has an attention kernel for the GPU, the dtype and the model, and local ones elsewhere."""
    fp8: Literal["none", "delayed", "tensorwise", "blockwise"] = "none"
    """Matrix products in FP8 through TransformerEngine, and the scaling of their tensors."""
    fp8_bf16_edge_layers: int = Field(default=0, ge=0)
    """Number of first layers, and of last layers, that stay in bfloat16. Not available with
    delayed scaling."""
    fp8_parameters: bool = False
    """Keep and gather the weights of FP8 products in FP8. Needs
    parallel.distributed_optimizer; not with delayed scaling. Generators receive the rounded
    weights."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to recompute in the backward pass: none, the recompute_modules, or every
    layer's."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attn",)
    """Modules of recompute "selective", by Megatron's names: core_attn; mlp (of a dense model);
    moe (a layer's router and experts). With TransformerEngine also moe_act (operations between the
    products of experts) and layernorm (norms that are not fused into a product)."""

    fusions: tuple[Fusion, ...] | Literal["auto"] = "auto"
    """Operations that TransformerEngine's layers compute in one kernel. "auto": swiglu and
    gradient_accumulation with TransformerEngine, nothing on other layers. swiglu: gate and product
    of an MLP. gradient_accumulation: the product that computes a weight's gradient adds it to the
    float32 sum. moe_permute: tokens to the order of their experts and back. moe_router: scores and
    choice of experts; not with train.router_replay, which it would ignore."""

    @field_validator("path")
    @classmethod
    def _make_absolute(cls, path: Path) -> Path:
        # Only the default is relative: `layers.py` has made other paths absolute.
        return path if is_hub_name(str(path)) else path.absolute()

    @property
    def logits_dtype(self) -> str:
        """Dtype of the logits, a key of DTYPES."""
        return "float32" if self.dtype == "float32" else self.head_dtype

    @property
    def has_wide_head(self) -> bool:
        """Whether logits have a wider dtype than the hidden states."""
        return self.logits_dtype != self.dtype

    @model_validator(mode="after")
    def _check_recompute(self) -> Self:
        modules = list(self.recompute_modules)
        given = f"model.recompute_modules={modules}"
        if not modules or len(set(modules)) < len(modules):
            raise ValueError(f"{given} shall name at least one module, and each once")
        # "full" recomputes them too, so that one key changes an example to it.
        if self.recompute == "none" and modules != ["core_attn"]:
            raise ValueError(
                f"{given} has no effect with model.recompute='none': set that to 'selective', or "
                'leave the modules at ["core_attn"]'
            )
        if {"moe", "moe_act"} <= set(modules):
            raise ValueError(f"{given}: moe holds moe_act already; leave one of them out")
        if self.fp8 == "delayed" and {"layernorm", "moe_act"} & set(modules):
            raise ValueError(
                f"{given} is not possible with model.fp8='delayed'; nearest possible: "
                "model.fp8='tensorwise', or neither layernorm nor moe_act"
            )
        return self

    @model_validator(mode="after")
    def _check_fp8(self) -> Self:
        given = f"model.fp8={self.fp8!r}"
        if self.fp8 == "none":
            if self.fp8_parameters or self.fp8_bf16_edge_layers:
                raise ValueError(
                    "expert.model.fp8_parameters and expert.model.fp8_bf16_edge_layers need FP8, "
                    f"and {given}: choose 'blockwise', 'tensorwise' or 'delayed'"
                )
        elif self.megatron_path is not None and self.fp8_parameters:
            raise ValueError(
                "model.megatron_path does not fill parameters in FP8: set "
                "expert.model.fp8_parameters=false, or make a HF folder with `megatron-rl convert`"
            )
        elif self.layers == "local":
            raise ValueError(f"{given} needs expert.model.layers='transformer_engine' or 'auto'")
        elif self.dtype != "bfloat16":
            raise ValueError(f"{given} needs model.dtype='bfloat16'")
        elif self.fp8 == "delayed" and self.fp8_bf16_edge_layers:
            raise ValueError(
                f"expert.model.fp8_bf16_edge_layers={self.fp8_bf16_edge_layers} is not possible "
                f"with {given}, which scales all layers at once; nearest possible: 0, or "
                "'tensorwise'"
            )
        elif self.fp8 == "delayed" and self.fp8_parameters:
            # Without earlier steps, loaded weights would be rounded with a scale of 1.
            raise ValueError(
                f"expert.model.fp8_parameters=true is not possible with {given}, which has no "
                "scales for loaded weights; nearest possible: model.fp8='tensorwise'"
            )
        return self


class OptimizerConfig(Section):
    """AdamW with float32 masters."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=10, ge=0)
    """Optimizer steps of linear warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule after the warm-up. linear and cosine (half a period) end at min_lr_ratio * lr on the
    last optimizer step of the run."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate of the linear and the cosine schedule over lr."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad_norm: PositiveFloat = 1.0
    """Global gradient norm limit."""
    offload: bool = False
    """Keep and update masters and moments in host memory; GPU only, needs
    parallel.distributed_optimizer and model.dtype bfloat16."""
    skip_grad_norm: float = Field(default=0.0, ge=0)
    """Skip the optimizer step when the gradient norm before clipping exceeds this value; 0:
    never skip."""


class SftOptimizerConfig(OptimizerConfig):
    """AdamW with float32 masters, for supervised steps."""

    lr: float = Field(default=1e-5, ge=0)
    """Peak learning rate; supervised steps take ten times that of reinforcement learning."""


class TrainConfig(Section):
    """Steps and batch shape of reinforcement learning."""

    steps: int = Field(default=100, ge=0)
    """Batches to train on."""
    epochs: int = Field(default=0, ge=0)
    """Number of passes over the train prompts, in place of steps: the launcher counts the
    prompts and writes steps, rounded up, to the run's config.toml. Dropped groups do not count.
    0: steps is used."""
    prompts_per_batch: PositiveInt = 16
    """Number of prompts (groups of completions) per batch, not counting zero-variance groups."""
    group_size: int = Field(default=16, ge=2)
    """Completions of one prompt; at least 2, since advantages compare them."""
    minibatches: PositiveInt = 1
    """Number of optimizer steps per batch. The paper found more than 2 harmful."""
    microbatch_tokens: PositiveInt = 4096
    """Token budget (prompt and completion) of one packed microbatch."""
    packing: Literal["tokens", "flops"] = "tokens"
    """Balance of data-parallel ranks: by `tokens` or by estimated `flops`, within each
    microbatch's token budget. flops includes attention, which makes tokens of long sequences more
    expensive. Steps are the same except for rounding."""
    pad_microbatches: bool = False
    """Pad every microbatch to the same number of positions: microbatch_tokens, rounded up so
    that the ranks can divide it. Padding is computed and has no weight; steps are the same
    except for rounding, and cost more. Needed by expert.parallel.overlap_tensor."""
    expandable_segments: bool = True
    """Use expandable segments in torch's CUDA allocator, so that microbatches of many lengths
    fragment memory less. No effect with weights.method "ipc", which shares memory with another
    process, or if PYTORCH_CUDA_ALLOC_CONF is set."""
    logprob_chunk_tokens: int = Field(default=2048, ge=8)
    """Compute logprobs in chunks, so that logits and their copies take less memory than float32
    logits of this many tokens."""
    router_replay: bool = False
    """Mixture of experts: send tokens to the experts that the generator chose, instead of the
    trainer's own choice. Needs generator.engine "sglang", which returns them."""
    record_tokens: bool = True
    """Write the policy's logprob and entropy and the advantage of every token that is trained on to
    rollouts/, for `megatron-rl view`: 12 bytes a token."""
    deterministic: bool = False
    """Steps from the same weights and batches repeat bit for bit on CUDA, on the same hardware and
    with the same parallel sizes: Megatron, TransformerEngine, cuBLAS, NCCL and torch take their
    deterministic kernels, which are slower, and torch raises an error where it has none. On the CPU
    steps repeat without it."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step, from 1, that torch's profiler records; without it none. One rank of each
    pipeline stage writes RUN/profile/stage_N.json, which opens in Perfetto. Two steps are enough:
    recording slows them."""
    max_mismatch: float = Field(default=0.5, ge=0)
    """Stop the run when the mean |trainer - generator logprob| of tokens sampled under the
    current version exceeds this, in nats; 0: never."""
    max_skipped_updates: PositiveInt = 5
    """Stop the run after this many skipped optimizer steps in a row. The last minibatch is
    written to the run folder."""
    max_restarts: int = Field(default=10, ge=0)
    """Restarts of the trainer within expert.train.restart_window_s, if a signal killed one of its
    ranks. It repeats the steps since its newest checkpoint on the same batches, while generators,
    verifiers and queue continue. On several nodes the loss of a trainer node counts too. Needs
    checkpoints and expert.queue.ledger."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds over which restarts of the trainer are counted."""
    batch_timeout_s: PositiveFloat = 1200.0
    """Seconds that the trainer waits for a batch before it ends the run; auto: 1.5 times
    expert.queue.lease_timeout_s, at least 1200 s times run.patience. Above
    expert.queue.max_attempts x expert.generator.request_timeout_s, one slow completion drops its
    group and does not end the run."""
    collective_timeout_s: PositiveFloat = 600.0
    """Seconds that a collective among trainer ranks may take; a longer one ends the run. Raise it
    when ranks read a checkpoint, or compile, at very different speeds."""

    @property
    def disk_wait_s(self) -> float:
        """Longest time that a rank waits for room on a disk: less than the others wait for it."""
        return 0.9 * self.collective_timeout_s

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        _check_window("train.profile_steps", self.profile_steps)
        return self


def _check_window(key: str, steps: tuple[int, int] | None) -> None:
    if steps is not None and steps[0] > steps[1]:
        raise ValueError(
            f"{key}={list(steps)}: the first step is after the last one; set {sorted(steps)}"
        )


class SftConfig(Section):
    """Supervised cold start, and its SFT baseline."""

    dataset: Path | None = None
    """JSONL file of {"messages", "response"}; a line without response teaches all messages of the
    assistant, with their tool calls (docs/data.md). Without it there is no cold start."""
    remark: str = ""
    """Remark about the SFT examples that is shown with the accuracies."""
    steps: int = Field(default=0, ge=0)
    """Optimizer steps."""
    batch_size: PositiveInt = 32
    """Number of SFT examples per step."""
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    """Learning rate and schedule of the cold start."""
    checkpoint_every_steps: int = Field(default=0, ge=0)
    """Number of steps between checkpoints of the cold start, from which it resumes; 0: none.
    checkpoint.keep_last and expert.checkpoint.write_timeout_s hold here too."""
    export_every_steps: int = Field(default=0, ge=0)
    """Number of steps between exports of the model. All exports and the last model are
    evaluated, and RL starts from the most accurate one; 0: export only the last model."""
    choose_by: str = ""
    """Evaluation that chooses among the exports: the name of one of eval.sets; "": the held-out
    prompts. The chosen model looks better on that set than it is."""
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None
    """First and last step, from 1, that torch's profiler records, as train.profile_steps does for
    RL; without it none. The files are RUN/profile/sft/stage_N.json, of the SFT baseline
    RUN/profile/baseline/stage_N.json."""
    baseline: bool = False
    """Train an SFT baseline after RL: continue the cold start on the same SFT examples for RL's
    compute, and evaluate it."""

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        _check_window("sft.profile_steps", self.profile_steps)
        return self

    @model_validator(mode="after")
    def _check_exports(self) -> Self:
        if self.steps and self.export_every_steps >= self.steps:
            raise ValueError(
                f"sft.export_every_steps={self.export_every_steps} is not below sft.steps="
                f"{self.steps}: there is one model, and nothing to choose; lower it, or set it to 0"
            )
        return self

    @property
    def cold_start_dataset(self) -> Path | None:
        """The SFT examples of the cold start; None without one."""
        return self.dataset if self.steps else None

    @property
    def candidates(self) -> list[int]:
        """Steps of the exports to choose from; [] without a choice."""
        every = self.export_every_steps
        if not every or not self.steps:
            return []
        return [*range(every, self.steps, every), self.steps]

    @property
    def trains(self) -> bool:
        """Whether there is a cold start or an SFT baseline."""
        return self.steps > 0 or self.baseline


class CheckpointConfig(Section):
    """Checkpoints of trainer and queue together, and resuming from a checkpoint."""

    every_steps: int = Field(default=20, ge=0)
    """Number of steps from one checkpoint to the next; the last step has one too, and a stop by a
    signal. 0: none but that of a stop; a run that dies has to begin again."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep the checkpoints of every step divisible by this number; 0: none."""
    export_every_steps: int = Field(default=0, ge=0)
    """Number of batches between exports of the model to the Hugging Face folder
    RUN/hf/step_NNNNNN; 0: only hf/final. keep_last and keep_every hold for these folders too."""
    resume: str = Field(default="auto", min_length=1)
    """Start of a run. auto: from the newest complete checkpoint of the run folder, if any;
    never: from the beginning, in a new folder; or the path of a checkpoint. The run begins or goes
    back there once: the same command then resumes from the newest one of the run folder."""
    queue_timeout_s: PositiveFloat = 600.0
    """Seconds within which the queue must report its state. All earlier rollouts must be on disk
    by then, so a slow disk needs more."""
    stop_timeout_s: PositiveFloat = 300.0
    """Seconds from the launcher's first signal (Ctrl-C, SIGTERM, SIGHUP) to the end of training.
    Within them the trainer ends its step and saves a checkpoint, also with every_steps = 0. A step
    that takes longer is lost."""
    write_timeout_s: PositiveFloat = 1800.0
    """Seconds within which a checkpoint must be on disk, else the run ends. Also the longest
    time that rank 0 may keep the other ranks waiting while it exports a model, and that a process
    waits for room on a full disk."""
