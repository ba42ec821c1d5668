"""The judge: a frozen model that answers the messages of environments.

Used by the scorer process. Environments send texts; they are rendered by the judge's own chat
template, in which no text can forge a control token (`protocol/control_tokens.py`). A judge is
frozen, so an answer is kept and given again; a request at a temperature says which draw it is.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from generation.engine import EngineError, RequestRefused
from generation.scoring_engine import ScoringEngine
from megatron_rl.config.prompts import RenderConfig
from megatron_rl.config.tree import Config
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.control_tokens import ControlTokens, TooManyTokens
from megatron_rl.protocol.render import Renderer, judge_context
from megatron_rl.protocol.rollout import Sampling
from megatron_rl.protocol.scorer_messages import Judged, JudgeRequest

MOST_KEPT = 65_536
"""Answers; the one that was asked for the longest ago goes first."""
MOST_VERDICTS = 64


@dataclass
class _Asking:
    """A request that the engine works on."""

    task: asyncio.Task[Judged]
    waiting: int = 0


class Judge:
    """Answers requests by one engine."""

    def __init__(self, engine: ScoringEngine, renderer: Renderer, max_running: int) -> None:
        self._engine, self._renderer = engine, renderer
        self._tokens = ControlTokens(renderer)
        self._room = asyncio.Semaphore(max_running)
        self._kept: OrderedDict[bytes, Judged] = OrderedDict()
        self._asking: dict[bytes, _Asking] = {}

    async def answer(self, request: JudgeRequest) -> Judged:
        """The judge's answer. Raises RequestRefused, EngineError."""
        asked = msgspec.json.encode(msgspec.structs.replace(request, request_id=0))
        key = hashlib.blake2b(asked, digest_size=16).digest()
        if (kept := self._kept.pop(key, None)) is None:
            kept = await self._ask_once(key, request)
        self._kept[key] = kept
        if len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return msgspec.structs.replace(kept, request_id=request.request_id)

    async def _ask_once(self, key: bytes, request: JudgeRequest) -> Judged:
        """The engine's answer, for all who ask for it meanwhile; without them it is cancelled."""
        asking = self._asking.get(key)
        if asking is None:
            asking = self._asking[key] = _Asking(asyncio.create_task(self._ask(request)))
        asking.waiting += 1
        try:
            # Unlike await, it does not cancel the task with one of them.
            await asyncio.wait({asking.task})
            return asking.task.result()
        finally:
            asking.waiting -= 1
            if not asking.waiting:
                del self._asking[key]
                asking.task.cancel()

    async def _ask(self, request: JudgeRequest) -> Judged:
        try:
            room = self._renderer.context_tokens
            prompt = self._tokens.render(msgspec.to_builtins(request.messages), most=room)
        except TooManyTokens as error:
            raise RequestRefused(f"{error}; {self._limits()}") from error
        except RenderError as error:
            raise RequestRefused(f"the judge's chat template: {error}") from error
        if not request.verdicts:
            return Judged(0, [], await self._write(prompt, request))
        if len(request.verdicts) > MOST_VERDICTS:
            raise RequestRefused(f"{len(request.verdicts)} verdicts, allowed are {MOST_VERDICTS}")
        replies = [self._renderer.encode(verdict) for verdict in request.verdicts]
        if not all(replies):
            raise RequestRefused("an empty verdict has no logprob")
        self._check_verdicts(request.verdicts, replies)
        self._check(prompt, max(map(len, replies)))
        return Judged(0, await asyncio.gather(*(self._score(prompt, ids) for ids in replies)), "")

    def _check_verdicts(self, verdicts: Sequence[str], replies: Sequence[Sequence[int]]) -> None:
        """Raise RequestRefused for two verdicts with the same tokens, such as unknown words."""
        first: dict[tuple[int, ...], str] = {}
        for verdict, ids in zip(verdicts, replies, strict=True):
            if (other := first.setdefault(tuple(ids), verdict)) != verdict:
                raise RequestRefused(
                    f"the judge's tokenizer gives the verdicts {other!r} and {verdict!r} the same "
                    f"tokens ({self._renderer.decode(list(ids))!r}), so both are as likely: take "
                    "other words, or a judge that knows these"
                )

    async def _score(self, prompt: list[int], reply: Sequence[int]) -> float:
        async with self._room:
            return sum(await self._engine.logprobs([*prompt, *reply], len(prompt)))

    async def _write(self, prompt: list[int], request: JudgeRequest) -> str:
        self._check(prompt, request.max_tokens)
        sampling = Sampling(request.max_tokens, request.temperature)
        async with self._room, aclosing(self._engine.generate(prompt, sampling, [0])) as answers:
            async for completion in answers:
                return self._renderer.decode(completion.token_ids)
        raise EngineError("the judge's engine ended a request without an answer")

    def _check(self, prompt: Sequence[int], max_tokens: int) -> None:
        room = self._renderer.context_tokens
        if not 0 < max_tokens <= room - len(prompt):
            raise RequestRefused(
                f"messages of {len(prompt)} tokens with a reply of {max_tokens}; {self._limits()}"
            )

    def _limits(self) -> str:
        return (
            f"the judge has room for {self._renderer.context_tokens} (expert.scorer.kv_tokens, and "
            "the positions of its model)"
        )


def judge_renderer(config: Config) -> Renderer | None:
    """Renderer of the judge's own folder; None: the run has no judge. Raises InputError."""
    folder = config.judge_folder
    if folder is None:
        return None
    return Renderer(RenderConfig(), folder, judge_context(config), format_checks={})
