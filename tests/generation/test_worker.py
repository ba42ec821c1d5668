"""The generator process end to end, against a queue and a syncer written out here."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.protocol.nccl_settings import own_settings
from megatron_rl.protocol.types import (
    Ack,
    AnyMessage,
    ChatMessage,
    GeneratorReady,
    Hello,
    Lease,
    LeaveGroup,
    Pause,
    Prompt,
    Resume,
    Rollout,
    RolloutDone,
    RolloutFailed,
    Sampling,
    Stop,
)
from megatron_rl.protocol.wire import Router
from megatron_rl.weights.layout.shape import read_shape
from tests.generation.syncer import (
    SliceSender,
    check_reports,
    of_attempt,
    parameters_of,
    plan_exchange,
)
from tests.generation.tiny_model import logprobs

START_S = 140.0
ANSWER_S = 100.0


def make_config(models_dir: Path, run_dir: Path, **generator: Any) -> Config:
    config = Config.model_validate(
        {
            "run": {"dir": run_dir},
            "model": {"path": models_dir / "old", "dtype": "float32"},
            "render": {"system_prompt": ""},
            "sampling": {"max_new_tokens": 64},
            "generator": {
                "max_running": 32,
                "kv_tokens": 8192,
                "context_tokens": 256,
                "start_timeout_s": START_S,
                **generator,
            },
        }
    )
    return resolve_ports(config)


@contextmanager
def worker_process(config: Config) -> Iterator[subprocess.Popen[str]]:
    config.run.dir.mkdir(parents=True, exist_ok=True)
    path = config.run.dir / "config.toml"
    path.write_text(dump_toml(config))
    process = subprocess.Popen(
        [sys.executable, "-m", "generation.worker", "--config", str(path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=60)


def await_message(
    router: Router, wanted: Callable[[AnyMessage], bool], timeout_s: float
) -> AnyMessage:
    deadline = time.monotonic() + timeout_s
    while (received := router.receive(deadline - time.monotonic())) is not None:
        peer, message = received
        assert peer == "generator-0"
        if wanted(message):
            return message
    raise AssertionError("the message did not come in time")


def await_kind(router: Router, kind: type, timeout_s: float = ANSWER_S) -> Any:
    return await_message(router, lambda message: isinstance(message, kind), timeout_s)


def obey(router: Router, message: AnyMessage) -> None:
    """Send a weight message and wait for its Ack."""
    assert router.send("generator-0", message)
    assert await_kind(router, Ack) == Ack(type(message).__name__)


def sync_phase(router: Router, folder: Path, model: LlamaForCausalLM, versions: list[int]) -> None:
    """A whole training phase of a syncer: hello, weight syncs, leave."""
    hello = await_kind(router, Hello, START_S)
    assert (hello.world_size, hello.version) == (1, -1)
    assert hello.nccl == own_settings()
    exchange = plan_exchange(read_shape(folder), hello, f"phase-{time.monotonic_ns()}")
    sender = SliceSender(exchange)
    for version in versions:
        obey(router, Pause())
        turn = of_attempt(exchange, version + 1, version)
        router.send("generator-0", turn.receive)
        check_reports(sender.send(turn, parameters_of(model)), exchange.layouts.plan())
        assert await_kind(router, Ack) == Ack("Receive")
        obey(router, Resume(version))
    router.send("generator-0", LeaveGroup())
    sender.close()


def lease(lease_id: int, count: int, content: str = "12+7", **sampling: Any) -> Lease:
    prompt = Prompt(f"p{lease_id}", "exact", [ChatMessage("user", content)], "19")
    values = {"max_new_tokens": 32, "temperature": 1.0, **sampling}
    return Lease(lease_id, prompt, list(range(count)), Sampling(**values))


def await_rollouts(router: Router, count: int) -> list[Rollout]:
    return [await_kind(router, RolloutDone).rollout for _ in range(count)]


def check_logprobs(model: LlamaForCausalLM, rollout: Rollout) -> None:
    expected = logprobs(model, rollout.prompt_ids.tolist(), rollout.token_ids.tolist())
    torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-5, rtol=0)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_running(processes: list[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that run on to the end of that time."""
    deadline = time.monotonic() + timeout_s
    while True:
        alive = [process for process in processes if is_alive(process)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_sglang_worker_serves_two_syncers_and_leaves_nothing_when_killed(
    models_dir: Path, tmp_path: Path, old_model: LlamaForCausalLM, new_model: LlamaForCausalLM
) -> None:
    config = make_config(models_dir, tmp_path / "run")
    host, ports = config.ports.host, config.ports
    with (
        Router(host, ports.prompts) as queue,
        Router(host, ports.weights) as weights,
        worker_process(config) as process,
    ):
        ready = await_kind(queue, GeneratorReady, START_S)
        assert (ready.capacity, ready.version) == (32, -1)
        queue.send("generator-0", lease(6, 2))
        failures = [await_kind(queue, RolloutFailed) for _ in range(2)]
        assert {failed.reason for failed in failures} == {"it has no weights of the trainer yet"}
        for model, versions in ((new_model, [0, 1]), (old_model, [0])):
            sync_phase(weights, models_dir / "old", model, versions)
            await_message(
                queue,
                lambda m, last=versions[-1]: isinstance(m, GeneratorReady) and m.version == last,
                ANSWER_S,
            )
            queue.send("generator-0", lease(7, 4))
            rollouts = await_rollouts(queue, 4)
            assert sorted(rollout.index for rollout in rollouts) == [0, 1, 2, 3]
            for rollout in rollouts:
                assert rollout.lease_id == 7
                assert {span.version for span in rollout.spans} == {versions[-1]}
                check_logprobs(model, rollout)
                assert 0 < rollout.first_token_s < ANSWER_S
        processes = descendants(process)
        assert len(processes) >= 2
        process.kill()
        assert not still_running(processes, timeout_s=60.0)


def scheduler_of(process: subprocess.Popen[str]) -> tuple[psutil.Process, psutil.Process]:
    """SGLang's main process and its scheduler."""
    [scheduler] = [p for p in descendants(process) if "sglang::sched" in " ".join(p.cmdline())]
    return scheduler.parent(), scheduler


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hangs", [False, True])
def test_a_worker_ends_at_once_with_its_scheduler_and_soon_when_that_hangs(
    models_dir: Path, tmp_path: Path, hangs: bool
) -> None:
    # A quarter of 40 s without a pass is a hang.
    config = make_config(
        models_dir, tmp_path / "run", wait_for_weight_sync=False, request_timeout_s=40
    )
    with (
        Router(config.ports.host, config.ports.prompts) as queue,
        worker_process(config) as process,
    ):
        await_kind(queue, GeneratorReady, START_S)
        queue.send("generator-0", lease(1, 2))
        await_rollouts(queue, 2)
        queue.send("generator-0", lease(2, 16, max_new_tokens=200))
        main, scheduler = scheduler_of(process)
        killed_at = time.monotonic()
        if hangs:
            scheduler.suspend()
        else:
            # It would end itself within a second or two, and then be missed all the same.
            main.suspend()
            scheduler.kill()
        _, stderr = process.communicate(timeout=60)
        seconds = time.monotonic() - killed_at
        assert process.returncode == 1
        assert ("the engine hangs" if hangs else "its process sglang::scheduler") in stderr
        assert seconds < 36 and (seconds > 10 or not hangs)
        while (received := queue.receive(0.1)) is not None:
            assert not isinstance(received[1], RolloutFailed)


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_hf_worker_reports_bad_prompts_and_its_activity_and_stops(
    models_dir: Path, tmp_path: Path, old_model: LlamaForCausalLM
) -> None:
    config = make_config(models_dir, tmp_path / "run", engine="hf", wait_for_weight_sync=False)
    with (
        Router(config.ports.host, config.ports.prompts) as queue,
        worker_process(config) as process,
    ):
        ready = await_kind(queue, GeneratorReady, START_S)
        assert ready.version == 0
        queue.send("generator-0", lease(1, 2, content="x" * 300))
        failures = [await_kind(queue, RolloutFailed) for _ in range(2)]
        assert [failed.index for failed in failures] == [0, 1]
        assert "the prompt has 307 tokens; allowed are 1 to 224" in failures[0].reason
        queue.send("generator-0", lease(2, 3))
        for rollout in await_rollouts(queue, 3):
            check_logprobs(old_model, rollout)
            assert 0 < rollout.first_token_s < ANSWER_S
            assert rollout.finish_reason in ("stop", "length")
            assert "<eos>" not in rollout.text
            assert rollout.prompt_tail == "user:12+7=>"
        told = await_kind(queue, GeneratorReady).activity
        assert told is not None and told.tokens > 0 and told.busy_s > 0
        queue.send("generator-0", lease(3, 16, max_new_tokens=128))
        queue.send("generator-0", Stop("enough"))
        assert process.wait(timeout=60) == 0
    # Hundreds of generators would let the file grow: the queue writes a row about all of them.
    assert not (config.run.dir / "metrics.jsonl").exists()


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_sigterm_ends_a_worker_that_is_still_starting(models_dir: Path, tmp_path: Path) -> None:
    config = make_config(models_dir, tmp_path / "run")
    with worker_process(config) as process:
        deadline = time.monotonic() + 60
        while not descendants(process) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes = descendants(process)
        assert processes, "the worker started no server"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert not still_running(processes, timeout_s=60.0)


@pytest.mark.timeout(300)
@pytest.mark.exhaustive
def test_a_server_that_fails_to_start_shows_its_log(models_dir: Path, tmp_path: Path) -> None:
    config = make_config(models_dir, tmp_path / "run")
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in (models_dir / "old").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("LlamaForCausalLM", "NoSuchArchitecture"))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": folder})})
    with worker_process(config) as process:
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "SGLang failed to start: the server ended with exit code" in stderr
    assert "sglang-0.log:" in stderr and "NoSuchArchitecture" in stderr
    assert "Traceback (most recent call last)" not in stderr.split("SGLang failed to start")[0]
