"""Real generator processes that trainer ranks under test weight sync to, and what they hold."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config, ParallelConfig
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.protocol.types import (
    AnyMessage,
    ChatMessage,
    GeneratorReady,
    Lease,
    Prompt,
    Rollout,
    RolloutDone,
    RolloutFailed,
    RolloutsTaken,
    Sampling,
)
from megatron_rl.protocol.wire import Router
from megatron_rl.weights.layout.engine_checks import check_slices
from megatron_rl.weights.layout.engine_layout import (
    engine_slices,
    expert_place,
    paired,
    trained_parameters,
)
from megatron_rl.weights.layout.shape import read_shape
from megatron_rl.weights.layout.slices import Share, as_matrix, local_part
from megatron_rl.weights.layout.trainer_layout import untrained
from tests.distributed import run_ranks
from tests.generation import inspected_engine
from tests.generation.exchange_ranks import Script, WeightsSynced, sync_script
from tests.generation.layout_loader import tensors_of
from tests.generation.layout_models import write_model
from tests.generation.tiny_model import logprobs, write_tokenizer

TENSOR = ParallelConfig(tensor=2)
MID_TRANSFER = 40
"""Parcels that rank 0 of TENSOR has packed amid the transfer of LARGE to the first of two."""
START_S = 150.0
ANSWER_S = 60.0
TOLERANCE = 1e-4
"""Of logprobs. float32 costs up to 1.4e-5 with LARGE, in SGLang and in transformers alike; one
tensor that is still of the version before, a factor of 1.02, costs 2.6e-3."""
LARGE = {
    # 55 MB, so that a transfer in small buckets takes a while. No number of ranks divides 4099.
    "vocab_size": 4099,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.03,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"family": "Qwen2", "is_tied": False},
    "qwen3": {"family": "Qwen3", "is_tied": True},
    "mistral": {"family": "Mistral", "is_tied": False},
    "ministral3": {"family": "Ministral3", "is_tied": True},
    "olmo2": {"family": "Olmo2", "is_tied": False},
    "olmo3": {"family": "Olmo3", "is_tied": False},
    "mixtral-moe": {"family": "Mixtral", "is_tied": False},
    "qwen3-moe": {"family": "Qwen3Moe", "is_tied": False},
    "glm4-moe": {"family": "Glm4Moe", "is_tied": False},
    "glm4-moe-lite": {"family": "Glm4MoeLite", "is_tied": False},
    "deepseek-moe": {"family": "DeepseekV3", "is_tied": False},
    "gpt-oss-moe": {"family": "GptOss", "is_tied": False},
    "phi3": {"family": "Phi3", "is_tied": False},
    "smollm3": {"family": "SmolLM3", "is_tied": True},
    "llama-tied": {"family": "Llama", "is_tied": True, **LARGE},
}


class Fleet:
    """Generators 0 .. n - 1 of one run: the first are SGLang, inspected; the others are hf."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        *,
        tensor_parallel: int,
        replicas: int = 1,
        sglang_servers: int = 1,
    ) -> None:
        self.kind, self.tensor_parallel = kind, tensor_parallel
        self._sglang_servers = sglang_servers
        write_model(folder / "model", seed=0, **MODELS[kind])
        write_tokenizer(folder / "model")
        config = Config.model_validate(
            {
                "run": {"dir": folder / "run"},
                "model": {"path": folder / "model", "dtype": "float32"},
                "render": {"system_prompt": ""},
                "sampling": {"max_new_tokens": 64},
                "generator": {
                    "engine": inspected_engine.NAME,
                    "tensor_parallel": tensor_parallel,
                    "replicas": replicas,
                    "max_running": 16,
                    "kv_tokens": 4096,
                    "context_tokens": 200,
                    "start_timeout_s": START_S,
                },
                "weights": {"deadline_s": 15.0, "join_timeout_s": 60.0, "bucket_bytes": 1 << 19},
            }
        )
        self.config = resolve_ports(config)
        self._stack = ExitStack()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._leases = 0
        self._taken: set[tuple[int, int]] = set()
        self.arrivals: list[tuple[float, str, Rollout]] = []
        """(monotonic time, generator, rollout) of each rollout that came."""

    def __enter__(self) -> Self:
        run_dir = self.config.run.dir
        run_dir.mkdir(parents=True)
        (run_dir / "config.toml").write_text(dump_toml(self.config))
        self._queue = self._stack.enter_context(
            Router(self.config.ports.host, self.config.ports.prompts)
        )
        self._stack.callback(self._kill)
        try:
            for index in range(self.config.generator.replicas):
                self.start(index)
            self.await_ready(set(self._processes))
        except BaseException:
            # No `with` block ends what did not begin.
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(60)

    def start(self, index: int) -> None:
        """Start one generator; the one that it replaces has ended."""
        command = [sys.executable, "-m", "generation.worker", f"--index={index}"]
        command += ["--config", str(self.config.run.dir / "config.toml")]
        if index >= self._sglang_servers:
            command += ["generator.engine=hf", "generator.tensor_parallel=1"]
        with (self.config.run.dir / f"worker-{index}.log").open("ab") as log:
            self._processes[index] = subprocess.Popen(
                command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log
            )

    def await_ready(self, indices: set[int]) -> None:
        waiting = {f"generator-{index}" for index in indices}
        ends_at = time.monotonic() + START_S
        while waiting:
            received = self._queue.receive(0.5)
            if received is not None and isinstance(received[1], GeneratorReady):
                waiting.discard(received[0])
            dead = [i for i, process in self._processes.items() if process.poll() is not None]
            assert not dead, f"generators {dead} ended: {self.config.run.dir}/worker-*.log"
            assert time.monotonic() < ends_at, f"{waiting} did not start"

    @property
    def is_whole(self) -> bool:
        return all(process.poll() is None for process in self._processes.values())

    def pid(self, index: int) -> int:
        return self._processes[index].pid

    def schedulers(self) -> list[int]:
        """Process ids of SGLang's ranks."""
        family = psutil.Process(self.pid(0)).children(recursive=True)
        return [process.pid for process in family if "scheduler" in " ".join(process.cmdline())]

    @contextmanager
    def restarting(self, index: int) -> Iterator[None]:
        """Start a generator again, once, when it has ended."""
        process, is_over = self._processes[index], threading.Event()

        def watch() -> None:
            while not is_over.wait(0.1):
                if process.poll() is not None:
                    self.start(index)
                    return

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def lease(self, index: int, count: int, max_new_tokens: int = 24) -> None:
        """Ask a generator for completions."""
        self._leases += 1
        prompt = Prompt(f"p{self._leases}", "exact", [ChatMessage("user", "12+7")], "19")
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=1.0)
        message = Lease(self._leases, prompt, list(range(count)), sampling)
        assert self._queue.send(f"generator-{index}", message)

    def await_rollouts(self, count: int) -> list[Rollout]:
        """The next so many rollouts."""
        found: list[Rollout] = []
        ends_at = time.monotonic() + ANSWER_S
        while len(found) < count:
            received = self._queue.receive(max(0.0, ends_at - time.monotonic()))
            assert received is not None, f"{len(found)} of {count} rollouts came"
            found += self._note(*received)
        return found

    def serve_for(self, is_over: threading.Event) -> None:
        """Keep all generators busy with short completions and note when these come."""
        for index in self._processes:
            self.lease(index, 8)
        while not is_over.is_set():
            received = self._queue.receive(0.05)
            if received is not None and self._note(*received):
                index = int(received[0].removeprefix("generator-"))
                self.lease(index, 1)

    def _note(self, peer: str, message: AnyMessage) -> list[Rollout]:
        assert not isinstance(message, RolloutFailed), message
        if not isinstance(message, RolloutDone):
            return []
        # As the queue does; what was confirmed late comes twice.
        key = message.rollout.lease_id, message.rollout.index
        self._queue.send(peer, RolloutsTaken([key]))
        if key in self._taken:
            return []
        self._taken.add(key)
        self.arrivals.append((time.monotonic(), peer, message.rollout))
        return [message.rollout]

    def check_logprobs(self, index: int, export: Path, version: int) -> None:
        """What the generator samples has the logprobs of the exported folder."""
        self.lease(index, 4)
        model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).eval()
        for rollout in self.await_rollouts(4):
            assert {span.version for span in rollout.spans} == {version}
            expected = logprobs(model, rollout.prompt_ids.tolist(), rollout.token_ids.tolist())
            found = torch.tensor(rollout.logprobs)
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)

    def check_parameters(self, export: Path) -> None:
        """SGLang's ranks hold the exported tensors bit for bit, and nothing else but padding."""
        shape = read_shape(export)
        exported = tensors_of(export)
        unused = set(exported) - untrained(shape)
        multiple = sglang_cpu.FFN_MULTIPLE if sglang_cpu.is_needed() else 1
        for rank in range(self.tensor_parallel):
            logs = self.config.run.dir / "logs"
            held = torch.load(logs / f"held-{rank}.pt")
            # What importing SGLang and torch makes: a look through all of it takes 0.3 s.
            assert int((logs / f"frozen-{rank}").read_text()) > 100_000
            held = paired(shape.architecture, held)
            share = Share(rank, self.tensor_parallel)
            slices = engine_slices(shape, share, ffn_multiple=multiple)
            trained = trained_parameters(shape, held, expert_place(share, 1))
            check_slices(slices, trained, may_pad_ffn=multiple > 1)
            for part in slices:
                rows = slice(part.row, part.row + part.rows)
                columns = slice(part.column, part.column + part.columns)
                expected = as_matrix(exported[part.hf])[rows, columns]
                assert torch.equal(local_part(held, part), expected), (rank, part)
                unused.discard(part.hf)
        assert not unused


@contextmanager
def kept_fleets(make_folder: Callable[[str], Path]) -> Iterator[Callable[..., Fleet]]:
    """Finds the fleet of (kind, tensor_parallel, replicas): the last one if it is whole and fits.

    Else that one is closed first. Starting a fleet takes most of a test's time.
    """
    with ExitStack() as stack:
        held: list[tuple[tuple[str, int, int], Fleet]] = []

        def find(kind: str, tensor_parallel: int, replicas: int) -> Fleet:
            wanted = (kind, tensor_parallel, replicas)
            if not held or held[0][0] != wanted or not held[0][1].is_whole:
                stack.close()
                folder = make_folder(f"{kind}-tp{tensor_parallel}")
                fleet = Fleet(folder, kind, tensor_parallel=tensor_parallel, replicas=replicas)
                held[:] = [(wanted, stack.enter_context(fleet))]
            return held[0][1]

        yield find


def sync(
    fleet: Fleet, layout: ParallelConfig, script: Script, **changes: Any
) -> list[WeightsSynced]:
    """What trainer rank 0 says of its weight syncs; changes: of the section `weights`."""
    weights = fleet.config.weights.model_copy(update=changes)
    cfg = fleet.config.model_copy(update={"parallel": layout, "weights": weights})
    return run_ranks(sync_script, layout.world_size, cfg, script, timeout_s=200)[0]


def check_drop(synced: WeightsSynced, at_most_s: float) -> None:
    """One of two generators was dropped, or before, and that took no longer."""
    assert synced.metrics["weight_sync/dropped_generators"] == 1
    assert synced.metrics["weight_sync/generators"] == 1
    assert synced.seconds < at_most_s, synced
