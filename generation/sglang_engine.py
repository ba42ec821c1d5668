"""SGLang as an engine: one server child on this node, with requests over HTTP.

Used by the generator; SGLang is not imported here. Each completion is one request with our name:
over HTTP (`sglang_http.py`), or directly to the scheduler (`sglang_direct.py`) if the server runs
on the CPU with our patches.

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
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from generation.child import ServerChild
from generation.engine import Completion, EngineError, EngineSetup
from generation.sglang_command import RELEASED, server_command, server_environment, write_api_key
from generation.sglang_direct import DirectRequests, direct_request, read_ended
from generation.sglang_http import HttpRequests, load_time, post
from generation.sglang_orders import (
    LOADER,
    NO_TENSORS,
    Keep,
    Nothing,
    Order,
    orders_path,
    write_order,
)
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.protocol.engine_requests import SOCKET_VARIABLE
from megatron_rl.protocol.types import Receive, Sampling

log = logging.getLogger(__name__)

POLL_READY_S = 0.25
REGENERATE_LIMIT = 3
PARTS = "sglang::"
"""Beginning of the titles of the server's processes."""
# We close idle connections before the server does: a request over a connection that the server
# closes at that moment (by default after 5 s) is lost with "connection reset".
CLIENT_KEEP_ALIVE_S = 15
LOADER_MARGIN_S = 5.0
"""Seconds more than the loader has: it keeps the order's deadline, and reports what was late."""


class SGLangEngine:
    """Engine over one `sglang.launch_server` child."""

    name = "sglang"
    section = "generator"
    """Section of the configuration, for messages."""
    loader = LOADER
    """Function that receives slices in the server's ranks, as package.module.function."""
    may_ask_directly = True
    """Whether requests may go to the scheduler directly; possible without CUDA only."""

    def __init__(self, setup: EngineSetup) -> None:
        self._setup = setup
        self.engine_version = importlib.metadata.version("sglang")
        self.world_size = setup.tensor_parallel
        self.expert_parallel = setup.expert_parallel
        self.ffn_multiple = sglang_cpu.FFN_MULTIPLE if sglang_cpu.is_needed() else 1
        self._child = ServerChild(setup.log_path)
        self._http: aiohttp.ClientSession | None = None
        self._private_folder: Path | None = None
        """Files of this start, for this user alone."""
        self._direct: DirectRequests | None = None
        self._requests: DirectRequests | HttpRequests | None = None
        self._is_serving = asyncio.Event()
        self._is_serving.set()
        self.version = setup.version
        self._epoch = 0
        self._is_paused = False
        self._is_updating = False
        self._has_released = False
        self._has_kept = False
        self._is_loaded_by_slices = False

    @property
    def version(self) -> int:
        """Policy version of its weights. Below 0, requests wait for the next `resume`."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version
        if version < 0:
            self._is_serving.clear()

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        setup = self._setup
        self._private_folder = Path(tempfile.mkdtemp(prefix="megatron-rl-"))
        key = write_api_key(self._private_folder)
        self._http = aiohttp.ClientSession(
            f"http://{setup.host}:{setup.port}",
            headers={"Authorization": f"Bearer {key}"},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_KEEP_ALIVE_S),
        )
        environment = server_environment(setup, self._private_folder)
        if self.may_ask_directly and sglang_cpu.is_needed():
            self._direct = DirectRequests()
            await self._direct.open()
            environment[SOCKET_VARIABLE] = str(self._direct.path)
        command = server_command(setup, self.loader, self._private_folder)
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
        # Without the patch for direct requests the scheduler has not connected.
        is_direct = self._direct is not None and self._direct.is_connected
        if setup.is_deterministic and sglang_cpu.is_needed() and not is_direct:
            raise EngineError(
                "expert.generator.deterministic=true needs all our patches of SGLang on the CPU, "
                f"and those for SGLang {self.engine_version} are off: install the version of "
                "requirements/cpu.txt and unset MEGATRON_RL_SGLANG_PATCHES"
            )
        self._requests = self._direct if is_direct else HttpRequests(self._session)
        # The server asks itself, in vain. A full collection would stop all requests.
        await self._post("/freeze_gc", {})

    async def _answers(self) -> bool:
        try:
            async with self._session.get("/health", timeout=aiohttp.ClientTimeout(5)) as response:
                # With another server on the port our child could not have bound it.
                return response.status == 200 and not self._child.has_exited
        except (aiohttp.ClientError, TimeoutError):
            return False

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._http is not None, "the engine was not started"
        return self._http

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """Yield completions as they finish.

        Without seeds SGLang's scheduler draws from one stream of random numbers: a group that is
        asked for again differs.
        """
        seeds = dict(zip(indices, sampling.draw_seeds, strict=False))
        waiting = list(indices)
        deadline = asyncio.get_running_loop().time() + self._setup.request_timeout_s
        for _ in range(REGENERATE_LIMIT):
            stale: list[int] = []
            await self._wait_until_serving(deadline)
            assert self._requests is not None, "the engine was not started"
            version = self.version
            # Each version of each syncer has its own prefix cache; epochs count syncers.
            request = direct_request(
                self._setup, prompt_ids, sampling, prefix_key=f"{self._epoch}.{version}"
            )
            try:
                if seeds:
                    own = [seeds[index] for index in waiting]
                    request = msgspec.structs.replace(request, seeds=own)
                answers = self._requests.generate(request, waiting, deadline)
                async with aclosing(answers):
                    async for index, ended in answers:
                        completion = read_ended(ended, index)
                        if self._is_stale(completion, version):
                            stale.append(index)
                        else:
                            yield completion
            except TimeoutError as error:
                raise EngineError(
                    "a completion exceeded expert.generator.request_timeout_s="
                    f"{self._setup.request_timeout_s:.0f}"
                ) from error
            if not stale:
                return
            waiting = stale
        raise EngineError(
            f"weight syncs overtook {len(waiting)} completions {REGENERATE_LIMIT} times before "
            "their first token: weight syncs come faster than requests start"
        )

    async def _wait_until_serving(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._is_serving.wait()
        except TimeoutError as error:
            what = "a weight sync" if self.version >= 0 else "an engine without weights"
            raise EngineError(
                f"{what} kept a request waiting for expert.generator.request_timeout_s="
                f"{self._setup.request_timeout_s:.0f}"
            ) from error

    def _is_stale(self, completion: Completion, version: int) -> bool:
        """Whether the KV cache of its prompt may be of older weights than its first token.

        Such a request waited in the server through a weight sync. version: of the engine when the
        request was sent.
        """
        is_newer = completion.spans[0].version != version
        return is_newer and not self._setup.recomputes_kv_cache and completion.cached_tokens > 0

    async def pause(self) -> None:
        """Stop between two tokens; requests stay, and so does their KV cache unless recomputed."""
        await self._stop()
        await self._begin_update()

    async def _stop(self) -> None:
        if not self._is_paused:  # else paused by a syncer that died before it could resume
            self._is_serving.clear()
            mode = "retract" if self._setup.recomputes_kv_cache else "in_place"
            await self._post("/pause_generation", {"mode": mode})
            self._is_paused = True
            # Later requests have a separate prefix cache, even if a version number comes again.
            self._epoch += 1

    async def release(self) -> None:
        """Retract all requests, and release the memory of weights and KV cache."""
        assert self._setup.recomputes_kv_cache, "its scheduler would end, as requests still run"
        await self._stop()
        if not self._has_released:
            await self._keep_unsent()
            # Before the answer: the server obeys a late order too, and in order.
            self._has_released = True
            await self._post("/release_memory_occupation", {"tags": RELEASED})

    async def _keep_unsent(self) -> None:
        """Before the first release: have the loader keep what no weight sync brings back."""
        if self._has_kept:
            return
        # A failed weight sync may have left an update open, which the next one then continues.
        was_updating = self._is_updating
        await self._begin_update()
        await self._call_loader(Keep())
        if not was_updating:
            await self._end_update()
        self._has_kept = True

    async def reclaim(self) -> None:
        """Take the memory again."""
        if self._has_released:
            self._has_released = False
            await self._post("/resume_memory_occupation", {"tags": RELEASED})

    async def _begin_update(self) -> None:
        """Open SGLang's update session, unless a failed weight sync left it open."""
        if not self._is_updating:
            # Before the answer: the server obeys a late order too, and in order.
            self._is_updating = True
            await self._post("/begin_weight_update", {})

    async def _end_update(self) -> None:
        if self._is_updating:
            self._is_updating = False
            await self._post("/end_weight_update", {})

    async def receive(self, order: Receive) -> None:
        """Have the loader of every rank receive its slices."""
        self._is_loaded_by_slices = True
        await self._call_loader(order, order.deadline_s + LOADER_MARGIN_S)

    async def _call_loader(
        self, order: Order, timeout_s: float | None = None, version: int | None = None
    ) -> None:
        path = self._setup.orders or orders_path(self._setup.log_path)
        # By a thread: heartbeats must not wait for the run folder's disk.
        await asyncio.to_thread(write_order, path, order)
        body = {
            "serialized_named_tensors": [NO_TENSORS] * self.world_size,
            "load_format": self.loader,
            # At the end, and with the memory that SGLang has cached: /flush_cache gives it back.
            "flush_cache": version is not None and self._setup.recomputes_kv_cache,
            "torch_empty_cache": False,
        }
        if version is not None:
            body["weight_version"] = str(version)
        await self._post("/update_weights_from_tensor", body, timeout_s)

    async def resume(self, version: int) -> None:
        """Continue under `version`.

        To recompute, the prefix cache is emptied: retracted requests would find their prompts in
        it.
        """
        if self._is_loaded_by_slices:
            # Only now are the slices known to be whole.
            await self._call_loader(Nothing(), version=version)
            self._is_loaded_by_slices = False
        elif self._setup.recomputes_kv_cache:
            await self._post("/flush_cache", {})
        await self._end_update()
        self.version = version
        # By default SGLang returns its cached memory here, and allocates it anew while it serves.
        await self._post("/continue_generation", {"torch_empty_cache": False})
        self._is_paused = False
        self._is_serving.set()

    async def leave_group(self) -> None:
        """Nothing: its ranks leave when another syncer comes."""

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> None:
        await post(self._session, path, body, timeout_s or self._setup.weights_timeout_s)

    async def failed(self) -> str:
        """Return the reason when the server, or a process of it, has ended."""
        return f"SGLang died: {await self._child.lost(PARTS)}"

    async def count_passes(self) -> float | None:
        """Time of the scheduler's last report of its load, which comes with its passes."""
        return await load_time(self._session)

    async def close(self) -> None:
        """Kill the server and its processes."""
        if self._http is not None:
            await self._http.close()
        await self._child.close()
        if self._direct is not None:
            await self._direct.close()
        if self._private_folder is not None:
            shutil.rmtree(self._private_folder, ignore_errors=True)
