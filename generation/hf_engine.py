"""transformers' continuous batching as an engine, inside the generator process.

For tests and for machines without SGLang. The file imports modules of `megatron_rl.weights` that
need torch and messages alone: both ends of an exchange need the same lines.

Concurrency:

| task or thread       | waits for                           | woken by           | closed by  |
|----------------------|-------------------------------------|--------------------|------------|
| each `generate`      | `_is_serving`, its queue of results | `resume`, a result | its caller |
|                      | its turn (`setup.is_deterministic`) | the end of another | its caller |
| transformers' thread | requests; the end of a pause        | `add_request`      | `close`    |
| one worker thread    | a pause, a collective               | the weight methods | `close`    |

Results reach the event loop in the order of sampling, so notes taken in `pause` come after every
result of the older weights.
"""

import asyncio
import contextlib
import importlib.metadata
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.continuous_batching import ContinuousBatchingManager

from generation.engine import Completion, EngineError, EngineSetup, EngineTimeout
from generation.hf_manager import Decode, Request, first_token_at, one_by_one, open_manager
from generation.weight_versions import spans_from_cuts
from megatron_rl.protocol.types import Receive, Sampling
from megatron_rl.weights.exchange.engine_rank import EngineRank

T = TypeVar("T")

GREEDY_TEMPERATURE = 1e-8
"""The manager samples all requests; at this temperature the argmax always wins."""
WATCH_S = 1.0
CLOSE_S = 30.0


class HFEngine:
    """`Engine` over a transformers model in this process, on torch's default device."""

    name = "hf"
    world_size = 1
    ffn_multiple = 1
    expert_parallel = 1

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self.engine_version = importlib.metadata.version("transformers")
        self.version = setup.version
        self._requests: dict[str, Request] = {}
        self._ids = itertools.count()
        self._is_serving = asyncio.Event()
        self._is_serving.set()
        self._turn = asyncio.Lock() if setup.is_deterministic else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._manager: ContinuousBatchingManager | None = None
        self._pause: contextlib.AbstractContextManager[None] | None = None
        self._rank: EngineRank | None = None
        self._decode: Decode | None = None

    async def start(self) -> None:
        """Load the model and start transformers' thread."""
        if self._setup.recomputes_kv_cache:
            raise EngineError(
                "the hf engine keeps keys and values across a weight sync: set weights.kv_cache to "
                '"keep", or generator.engine to "sglang"'
            )
        try:
            await self._in_thread(self._load, self._setup.start_timeout_s)
        except (OSError, ValueError) as error:
            raise EngineError(f"cannot load {self._setup.model}: {error}") from error

    def _load(self) -> None:
        setup = self._setup
        model = AutoModelForCausalLM.from_pretrained(
            setup.model,
            dtype=getattr(torch, setup.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        )
        model = model.to(torch.get_default_device()).eval()
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._manager = open_manager(model, setup, self._requests)
        self._manager.start()
        if setup.stops_at_text:
            tokenizer = AutoTokenizer.from_pretrained(
                setup.model, local_files_only=True, mistral_format=False
            )
            self._decode = tokenizer.decode

    @property
    def _running(self) -> ContinuousBatchingManager:
        assert self._manager is not None, "the engine was not started"
        return self._manager

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """Yield completions as they finish; with setup.is_deterministic one after the other."""
        if (sampling.top_p, sampling.top_k, sampling.min_p) != (1.0, 0, 0.0):
            raise EngineError(f"the hf engine samples from all tokens, not with {sampling}")
        if sampling.stop and self._decode is None:
            raise EngineError("the hf engine was started without sampling.stop: no tokenizer")
        parts = [(sampling, indices)] if self._turn is None else one_by_one(sampling, indices)
        for own, asked in parts:
            complete = self._complete(prompt_ids, own, asked)
            async with self._turn or contextlib.nullcontext(), contextlib.aclosing(complete):
                async for completion in complete:
                    yield completion

    async def _complete(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        deadline = time.monotonic() + self._setup.request_timeout_s
        results: asyncio.Queue[Completion | int | EngineError] = asyncio.Queue(2 * len(indices))
        seeds = dict(zip(indices, sampling.draw_seeds, strict=False))
        mine: set[str] = set()

        async def submit(index: int) -> None:
            late = "a weight sync kept a request waiting longer than"
            await self._in_time(self._is_serving.wait(), deadline, late)
            request = Request(index, results, sampling.stop)
            if index in seeds:
                stream = torch.Generator(torch.get_default_device())
                request.generator = stream.manual_seed(seeds[index])
            mine.add(self._submit(prompt_ids, sampling, request))

        try:
            for index in indices:
                await submit(index)
            waiting = len(indices)
            while waiting:
                match await self._in_time(results.get(), deadline, "a completion took longer than"):
                    case Completion() as completion:
                        waiting -= 1
                        yield completion
                    case int() as index:
                        await submit(index)
                    case EngineError() as error:
                        raise error
        finally:
            for request_id in mine & self._requests.keys():
                del self._requests[request_id]
                self._running.cancel_request(request_id)

    async def _in_time(self, waiting: Coroutine[Any, Any, T], deadline: float, late: str) -> T:
        """Result of a wait; EngineError at the deadline. late: what took longer than the limit."""
        try:
            return await asyncio.wait_for(waiting, max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            limit_s = self._setup.request_timeout_s
            raise EngineError(f"{late} expert.generator.request_timeout_s={limit_s:.0f}") from error

    def _submit(self, prompt_ids: list[int], sampling: Sampling, request: Request) -> str:
        request_id = f"completion-{next(self._ids)}"
        self._requests[request_id] = request
        self._running.register_result_handler(request_id, self._note_result)
        accepted = self._running.add_request(
            prompt_ids,
            request_id=request_id,
            max_new_tokens=sampling.max_new_tokens,
            temperature=float(sampling.temperature or GREEDY_TEMPERATURE),
            record_timestamps=True,
            # Each token is a result, which is searched for stop strings.
            streaming=bool(sampling.stop),
        )
        if accepted is None:
            raise EngineError("transformers' generation thread has stopped")
        return request_id

    def _note_result(self, output: Any) -> None:
        """Hand on a completion, the index of one to generate again, or an error."""
        request = self._requests.get(output.request_id)
        if request is None:
            return  # given up
        at_text = request.ends_at_text(output.generated_tokens, self._decode)
        if not output.is_finished():
            if not at_text and not request.is_stale:
                return
            self._running.cancel_request(output.request_id)
        del self._requests[output.request_id]
        if output.error is not None:
            request.results.put_nowait(EngineError(f"transformers: {output.error}"))
        elif request.is_stale:
            request.results.put_nowait(request.index)
        else:
            token_ids = output.generated_tokens
            ended = at_text or token_ids[-1] in self._setup.stop_ids
            request.results.put_nowait(
                Completion(
                    index=request.index,
                    token_ids=token_ids,
                    logprobs=output.logprobs,
                    spans=spans_from_cuts(request.cuts, self.version, len(token_ids)),
                    finish_reason="stop" if ended else "length",
                    first_token_at=first_token_at(output.timestamps, len(token_ids)),
                )
            )

    async def receive(self, order: Receive) -> None:
        if self._pause is None:
            raise EngineError("slices came outside a weight sync: pause first")
        if self._rank is None:
            dtype = getattr(torch, self._setup.dtype)
            self._rank = EngineRank(lambda: self._parameters, 0, dtype, may_pad_ffn=False)
        rank = self._rank
        await self._in_thread(lambda: rank.take(order), order.deadline_s + CLOSE_S)

    async def pause(self) -> None:
        """Stop between two tokens; requests and KV cache stay."""
        if self._pause is not None:
            return
        self._is_serving.clear()
        pause = self._running.pause()
        try:
            await self._in_thread(pause.__enter__, self._setup.weights_timeout_s)
        except RuntimeError as error:
            raise EngineError(f"transformers does not pause: {error}") from error
        self._pause = pause
        self._note_progress()

    def _note_progress(self) -> None:
        """Record how many tokens each request has from the weights to be replaced."""
        scheduler = self._running.batch_processor.scheduler
        for state in [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]:
            request = self._requests.get(state.request_id)
            if request is None:
                continue
            # Logprobs, because only they survive when transformers evicts a request.
            if state.logprobs:
                request.cuts.append((self.version, len(state.logprobs)))
            elif state.position_offset > 0:
                request.is_stale = True

    async def resume(self, version: int) -> None:
        self.version = version
        await self._end_pause()
        self._is_serving.set()

    async def _end_pause(self) -> None:
        if self._pause is None:
            return
        pause, self._pause = self._pause, None
        await self._in_thread(lambda: pause.__exit__(None, None, None), CLOSE_S)

    async def leave_group(self) -> None:
        if self._rank is not None:
            self._rank.leave()

    async def failed(self) -> str:
        """Return the reason when transformers' thread has ended."""
        while self._running.is_running():
            await asyncio.sleep(WATCH_S)
        error = self._running.background_thread_status.fatal_error
        return f"transformers' generation thread died: {error}"

    async def close(self) -> None:
        """Stop transformers' thread."""
        await self._end_pause()
        await self.leave_group()
        if self._manager is not None:
            manager, self._manager = self._manager, None
            await self._in_thread(
                # Its thread ends after the pass in flight; then the garbage is collected.
                lambda: manager.stop(timeout=CLOSE_S / 2, hard_stop=True),
                CLOSE_S,
            )
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T], timeout_s: float) -> T:
        """Result of blocking work on the worker thread; EngineError when it takes longer."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError as error:
            text = f"the hf engine was busy for more than {timeout_s:.0f} s"
            raise EngineTimeout(text) from error
