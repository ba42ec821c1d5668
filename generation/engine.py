"""The contract between a generator and its engine, and the table of engines.

Used by the generator process. An engine samples completions with its current weights and takes new
weights between two tokens; requests and KV cache stay.
"""

import importlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from megatron_rl.config.generator import MOST_PASSED_BY, Argument
from megatron_rl.config.hf_config import positions_of
from megatron_rl.config.tree import Config
from megatron_rl.protocol.render import read_values
from megatron_rl.protocol.types import Receive, Sampling, VersionSpan
from megatron_rl.protocol.wire import LOOPBACK

ENGINES = {
    "sglang": "generation.sglang_engine:SGLangEngine",
    "hf": "generation.hf_engine:HFEngine",
    "vllm": "generation.vllm_engine:VLLMEngine",
}


class EngineError(RuntimeError):
    """The engine failed at a request; the text is the engine's."""


class EngineTimeout(EngineError):
    """The engine gave no answer in time: it may hang."""


class RequestRefused(EngineError):
    """The engine is alive, and refuses this input."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Settings with which an engine starts."""

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
    """Port of an engine's server, on loopback. The next port is the rendezvous of its ranks."""
    seed: int
    version: int
    """Policy version of the folder's weights; -1: a weight sync must replace them first."""
    log_path: Path
    takes_all_memory: bool = False
    """Whether the KV cache of a GPU takes all free memory instead of kv_tokens."""
    expert_parallel: int = 1
    """Number of its ranks among which whole experts are divided."""
    nodes: int = 1
    """Nodes that share the engine's ranks."""
    node_rank: int = 0
    meets_at: str = ""
    """Rendezvous of the ranks of several nodes, as address:port."""
    orders: Path | None = None
    """File of orders to the ranks; None: next to the log."""
    recomputes_kv_cache: bool = False
    """Whether a weight sync drops the KV cache of older weights."""
    overlaps_schedule: bool = False
    """Whether SGLang prepares the next token while it computes one. Only where a weight sync drops
    the KV cache: a pause that keeps it leaves a token of the older weights in flight, which SGLang
    assigns to the newer version."""
    quantization: str = ""
    """Quantisation of the engine's weights; "": none."""
    has_wide_head: bool = False
    """Whether logits are float32 although the weights are not."""
    returns_expert_choices: bool = False
    """Whether completions carry the experts of each token."""
    colocate: bool = False
    """Whether the trainer shares its GPUs."""
    releases_memory: bool = False
    """Whether it must release the memory of weights and KV cache for a time."""
    watchdog_timeout_s: float = 300.0
    """Seconds without a pass after which SGLang ends a server with completions; pauses count."""
    may_exceed_model: bool = False
    """Whether a context may exceed the positions that SGLang counts in config.json."""
    stops_at_text: bool = False
    """Whether requests may name strings that end a completion."""
    is_deterministic: bool = False
    """Whether a completion with a seed has the same tokens and logprobs whatever else runs."""
    extra_args: Mapping[str, Argument | list[Argument]] = field(default_factory=dict)
    """More arguments of a server's command line, by name."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More variables of a server's environment."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion of a group."""

    index: int
    """One of the requested indices."""
    token_ids: list[int]
    """The end-of-sequence token is included when it was sampled."""
    logprobs: list[float]
    """One a token, under softmax(logits / temperature), or softmax(logits) if greedy."""
    spans: list[VersionSpan]
    finish_reason: str
    """"stop" or "length"."""
    expert_choices: bytes = b""
    """[prompt + completion tokens - 1, layers, experts of a token] int32, if asked for; without the
    first `Sampling.choices_from` tokens."""
    cached_tokens: int = 0
    """Prompt tokens from the prefix cache, if the engine says so."""
    first_token_at: float = -1.0
    """Time of the first token by this node's time.monotonic(); -1: not known."""


class Engine(Protocol):
    """An engine. All methods run on one event loop; `generate` runs many times at once."""

    name: str
    engine_version: str
    world_size: int
    """Number of its ranks."""
    ffn_multiple: int
    """Multiple to which it pads the MLP units of a rank."""
    expert_parallel: int
    """Number of its ranks among which whole experts are divided."""
    version: int
    """Policy version of the weights it holds; the weight client sets -1 when it gives them up."""

    def __init__(self, setup: EngineSetup) -> None: ...

    async def start(self) -> None:
        """Load the model and become ready. Raises EngineError with the reason."""

    def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """Yield one completion for each index, as each finishes.

        sampling: its `draw_seeds`, if any, are those of the indices; setup.is_deterministic says
        whether they come.
        Closing the iterator early stops unfinished completions in the engine. Raises EngineError,
        at the latest after the setup's request_timeout_s.
        """

    async def pause(self) -> None:
        """Stop between two tokens; keep requests, start no new ones. A second call does nothing.

        Raises EngineError, as do the methods below.
        """

    async def receive(self, order: Receive) -> None:
        """Take slices from the trainer ranks or another engine. Only while paused.

        Each rank reports their arrival to the trainer: `weights/exchange/engine_rank.py`.
        """

    async def resume(self, version: int) -> None:
        """Continue; later tokens carry `version`."""

    async def leave_group(self) -> None:
        """Leave the syncer's group. After an aborted weight sync the engine stays paused."""

    async def failed(self) -> str:
        """Wait until the engine has died; return the reason."""

    async def close(self) -> None:
        """End the engine and everything it started."""


@runtime_checkable
class ReleasingEngine(Protocol):
    """An engine that can release its memory."""

    async def release(self) -> None:
        """Pause, and release the memory of weights and KV cache. A second call does nothing.

        Requests wait. Weights are lost: the engine serves again only after a whole weight sync.
        """

    async def reclaim(self) -> None:
        """Take released memory again; the engine stays paused."""


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
        # Only this process connects to its server.
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
        may_exceed_model=_has_positions(config),
        watchdog_timeout_s=longest_pause_s(config),
        stops_at_text=bool(config.sampling.stop),
        is_deterministic=generator.deterministic,
        extra_args=generator.extra_args,
        env={name: str(value) for name, value in generator.env.items()},
    )


def _has_positions(config: Config) -> bool:
    """Whether the model has a position for each token of a sequence, as its config.json says.

    SGLang 0.5.23 then counts too few where its own context has a margin, or where yarn scales them
    (get_context_length), and would refuse to start. Its table of angles has
    original_max_position_embeddings times the factor.
    """
    positions = positions_of(read_values(config.model.path / "config.json"))
    return positions is not None and config.generator.context_tokens <= positions


def longest_pause_s(config: Config) -> float:
    """Longest pause, in seconds, of a healthy engine with completions.

    A generator that a weight sync has lost stays paused until it is served again. Meanwhile, for
    each weight sync that leaves it out, the trainer serves the others, writes a checkpoint and
    waits for a batch.
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
