"""What a generator expects of an engine, and the table of engines.

Used by the generator process. An engine samples completions of the weights it holds and takes new
weights between two tokens, with requests and KV cache kept.
"""

import importlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from megatron_rl.config.generator import MOST_PASSED_BY, Argument
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import Bucket, JoinGroup, PassOn, Receive, Sampling, VersionSpan
from megatron_rl.protocol.wire import LOOPBACK

ENGINES = {
    "sglang": "generation.sglang_engine:SGLangEngine",
    "hf": "generation.hf_engine:HFEngine",
    "vllm": "generation.vllm_engine:VLLMEngine",
}


class EngineError(RuntimeError):
    """The engine could not do what it was asked; the text says why, in the engine's own words."""


class EngineTimeout(EngineError):
    """The engine gave no answer in time: it may hang."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """What an engine is started with."""

    model: Path
    dtype: str
    stop_ids: tuple[int, ...]
    """Token ids that end a sequence, in addition to those of the model folder."""
    tensor_parallel: int
    max_running: int
    kv_tokens: int
    context_tokens: int
    nice: int
    start_timeout_s: float
    request_timeout_s: float
    weights_timeout_s: float
    """Deadline of each step of a weight sync."""
    host: str
    port: int
    """Where an engine's server listens; loopback only. Its ranks meet at the next port."""
    seed: int
    version: int
    """Policy version of the folder's own weights; -1 when they are to be replaced first."""
    log_path: Path
    takes_all_memory: bool = False
    """Whether on a GPU the KV cache holds what its memory has room for, not kv_tokens."""
    expert_parallel: int = 1
    """Number of its ranks among which whole experts are divided."""
    nodes: int = 1
    """Hosts among which the engine's ranks are divided."""
    node_rank: int = 0
    meets_at: str = ""
    """Where the ranks of several nodes meet, as address:port."""
    orders: Path | None = None
    """The file of orders to the ranks; None: next to the log."""
    recomputes_kv_cache: bool = False
    """Whether a weight sync drops the keys and values of older weights."""
    overlaps_schedule: bool = False
    """Whether SGLang prepares the next token while one is computed. Only where a weight sync drops
    keys and values: a pause that keeps them leaves a token of the older weights in flight, which
    SGLang then counts to the newer ones."""
    quantization: str = ""
    """How the engine keeps its weights; "" as they come."""
    has_wide_head: bool = False
    """Whether logits are float32 though the weights are not."""
    returns_expert_choices: bool = False
    """Whether completions carry the experts of each token."""
    colocate: bool = False
    """Whether the trainer computes on its GPUs."""
    releases_memory: bool = False
    """Whether it is asked to give the memory of weights and KV cache back for a while."""
    watchdog_timeout_s: float = 300.0
    """SGLang ends a server that has completions and makes no pass for so long; a pause counts."""
    may_exceed_model: bool = False
    """Whether context_tokens may be more than config.json says that the model was made for."""
    stops_at_text: bool = False
    """Whether requests may name strings that end a completion."""
    extra_args: Mapping[str, Argument | list[Argument]] = field(default_factory=dict)
    """Further arguments of a server's command line, by their names."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables of a server's environment."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion of a group."""

    index: int
    """One of the requested indices."""
    token_ids: list[int]
    """The end-of-sequence token is included when it was sampled."""
    logprobs: list[float]
    """Of each sampled token, under softmax(logits / temperature), or softmax(logits) if greedy."""
    spans: list[VersionSpan]
    finish_reason: str
    """"stop" or "length"."""
    expert_choices: bytes = b""
    """[prompt + completion tokens - 1, layers, experts of a token] int32, if asked for."""
    first_token_at: float = -1.0
    """When the first token was sampled, by this host's time.monotonic(); -1: not known."""


class Engine(Protocol):
    """An engine. All methods run on one event loop; `generate` runs many times at once."""

    name: str
    engine_version: str
    world_size: int
    """Its ranks."""
    ffn_multiple: int
    """To what it pads the MLP units of a rank."""
    expert_parallel: int
    """Number of its ranks among which whole experts are divided."""
    version: int
    """Policy version of the weights it holds."""

    def __init__(self, setup: EngineSetup) -> None: ...

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineError, with the reason."""

    def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """Yield one completion for each index, each as soon as it is finished.

        Closing the iterator early stops the unfinished ones in the engine. Raises EngineError, at
        the latest after the setup's request_timeout_s.
        """

    async def pause(self) -> None:
        """Stop between two tokens; keep requests, start no new ones. Again: nothing.

        Raises EngineError, as do the methods below.
        """

    async def receive(self, order: Receive) -> None:
        """Take slices from the trainer ranks. Only while paused.

        Each rank reports to the trainer whether they arrived: `weights/exchange/engine_rank.py`.
        """

    async def pass_on(self, order: PassOn) -> None:
        """Send another engine what `receive` has taken. Only while paused."""

    async def load(self, folder: Path, version: int) -> None:
        """Load a Hugging Face folder. Only while paused."""

    async def join_group(self, message: JoinGroup) -> None:
        """Join the group of a broadcast."""

    async def receive_bucket(self, bucket: Bucket) -> None:
        """Take part in the broadcast of one bucket and load it. Only while paused."""

    async def resume(self, version: int) -> None:
        """Continue; later tokens carry `version`."""

    async def leave_group(self) -> None:
        """Leave the syncer's group. After a weight sync that was cut short the pause stays."""

    async def failed(self) -> str:
        """Return, with the reason, when the engine has died; wait for ever while it lives."""

    async def close(self) -> None:
        """End the engine and everything it started."""


@runtime_checkable
class ReleasingEngine(Protocol):
    """An engine that can give memory back; it has these methods too."""

    async def release(self) -> None:
        """Stop as `pause` does, and give the memory of weights and KV cache back. Again: nothing.

        Requests wait. Weights are lost: nothing is served before a whole weight sync.
        """

    async def reclaim(self) -> None:
        """Take that memory again, if it was given back; still stopped."""


def engine_setup(config: Config, index: int, stop_ids: tuple[int, ...]) -> EngineSetup:
    """Setup of generator `index` of a run. An engine has two ports: its own and the next."""
    generator = config.generator
    return EngineSetup(
        model=config.model.path,
        dtype=config.model.dtype,
        stop_ids=stop_ids,
        tensor_parallel=generator.tensor_parallel,
        expert_parallel=generator.expert_parallel,
        max_running=generator.max_running,
        kv_tokens=generator.bounded_kv_tokens,
        takes_all_memory=generator.takes_all_memory,
        context_tokens=generator.context_tokens,
        nice=generator.nice,
        start_timeout_s=generator.start_timeout_s,
        request_timeout_s=generator.request_timeout_s,
        weights_timeout_s=config.weights.deadline_s,
        # Only this process speaks with its server, wherever the run's other nodes are.
        host=LOOPBACK[0],
        port=config.ports.engine + 2 * index,
        seed=config.run.seed + index,
        version=-1 if generator.wait_for_weight_sync else 0,
        log_path=config.run.dir / "logs" / f"{generator.engine.split(':')[-1]}-{index}.log",
        recomputes_kv_cache=config.weights.kv_cache == "recompute",
        overlaps_schedule=generator.overlap_schedule,
        releases_memory=generator.release_memory,
        quantization=generator.quantization,
        colocate=generator.colocate,
        has_wide_head=config.model.has_wide_head,
        returns_expert_choices=config.train.router_replay,
        watchdog_timeout_s=longest_pause_s(config),
        stops_at_text=bool(config.sampling.stop),
        extra_args=generator.extra_args,
        env={name: str(value) for name, value in generator.env.items()},
    )


def longest_pause_s(config: Config) -> float:
    """Longest that an engine in good order may stay paused with completions in it.

    A generator that a weight sync has lost stays paused until it is served again. Meanwhile the
    trainer serves the others, writes a checkpoint and waits for a batch, once for each weight sync
    that passes the generator by.
    """
    return (1 + MOST_PASSED_BY) * config.longest_step_s


def load_engine(name: str) -> type[Engine]:
    """Engine class of a name in ENGINES or of `package.module:Class`."""
    target = ENGINES.get(name, name)
    module, separator, attribute = target.partition(":")
    if not separator:
        raise ValueError(
            f"generator.engine={name!r} is neither one of {sorted(ENGINES)} nor "
            "package.module:Class"
        )
    return getattr(importlib.import_module(module), attribute)
