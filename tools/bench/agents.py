"""Conversations with environments and bare calls of the engine: `python -m tools.bench.agents`.

SmolLM2-135M-Instruct in bfloat16 on our SGLang server: conversations of four turns, 24 new tokens a
turn, all open at once (256; with --quick 64). One process holds them, as a generator does.

| loop | meaning |
|---|---|
| agents | generation/episodes.py: an environment's process for each conversation, texts, records |
| bare | the same calls of the engine in a plain loop, whose given tokens are known beforehand |
| slow | 256 agents, 64 open at once, whose environments wait 0.1 to 5 s between two turns |

turns_per_s: medians over repeats, whose order alternates. over_bare: agents over bare.
cached_share: tokens of earlier turns that later ones took from the prefix cache. busy_over: share
of time with a request in the engine, in `slow` over `agents`. In a run others follow the last
conversations, so the time in which fewer are open than may be does not count. Unfair: no training
or weight sync runs meanwhile; the model is small, so that processes weigh more than with larger
ones.

Training with conversations, compared with TRL: `tools.bench.end_to_end --workload lookup`.

Progress goes to stderr; the last line on stdout is one JSON object.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from generation.engine import Completion, Engine, load_engine
from generation.episodes import Environments, Episodes
from generation.health import Activity, EngineHealth
from generation.rollouts import Work
from megatron_rl.config.prompts import RenderConfig
from megatron_rl.launcher.ports import find_free
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.rollout import given_ranges
from megatron_rl.protocol.types import ChatMessage, Lease, Prompt, Rollout, Sampling
from tools.bench.children import HOST, smollm2
from tools.bench.generate_peer import endless_model, setup
from tools.bench.measuring import CORES, busy_share, parser, run, say
from verification.environments.host import EnvironmentHost
from verification.environments.settings import EnvironmentSettings

CONVERSATIONS, QUICK_CONVERSATIONS = 256, 64
MOST_OPEN = 256
SLOW_OPEN = 64
"""Conversations that are open at once in the loop `slow`."""
TURNS, NEW_TOKENS = 4, 24
CONTEXT_TOKENS = 512
MODULE = f"""
import asyncio, random
from verification.environments import Outcome

luck = random.SystemRandom()  # random itself draws the same for all members of a group

async def talk(prompt, policy, waits=False):
    chat = policy.chat(prompt.messages)
    await chat.say(max_tokens={NEW_TOKENS})
    for turn in range({TURNS - 1}):
        if waits:
            await asyncio.sleep(luck.uniform(0.1, 5.0))
        chat.add("user", f"Turn {{turn}}: tell me more about that, please.")
        await chat.say(max_tokens={NEW_TOKENS})
    return Outcome(1.0, "done")

async def slow(prompt, policy):
    return await talk(prompt, policy, waits=True)
"""


@dataclass
class Counting:
    """An engine that counts the cached tokens of requests behind a reply."""

    engine: Engine
    cached_tokens: int = 0
    first: list[int] = field(default_factory=list)
    """The prompt of all first turns."""

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        self.first = self.first or prompt_ids
        async for completion in self.engine.generate(prompt_ids, sampling, indices):
            if prompt_ids != self.first:
                self.cached_tokens += completion.cached_tokens
            yield completion


@dataclass
class Sample:
    seconds: float
    busy_share: float
    cached_share: float
    rollouts: list[Rollout]

    @property
    def turns_per_s(self) -> float:
        """Turns of all conversations, per second."""
        return TURNS * len(self.rollouts) / self.seconds


class Bench:
    """One engine, and the loops that use it."""

    def __init__(self, engine: Engine, renderer: Renderer, folder: Path) -> None:
        self._engine, self._renderer, self._folder = engine, renderer, folder
        (folder / "bench_agents_talk.py").write_text(MODULE)
        self._calls = 0

    def _lease(self, conversations: int) -> Lease:
        # Another first message each time: no prefix cache of an earlier loop helps.
        self._calls += 1
        text = f"Conversation {self._calls}: what do you know about the sea?"
        prompt = Prompt("p", "talk", [ChatMessage("user", text)], "")
        return Lease(self._calls, prompt, list(range(conversations)), Sampling(400, 1.0))

    async def agents(self, name: str, conversations: int, most_open: int = MOST_OPEN) -> Sample:
        """Conversations with real environments. most_open: at once."""
        counting, activity = Counting(self._engine), Activity()
        work = Work(counting, self._renderer, EngineHealth(600, counts_passes=False), activity)  # type: ignore[arg-type]
        settings = EnvironmentSettings(
            paths=(str(self._folder),),
            log_path=str(self._folder / "environments.log"),
            max_episodes=most_open,
        )
        async with EnvironmentHost(settings) as host:
            episodes = Episodes(work, Environments({"talk": f"bench_agents_talk:{name}"}, host))
            started = time.perf_counter()
            activity.start(time.monotonic())
            found, full = [], activity.report(time.monotonic())
            async for one in episodes.rollouts(self._lease(conversations)):
                if len(found) <= max(0, conversations - most_open):
                    full = activity.report(time.monotonic())
                found.append(one)
            seconds = time.perf_counter() - started
        rollouts = [one for one in found if isinstance(one, Rollout)]
        assert len(rollouts) == conversations, found
        return Sample(
            seconds,
            full.busy_s / (full.busy_s + full.idle_s),
            counting.cached_tokens / sum(map(known_tokens, rollouts)),
            rollouts,
        )

    async def bare(self, like: Sample) -> float:
        """Seconds of the same calls: each conversation's given tokens behind its own replies."""

        async def converse(rollout: Rollout, index: int) -> None:
            token_ids = rollout.token_ids.tolist()
            glue = [token_ids[start:end] for start, end in given_ranges(rollout.spans)]
            ids = [*self._renderer.encode(f"{self._calls} "), *rollout.prompt_ids.tolist()]
            for given in [[], *glue]:
                ids += given
                async for completion in self._engine.generate(
                    list(ids), Sampling(NEW_TOKENS, 1.0, is_turn=True), [index]
                ):
                    ids += completion.token_ids

        self._calls += 1
        started = time.perf_counter()
        await asyncio.gather(*(converse(one, number) for number, one in enumerate(like.rollouts)))
        return time.perf_counter() - started


def known_tokens(rollout: Rollout) -> int:
    """Prompt tokens of later turns that the engine has seen or sampled in earlier ones."""
    prompt = len(rollout.prompt_ids)
    return sum(prompt + start for start, _ in given_ranges(rollout.spans))


async def measure(folder: Path, conversations: int, repeats: int) -> dict[str, Any]:
    source = smollm2()
    given = setup(
        endless_model(source, folder / "model"), running=conversations,
        context_tokens=CONTEXT_TOKENS, port=find_free(HOST, 2), log_path=folder / "engine.log",
    )  # fmt: skip
    engine = load_engine("sglang")(given)
    renderer = Renderer(
        RenderConfig(system_prompt=""), source, CONTEXT_TOKENS, format_checks={"talk": "none"}
    )
    bench = Bench(engine, renderer, folder)
    try:
        await engine.start()
        await bench.bare(await bench.agents("talk", 8))
        ours: list[Sample] = []
        bare: list[float] = []
        for _ in range(repeats):
            ours.append(await bench.agents("talk", conversations))
            bare.append(await bench.bare(ours[-1]))
            say(f"agents {ours[-1].seconds:.1f} s, bare {bare[-1]:.1f} s")
        slow = await bench.agents("slow", CONVERSATIONS, SLOW_OPEN)
        say(f"slow {slow.seconds:.1f} s, busy {slow.busy_share:.3f}")
    finally:
        await engine.close()
    return {
        "conversations": conversations,
        "turns_per_s": statistics.median(one.turns_per_s for one in ours),
        "bare_turns_per_s": TURNS * conversations / statistics.median(bare),
        "over_bare": statistics.median(b / one.seconds for one, b in zip(ours, bare, strict=True)),
        "cached_share": statistics.median(one.cached_share for one in ours),
        "busy_share": statistics.median(one.busy_share for one in ours),
        "slow_busy_share": slow.busy_share,
        "busy_over": slow.busy_share / statistics.median(one.busy_share for one in ours),
    }


def main() -> int:
    made = parser(__doc__, quick="64 conversations, one repeat", repeats="samples of each loop")
    options = made.parse_args()
    conversations = QUICK_CONVERSATIONS if options.quick else CONVERSATIONS
    repeats = options.repeats or (1 if options.quick else 3)

    def measured(folder: Path, cores: list[int]) -> dict[str, Any]:
        others = busy_share(cores)
        return asyncio.run(measure(folder, conversations, repeats)) | {"others_busy_share": others}

    return run("agents", options, measured, cores=CORES)


if __name__ == "__main__":
    sys.exit(main())
