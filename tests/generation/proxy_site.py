"""The part of a generator that holds conversations, with the proxy and an engine by a script."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from generation.engine import Completion, EngineError
from generation.episodes import Environments, Episodes
from generation.health import Activity, EngineHealth
from generation.proxy import open_proxy
from generation.rollouts import Work
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import ChatMessage, Lease, Prompt, Rollout, Sampling, VersionSpan
from verification.environments.host import EnvironmentHost
from verification.environments.settings import EnvironmentSettings

TASK = "sums"
TWO_CALLS = "".join(
    f'<tool_call>\n{{"name": "look_up", "arguments": {{"word": "{word}"}}}}\n</tool_call>\n'
    for word in ("fig", "plum")
)


class ScriptedEngine:
    """Its reply depends on the prompt alone: one token a character, unlike any tokenizer.

    replies: given in turn instead, in the tokenizer's own tokens.
    """

    name, engine_version, world_size, ffn_multiple, expert_parallel = "scripted", "1", 1, 1, 1
    version = 3

    def __init__(self, renderer: Renderer, replies: Sequence[str] = ()) -> None:
        self.renderer, self._replies = renderer, list(replies)
        self.prompts: list[str] = []
        self.texts: list[str] = []
        """Replies."""
        self.rows: list[list[int]] = []
        """Tokens of each prompt, and of the reply to it."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        prompt = self.renderer.tokenizer.decode(prompt_ids)
        self.prompts.append(prompt)
        last = prompt.rpartition("<|im_start|>user\n")[2]
        if last.startswith("slow"):
            await asyncio.sleep(0.8)
        if last.startswith("long"):
            await asyncio.sleep(1.8)
        if last.startswith("wait"):
            await asyncio.sleep(0.15)
        if last.startswith("fail"):
            raise EngineError("it cannot do this prompt")
        text = f"{hashlib.sha256(prompt.encode()).hexdigest()[:9]} ok"
        if last.startswith("call look_up") and "<tool_response>" not in last:
            text = TWO_CALLS
        if last.startswith("call nothing"):
            text = '<tool_call>{"name": "nothing", "arguments": {}}</tool_call>'
        if "thinks" in last:
            text = f"<think>\nhm\n</think>\n\n{text}"
        ids = [token for letter in text for token in self.renderer.encode(letter)]
        if self._replies:
            text = self._replies.pop(0)
            ids = self.renderer.encode(text)
        self.texts.append(text)
        ids = [*ids, self.renderer.end_id][: sampling.max_new_tokens]
        self.rows.append([*prompt_ids, *ids])
        reason = "stop" if ids[-1] == self.renderer.end_id else "length"
        logprobs = [-1.0 / (place + len(prompt_ids)) for place in range(1, len(ids) + 1)]
        spans = [VersionSpan(self.version, 0, len(ids))]
        yield Completion(indices[0], ids, logprobs, spans, reason)


class Site:
    """The generator's code for conversations, on its own event loop."""

    def __init__(
        self, renderer: Renderer, settings: EnvironmentSettings, target: str = "proxied:play",
        *, patience_s: float = 30.0,
    ) -> None:  # fmt: skip
        self.target, self.patience_s = target, patience_s
        self.runner = asyncio.Runner()
        self.host = EnvironmentHost(settings)
        self.opened = open_proxy(settings)
        self.proxy = self.wait(self.opened.__aenter__())
        self.take(renderer)

    def take(self, renderer: Renderer, replies: Sequence[str] = ()) -> None:
        """Hold conversations with this model."""
        self.engine = ScriptedEngine(renderer, replies)
        health = EngineHealth(300.0, counts_passes=False)
        environments = Environments({TASK: self.target}, self.host, self.proxy)
        self.episodes = Episodes(Work(self.engine, renderer, health, Activity()), environments)

    def wait(self, awaited: Any) -> Any:
        async def body() -> Any:
            return await asyncio.wait_for(awaited, self.patience_s)

        return self.runner.run(body())

    def close(self) -> None:
        self.wait(self.host.close())
        self.wait(self.opened.__aexit__(None, None, None))
        self.runner.close()

    async def rollout(self, name: str, entry: Any = None, **sampling: Any) -> Any:
        """Rollout or RolloutFailed of one of the environments."""
        messages = [ChatMessage("user", "the first question")]
        return await self.hold(Prompt("p", TASK, messages, name, entry=json.dumps(entry)), sampling)

    async def hold(self, prompt: Prompt, sampling: dict[str, Any]) -> Any:
        """Rollout or RolloutFailed of one conversation."""
        values = {"max_new_tokens": 2000, "temperature": 1.0, **sampling}
        [found] = [
            one async for one in self.episodes.rollouts(Lease(1, prompt, [0], Sampling(**values)))
        ]
        return found

    def play(self, name: str, entry: Any = None, **sampling: Any) -> Any:
        self.engine.prompts.clear()
        return self.wait(self.rollout(name, entry, **sampling))


def rows_of(rollout: Rollout) -> list[list[int]]:
    ids = [*rollout.prompt_ids.tolist(), *rollout.token_ids.tolist()]
    edges = [0, *rollout.row_starts, len(ids)]
    return [ids[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def texts_of(rollout: Rollout, renderer: Renderer) -> list[str]:
    return [renderer.tokenizer.decode(row) for row in rows_of(rollout)]


def learnt_of(rollout: Rollout, renderer: Renderer) -> list[str]:
    return [renderer.decode(rollout.token_ids[s.start : s.end].tolist()) for s in rollout.spans]


def rendered(renderer: Renderer, *texts: str, tools: Any = ()) -> str:
    """The template's own text of a conversation, users and replies in turn."""
    roles = ("user", "assistant")
    turns = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
    return renderer.template.render(turns, opens_answer=False, tools=tools).rstrip("\n")
