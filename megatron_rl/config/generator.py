"""The sections `[generator]`, `[sampling]`, `[weights]`, `[scorer]` of the configuration tree."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_rl.config.errors import InputError
from megatron_rl.config.section import Section

MOST_PASSED_BY = 8
"""Maximum number of weight syncs that skip a generator which failed several in a row."""


def refuse_overlap(weights: "WeightsConfig", *, gpus: bool) -> None:
    """Raise InputError if `expert.weights.overlap` may be unsafe.

    gpus: whether the trainer computes on GPUs.
    """
    if gpus and weights.method == "reshard":
        raise InputError(
            "expert.weights.overlap=true with weights.method=reshard needs a trainer without GPUs: "
            "on one, the exchange's kernels and those of the trainer's own groups could wait for "
            "each other for ever; give weights.method=folder, or leave overlap at false"
        )


_BOUNDED_KV_TOKENS = 65_536
Argument = bool | int | float | str
"""Value of a command-line argument."""


class GeneratorConfig(Section):
    """Engine replicas."""

    engine: str = "sglang"
    """Entry of ENGINES: "sglang", "hf" or "vllm" (vLLM's CPU build: `bash tools/install.sh cpu
    --with vllm`); or package.module:function."""
    replicas: PositiveInt = 1
    """Number of engine replicas of the whole run, on all nodes."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel ranks of one engine."""
    expert_parallel: PositiveInt = 1
    """Expert-parallel ranks of one engine. Must divide tensor_parallel; below it, ranks hold
    parts of experts. SGLang on GPUs only."""
    colocate: bool = False
    """Run engines on the trainer's GPUs. Needs weights.method = "folder", or "ipc" on one
    GPU, because two NCCL ranks cannot share a GPU."""
    release_memory: bool = False
    """Free the engines' weights and KV cache while the trainer computes on the same GPUs.
    Generation and training take turns, so that larger models fit. SGLang only; needs colocate
    and weights.kv_cache = "recompute"."""
    quantization: str = ""
    """Quantization of the engine's weights: "fp8", or "" for none; in training those two alone.
    Engine ranks take bf16 slices and quantize each layer when it is complete."""
    overlap_schedule: bool = False
    """Let SGLang prepare the next token while one is computed. Needs weights.kv_cache =
    "recompute": with a kept KV cache SGLang would count one token of the older weights as one of
    the newer."""
    deterministic: bool = False
    """Draw each completion from its own seed, by kernels whose results do not depend on other
    requests. Generation is slower. A run that is killed and resumed then has the prompts, tokens
    and losses of an uninterrupted one. Needs queue.max_staleness = 0 and train.deterministic;
    engine "hf" then generates one completion after the other, and "vllm" cannot."""
    extra_args: dict[str, Argument | list[Argument]] = {}
    """Further arguments of SGLang's server by name, as {mem-fraction-static = 0.8}; true for an
    argument without a value. The run refuses arguments that it sets itself, or that would change
    which weights sampled a token. SGLang's parser checks the rest before the run starts."""
    env: dict[str, str | int] = {}
    """Environment variables of SGLang's server."""
    max_running: PositiveInt = 64
    """Number of completions in flight in one engine."""
    kv_tokens: PositiveInt | Literal["auto"] = "auto"
    """Number of tokens that an engine's KV cache holds, for all completions in flight. auto: with
    SGLang on separate GPUs, as many as its memory holds; else 65,536, or generator.context_tokens
    where that is more."""
    context_tokens: PositiveInt = 2048
    """Maximum length of prompt plus completion, in tokens."""
    nice: int = Field(default=0, ge=0, le=19)
    """Niceness of the engine's processes, where they share cores with the trainer."""
    start_timeout_s: PositiveFloat = 900.0
    """Seconds within which an engine must be ready; a later one has failed. A first start on a GPU
    compiles kernels for minutes; later starts find the kernels in ~/.cache."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a generator within expert.generator.restart_window_s: one that dies is started
    again after 1, 2, 4 ... at most 60 s. When they are used up, the run continues without it until
    the window allows another restart; see generator.min_replicas."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds over which restarts of a generator are counted."""
    min_replicas: PositiveInt = 1
    """Generators that the run needs: at the start, once expert.weights.join_timeout_s has passed,
    and when others have used up their restarts. With fewer it ends."""
    request_timeout_s: PositiveFloat = 300.0
    """Timeout of one completion, in seconds; the engine stops a slower one, which counts as
    failed. auto: 0.12 s per token of the longest completion, at least 300 s; then times
    run.patience. Must be below expert.queue.lease_timeout_s."""
    wait_for_weight_sync: bool = True
    """Wait for the trainer's first weights before serving; false: serve the weights of the model
    folder."""

    @property
    def takes_all_memory(self) -> bool:
        """Whether an engine's KV cache takes all remaining GPU memory."""
        return self.kv_tokens == "auto" and self.engine == "sglang" and not self.colocate

    @property
    def bounded_kv_tokens(self) -> int:
        """Tokens in a KV cache that does not take all memory."""
        if self.kv_tokens == "auto":
            return max(_BOUNDED_KV_TOKENS, self.context_tokens)
        return self.kv_tokens

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.min_replicas > self.replicas:
            raise ValueError(
                f"generator.min_replicas={self.min_replicas} is more than "
                f"generator.replicas={self.replicas}: lower it, or start more generators"
            )
        return self

    @model_validator(mode="after")
    def _check_extras(self) -> Self:
        for key in ("extra_args", "env"):
            if getattr(self, key) and self.engine in ("hf", "vllm"):
                raise ValueError(
                    f"generator.{key} is for SGLang's server, and generator.engine="
                    f"{self.engine!r}: leave it out, or use 'sglang'"
                )
        for name, value in self.extra_args.items():
            if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or value is False:
                raise ValueError(
                    f"generator.extra_args.{name}={value!r}: give the argument's name without "
                    "dashes in front, and a value, or true for an argument without one"
                )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        if self.expert_parallel > 1 and self.engine == "hf":
            raise ValueError(
                f"generator.expert_parallel={self.expert_parallel} with generator.engine='hf', "
                "which is one process: set it to 1"
            )
        if self.tensor_parallel % self.expert_parallel:
            raise ValueError(
                f"generator.expert_parallel={self.expert_parallel} must divide the "
                f"generator.tensor_parallel={self.tensor_parallel} ranks of an engine"
            )
        return self


class WeightsConfig(Section):
    """Weight sync from the trainer to the generators."""

    method: Literal["reshard", "ipc", "folder"] = "reshard"
    """Method of the weight sync. reshard: slices from shard to shard. ipc: the same through shared
    memory of one node, for a GPU that trainer and engine share. folder: the same as compressed
    files in a folder; slower, without NCCL between trainer and engine, and may overlap with
    training on GPUs."""
    folder: str = ""
    """Where weights.method "folder" puts its files: an absolute path or a URL that fsspec opens,
    such as "s3://bucket/run-7", for this run alone. Default: `weights` in the run folder."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """State that running requests keep across a weight sync. keep: the KV cache of older weights,
    as in the paper; recompute: only their tokens."""
    bucket_bytes: PositiveInt = 64 << 20
    """Bytes per round of the weight sync. Trainer and engine ranks need at most twice this
    memory in addition to their parameters."""
    deadline_s: PositiveFloat = 120.0
    """Seconds of one weight sync. A generator that has not taken the version by then is dropped
    until it connects again."""
    grace_s: PositiveFloat = 30.0
    """Seconds that all generators wait for one of them: to get ready, and in each round of the
    transfer. Then it is dropped. The first weight sync has deadline_s instead."""
    groups: PositiveInt = 1
    """Parts of the generators that a weight sync serves one after the other, so that the others
    generate meanwhile. The trainer waits for all."""
    overlap: bool = False
    """Send weights while the trainer waits for the next batch and computes its gradients, up to
    the optimizer step. Needs folder or ipc, or reshard with a trainer without GPUs."""
    join_timeout_s: PositiveFloat = 1200.0
    """Seconds within which generators must connect: all at the start, and one when none
    is left. Must exceed expert.generator.start_timeout_s."""

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, folder: str) -> str:
        if folder and not folder.startswith("/") and "://" not in folder:
            raise ValueError(
                f"expert.weights.folder={folder!r} must be an absolute path, or a URL such as "
                "s3://bucket/run-7"
            )
        return folder

    @field_validator("method", mode="before")
    @classmethod
    def _refuse_removed(cls, method: object) -> object:
        if method in ("host", "disk", "broadcast"):
            now = "reshard" if method == "broadcast" else "folder"
            raise ValueError(f"{method!r} was removed: give {now!r}")
        return method


class SamplingConfig(Section):
    """Sampling of training completions."""

    max_new_tokens: PositiveInt = 1024
    """Maximum number of new tokens per completion."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: total probability of the tokens to sample from. Below 1 the generator's
    logprobs no longer match the trainer's."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k most likely tokens; 0: from all. Above 0 the generator's logprobs no longer
    match the trainer's."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Leave out tokens less likely than this share of the most likely token's probability. Above 0
    the generator's logprobs no longer match the trainer's."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a completion, in training and in evaluations; `stop_strings` of the model's
    generation_config.json are added at the start. The completion keeps all its tokens, the one that
    completes the string included; its finish reason is "stop"."""

    def ending_at(self, texts: list[str]) -> Self:
        """With further strings that end a completion."""
        added = [text for text in texts if text not in self.stop]
        return self.model_copy(update={"stop": [*self.stop, *added]})

    def describe_stop(self) -> str:
        """A note about the strings that end a completion; "" without any."""
        strings = ", ".join(map(repr, self.stop))
        return strings and (
            "note: completions end with these texts too, of sampling.stop and the model's "
            f"generation_config.json: {strings}"
        )

    @model_validator(mode="after")
    def _check_stop(self) -> Self:
        if len(set(self.stop)) < len(self.stop):
            raise ValueError(f"sampling.stop={self.stop}: name each string once")
        return self


class ScorerConfig(Section):
    """The SGLang server of a frozen model: the reference of `algorithm.reference.source` =
    "engine", or the judge of environments. It has its own GPUs, after the generators' GPUs."""

    judge: Path | None = None
    """Folder of the Hugging Face model that environments ask by `policy.judge`, such as a larger
    model. Not set: environments have no judge. With `algorithm.reference.source` = "engine" it
    must be the folder of `algorithm.reference.policy`."""
    tensor_parallel: PositiveInt = 1
    """Tensor-parallel ranks of the scorer, on one node."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Dtype of the scorer's weights and computations; "": model.dtype."""
    quantization: str = ""
    """Quantization of the scorer's weights (SGLang's option), such as "fp8"; "": none."""
    max_running: PositiveInt = 32
    """Number of sequences in work at once. Each data-parallel replica of the trainer and each
    generator requests as many."""
    kv_tokens: PositiveInt = 65_536
    """Number of tokens in the scorer's KV cache. Must exceed generator.context_tokens."""
    nice: int = Field(default=0, ge=0, le=19)
    """Niceness of the engine's processes, where they share cores with the trainer."""
    start_timeout_s: PositiveFloat = 600.0
    """Seconds after which an engine that is not ready counts as failed."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of the scorer within expert.scorer.restart_window_s, after 1, 2, 4 ... at most 60 s;
    then its death ends the run. The trainer repeats the requests that the dead scorer had."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds over which restarts of the scorer are counted."""
    request_timeout_s: PositiveFloat = 120.0
    """Timeout of one sequence, in seconds; then the run ends."""
    answer_within_s: PositiveFloat = 900.0
    """Seconds without any answer after which the run ends, and after which an episode that asked
    the judge fails. Must exceed start_timeout_s: peers wait through starts and restarts."""

    @property
    def waits_through_starts(self) -> bool:
        """Whether peers wait longer than a start and a sequence take."""
        return self.answer_within_s > max(self.start_timeout_s, self.request_timeout_s)
