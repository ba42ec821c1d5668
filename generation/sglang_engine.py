"""SGLang as an engine: one server child on this host, spoken to over HTTP; on the CPU, requests go
to its scheduler directly (`sglang_direct.py`). Used by the generator; SGLang is not imported here.

Concurrency, all on the caller's event loop:

| task               | waits for                        | woken by             | closed by  |
|--------------------|----------------------------------|----------------------|------------|
| each `generate`    | `_is_serving`, then its response | `resume`, the server | its caller |
| the weight methods | one HTTP answer, with a deadline | the server           | -          |
| `failed`           | the child's exit                 | the child            | its caller |
| the server child   | requests                         | HTTP                 | `close`    |
"""

import asyncio
import importlib.metadata
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp

from generation import sglang_cpu
from generation.child import ServerChild
from generation.engine import Completion, EngineError, EngineSetup
from generation.sglang_answers import Arrival, read_complete_mark, read_ended
from generation.sglang_command import RELEASED, parse_release, server_command, server_environment
from generation.sglang_direct import DirectRequests, direct_request
from generation.sglang_http import load_time, post, request_body, stream_events
from generation.sglang_messages import SOCKET_VARIABLE
from generation.sglang_orders import LOADER, NO_TENSORS, Nothing, Order, orders_path, write_order
from megatron_rl.protocol.types import Bucket, JoinGroup, PassOn, Receive, Sampling

log = logging.getLogger(__name__)

POLL_READY_S = 0.25
REGENERATE_LIMIT = 3
PARTS = "sglang::"
"""How the titles of the server's own processes begin."""
NEEDS_BEGIN_SINCE = (0, 5, 21)
# We close idle connections, the server never does first: a request that is sent over one which
# the server is about to close (by default after 5 s) is lost with "connection reset".
CLIENT_KEEP_ALIVE_S = 15
ABORT_S = 5.0
LOADER_MARGIN_S = 5.0
"""The loader keeps the order's deadline itself, and says what was late."""


class SGLangEngine:
    """Engine over one `sglang.launch_server` child."""

    name = "sglang"
    section = "generator"
    """Of the configuration, which messages name."""
    loader = LOADER
    """By which the server's ranks take slices, as package.module.function."""
    may_ask_directly = True
    """Whether requests go to the scheduler directly where that is possible: without CUDA."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self.engine_version = importlib.metadata.version("sglang")
        self.world_size = setup.tensor_parallel
        self.expert_parallel = setup.expert_parallel
        self.ffn_multiple = sglang_cpu.FFN_MULTIPLE if sglang_cpu.is_needed() else 1
        self.version = setup.version
        self._child = ServerChild(setup.log_path)
        self._http: aiohttp.ClientSession | None = None
        self._direct: DirectRequests | None = None
        self._is_serving = asyncio.Event()
        self._is_serving.set()
        self._group_name = ""
        self._epoch = 0
        self._needs_begin = parse_release(self.engine_version) >= NEEDS_BEGIN_SINCE
        self._is_paused = False
        self._is_updating = False
        self._has_released = False
        self._is_loaded_by_slices = False

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        setup = self._setup
        self._http = aiohttp.ClientSession(
            f"http://{setup.host}:{setup.port}",
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S),
        )
        environment = server_environment(setup)
        if self.may_ask_directly and sglang_cpu.is_needed():
            self._direct = DirectRequests()
            await self._direct.open()
            environment[SOCKET_VARIABLE] = str(self._direct.path)
        command = server_command(setup, self.loader)
        await self._child.start(command, environment, nice=setup.nice)
        deadline = time.monotonic() + setup.start_timeout_s
        while not await self._answers():
            if self._child.has_exited:
                raise EngineError(f"SGLang failed to start: {await self._child.exited()}")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"SGLang was not ready in {setup.start_timeout_s:.0f} s "
                    f"({self.section}.start_timeout_s); {self._child.log_tail()}"
                )
            await asyncio.sleep(POLL_READY_S)
        # It asks itself before it listens, in vain. A full collection would stop all requests.
        await self._post("/freeze_gc", {})

    async def _answers(self) -> bool:
        try:
            async with self._session.get("/health", timeout=aiohttp.ClientTimeout(5)) as response:
                # A stranger on the port would answer too, but our child could not have bound it.
                return response.status == 200 and not self._child.has_exited
        except (aiohttp.ClientError, TimeoutError):
            return False

    @property
    def _keeps_prefixes(self) -> bool:
        """Whether a request may find keys and values of older weights than its first token's."""
        return not self._setup.recomputes_kv_cache

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "the engine was not started"
        return self._http

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """Yield completions as they finish; one request for the group.

        SGLang's scheduler draws from one stream of random numbers, so `sampling.seed` has no
        effect: completions of a group differ, and a group asked for again differs too.
        """
        waiting = list(indices)
        deadline = time.monotonic() + self._setup.request_timeout_s
        for _ in range(REGENERATE_LIMIT):
            stale: list[int] = []
            await self._wait_until_serving(deadline)
            once = self._generate_once(prompt_ids, sampling, waiting, deadline)
            async with aclosing(once) as answers:
                async for index, completion in answers:
                    if completion is None:
                        stale.append(index)
                    else:
                        yield completion
            if not stale:
                return
            waiting = stale
        raise EngineError(
            f"{len(waiting)} completions were overtaken by a weight sync {REGENERATE_LIMIT} times "
            "before their first token: weight syncs come faster than requests start"
        )

    async def _wait_until_serving(self, deadline: float) -> None:
        try:
            await asyncio.wait_for(self._is_serving.wait(), deadline - time.monotonic())
        except TimeoutError as error:
            raise EngineError(
                "a weight sync kept a request waiting for expert.generator.request_timeout_s="
                f"{self._setup.request_timeout_s:.0f}"
            ) from error

    def _generate_once(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int], deadline: float
    ) -> AsyncIterator[tuple[int, Completion | None]]:
        """Yield (index, completion), or None for one to generate again.

        That is one whose prompt came from the prefix cache of older weights, because it waited in
        the server through a weight sync: its keys and values are not those of its first token's
        weights.
        """
        if self._direct is not None:
            return self._generate_directly(self._direct, prompt_ids, sampling, indices, deadline)
        return self._generate_by_http(prompt_ids, sampling, indices, deadline)

    async def _generate_directly(
        self,
        direct: DirectRequests,
        prompt_ids: list[int],
        sampling: Sampling,
        indices: list[int],
        deadline: float,
    ) -> AsyncIterator[tuple[int, Completion | None]]:
        version = self.version
        request = direct_request(self._setup, prompt_ids, sampling, prefix_key=self._prefix_key)
        try:
            async with aclosing(direct.generate(request, indices, deadline)) as answers:
                async for index, ended in answers:
                    completion = read_ended(ended, index)
                    is_stale = self._is_stale(completion, version, ended.cached_tokens)
                    yield index, None if is_stale else completion
        except TimeoutError as error:
            raise self._too_late() from error

    async def _generate_by_http(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int], deadline: float
    ) -> AsyncIterator[tuple[int, Completion | None]]:
        version = self.version
        body = request_body(
            self._setup, prompt_ids, sampling, n=len(indices), prefix_key=self._prefix_key
        )
        arrivals: dict[int, list[Arrival]] = {}
        # The server's name of each unfinished completion, which it tells with the first token.
        running = dict.fromkeys(indices, "")
        try:
            async with aclosing(stream_events(self._session, body, deadline)) as events:
                async for event in events:
                    index = indices[event.get("index", 0)]
                    meta = event["meta_info"]
                    arrived = arrivals.setdefault(index, [])
                    now = time.monotonic()
                    arrived.append(Arrival(meta["completion_tokens"], self.version, now))
                    if meta["finish_reason"] is None:
                        running[index] = meta["id"]
                        continue
                    del running[index]
                    completion = read_complete_mark(event, index, arrived)
                    is_stale = self._is_stale(completion, version, meta.get("cached_tokens", 0))
                    yield index, None if is_stale else completion
        except TimeoutError as error:
            raise self._too_late() from error
        else:
            if running:
                raise EngineError(f"SGLang ended its answer before completions {sorted(running)}")
        finally:
            await self._abort([name for name in running.values() if name])

    def _is_stale(self, completion: Completion, version: int, cached_tokens: int) -> bool:
        """Whether its prompt's keys and values may be those of older weights than its first token.

        version: that of the engine when it was asked for.
        """
        is_newer = completion.spans[0].version != version
        return is_newer and self._keeps_prefixes and cached_tokens > 0

    @property
    def _prefix_key(self) -> str:
        """The prefix cache of a version (of a syncer: epochs count these) is its own."""
        return f"{self._epoch}.{self.version}"

    def _too_late(self) -> EngineError:
        limit = f"{self._setup.request_timeout_s:.0f}"
        return EngineError(f"a completion exceeded expert.generator.request_timeout_s={limit}")

    async def _abort(self, names: list[str]) -> None:
        """Have the server stop what nobody reads any more.

        By itself it sees a closed connection only seconds later, and some releases never do for
        the completions of one prompt; what waits for its first token has no name yet.
        """
        try:
            for name in names:
                await self._post("/abort_request", {"rid": name}, ABORT_S)
        except EngineError as error:
            log.warning("SGLang may continue with requests that were given up: %s", error)

    async def pause(self) -> None:
        """Stop between two tokens; requests stay, and so does their KV cache unless recomputed."""
        await self._stop()
        await self._begin_update()

    async def _stop(self) -> None:
        if not self._is_paused:  # by a syncer that died before it could resume
            self._is_serving.clear()
            recomputes = self._setup.recomputes_kv_cache
            mode = "retract" if recomputes else "in_place"
            await self._post("/pause_generation", {"mode": mode})
            if recomputes:
                # Retracted requests would find their prompts in the prefix cache.
                await self._post("/flush_cache", {})
            self._is_paused = True
            # The prefix cache of what comes is its own, also when a version comes again.
            self._epoch += 1

    async def release(self) -> None:
        """Put all requests back, and give the memory of weights and KV cache back."""
        assert self._setup.recomputes_kv_cache, "its scheduler would end, as requests still run"
        await self._stop()
        if not self._has_released:
            # Before the answer: one that is late for us is obeyed all the same, and in order.
            self._has_released = True
            await self._post("/release_memory_occupation", {"tags": RELEASED})

    async def reclaim(self) -> None:
        """Take it again."""
        if self._has_released:
            self._has_released = False
            await self._post("/resume_memory_occupation", {"tags": RELEASED})

    async def _begin_update(self) -> None:
        """Open SGLang's session of an update, unless a weight sync that failed left it open."""
        if self._needs_begin and not self._is_updating:
            # Before the answer: one that is late for us is obeyed all the same, and in order.
            self._is_updating = True
            await self._post("/begin_weight_update", {})

    async def _end_update(self) -> None:
        if self._is_updating:
            self._is_updating = False
            await self._post("/end_weight_update", {})

    async def receive(self, order: Receive) -> None:
        """Have every rank's loader take its slices."""
        self._is_loaded_by_slices = True
        await self._call_loader(order, order.deadline_s + LOADER_MARGIN_S)

    async def pass_on(self, order: PassOn) -> None:
        """Have every rank's loader send what it took."""
        await self._call_loader(order, order.limit_s)

    async def _call_loader(
        self, order: Order, timeout_s: float | None = None, version: int | None = None
    ) -> None:
        path = self._setup.orders or orders_path(self._setup.log_path)
        # By a thread: heartbeats must not wait for the run folder's disk.
        await asyncio.to_thread(write_order, path, order)
        body = {
            "serialized_named_tensors": [NO_TENSORS] * self.world_size,
            "load_format": self.loader,
            "flush_cache": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        await self._post("/update_weights_from_tensor", body, timeout_s)

    async def load(self, folder: Path, version: int) -> None:
        """Load a folder that this host can read."""
        # A folder is loaded by a session of its own.
        await self._end_update()
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            "flush_cache": False,
        }
        await self._post("/update_weights_from_disk", body)
        await self._begin_update()

    async def join_group(self, message: JoinGroup) -> None:
        """Join the group of a broadcast."""
        body = {
            "master_address": message.address, "master_port": message.port,
            "rank_offset": message.rank_offset, "world_size": message.world_size,
            "group_name": message.group_name, "backend": message.backend,
        }  # fmt: skip
        await self._post("/init_weights_update_group", body, message.timeout_s)
        self._group_name = message.group_name

    async def receive_bucket(self, bucket: Bucket) -> None:
        """Receive and load one flattened bucket."""
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": self._group_name,
            "load_format": "flattened_bucket",
            # SGLang 0.5.21 crashed when it was to flush while requests are running.
            "flush_cache": False,
            "weight_version": str(bucket.version),
        }
        await self._post("/update_weights_from_distributed", body)

    async def resume(self, version: int) -> None:
        """Continue under `version`."""
        if self._is_loaded_by_slices:
            # Only now is it known that the slices are whole.
            await self._call_loader(Nothing(), version=version)
            self._is_loaded_by_slices = False
        await self._end_update()
        self.version = version
        # By itself SGLang would give its cached memory back here, and get it anew while it serves.
        await self._post("/continue_generation", {"torch_empty_cache": False})
        self._is_paused = False
        self._is_serving.set()

    async def leave_group(self) -> None:
        """Leave the syncer's group. After a weight sync that was cut short the pause stays."""
        if self._group_name:
            await self._post("/destroy_weights_update_group", {"group_name": self._group_name})
            self._group_name = ""

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> None:
        await post(self._session, path, body, timeout_s or self._setup.weights_timeout_s)

    async def failed(self) -> str:
        """Return the reason when the server, or a process of it, has ended."""
        return f"SGLang died: {await self._child.lost(PARTS)}"

    async def count_passes(self) -> float | None:
        """When the scheduler last told its load, which it does with its passes."""
        return await load_time(self._session)

    async def close(self) -> None:
        """Kill the server and its processes."""
        if self._http is not None:
            await self._http.close()
        await self._child.close()
        if self._direct is not None:
            await self._direct.close()
