"""The rollout queue at cluster scale: `python -m tools.bench.queue [--quick] [--only NAME ...]`.

The queue's process serves scripted peers (queue_peer.py) over sockets: 1,000 generators, verifiers
that answer at once, data-parallel leaders, and a weight sync after each batch. Rollouts have 32,768
tokens, or the simulator's mean, with logprobs, two version spans and a text. The *floor*, measured
in the same run, is bare ZeroMQ sockets that carry the same bytes (queue_peer.py).

*dense* is a 24B model without experts; *encrypted* adds CURVE keys, as between nodes; *replay* is
30B-A3B with router replay: 384 bytes per token, 100 generators, no ledger. *dense_mean* and
*replay_mean* have completions of the simulator's mean length, 9,387 and 4,185 tokens.

| figure of a variant        | meaning                                                        |
|----------------------------|----------------------------------------------------------------|
| needed_rollouts_per_s      | production of 512 H100s by the simulator (`Produced`): at      |
|                            | 32,768 tokens its tokens, else its completions                 |
| learnt_rollouts_per_s      | upper bound of the trainer's consumption, by hand              |
| rollouts_per_s             | capacity of the queue; over_needed: over the first, target 4;  |
|                            | over_learnt: over the second                                   |
| tokens_per_s, bytes_per_s  | of these rollouts; arrays and texts, once                      |
| cpu_share                  | user and system time of the queue over wall time               |
| cpu_ms_per_rollout         | the same per rollout; loop_ms_per_rollout: of the main thread  |
| floor_*                    | figures of the floor; over_floor: rollouts_per_s over its      |
| over_without_ledger        | rollouts_per_s over those of a queue without a ledger          |
| bookkeeping_share          | share of the time per rollout beyond the floor's               |
| lease_p50_ms, ..._p99_ms   | from the announcement of a free slot to its next lease, at     |
|                            | lease_rate: 4 times the need, or half of rollouts_per_s        |
| peak_rss_mb                | peak memory of the queue                                       |
| held_bound_mb              | rollouts that admission lets the queue hold                    |

With few cores the peers compete with the queue: a rate is a lower bound, so compare the times per
rollout. The last line is one JSON object.
"""

import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from megatron_rl.config.tree import Config
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.plan.flops import step_flops
from megatron_rl.protocol.keys import make_keys
from megatron_rl.weights.layout.shape import ModelShape
from tools.bench.children import background, write_job
from tools.bench.measuring import (
    busy_share,
    parser,
    percentile,
    read_times,
    report,
    rounded,
    say,
    used_memory,
)
from tools.bench.queue_peer import PROMPT_TOKENS, Control, Load, run_peers

GPUS = 512
TRAINER_SHARE = 0.5  # of the GPUs
TRAINER_FLOPS = 400e12
"""Model FLOP/s of an H100 that trains a dense model in bf16: 0.4 of its peak."""
TARGET = 4.0
"""Target of over_needed."""
GENERATOR_PROCESSES = 2
PROMPTS = 2000
LIMIT_S = 120.0
PEER_END_S = 5.0
QUEUE, FLOOR = "megatron_rl.rollout_queue.server", "tools.bench.queue_peer"


def _shape(**sizes: int) -> ModelShape:
    return ModelShape(
        architecture="",
        max_positions=40_960,
        norm_eps=1e-5,
        rope_theta=1e6,
        rope_scaling=None,
        is_tied=False,
        has_qkv_bias=False,
        has_qk_norm=False,
        sliding_window=None,
        **sizes,
    )


DENSE = _shape(
    layers=40, hidden=5120, ffn=32_768, heads=32, kv_heads=8, head_dim=128, vocab=131_072
)
"""Mistral Small 24B, from its config.json on Hugging Face."""
EXPERTS = _shape(
    layers=48, hidden=2048, ffn=6144, heads=32, kv_heads=4, head_dim=128, vocab=151_936,
    experts=128, experts_per_token=8, moe_ffn=768,
)  # fmt: skip
"""Qwen3-30B-A3B, likewise."""


class Produced(NamedTuple):
    """Production of a cluster's engines by the simulator."""

    tokens_per_s: float
    completions_per_s: float
    """All completions, zero-variance groups included."""

    @property
    def mean_tokens(self) -> int:
        return round(self.tokens_per_s / self.completions_per_s)


DENSE_PRODUCED = Produced(283_500, 30.2)
EXPERTS_PRODUCED = Produced(553_200, 132.2)
"""Maximum over the splits of GPUS H100s. DIR holds the model's config.json, N is 512 and 1,024:

    megatron-rl simulate examples/magistral_24b.toml model.path=DIR train.prompts_per_batch=N \\
        --gpus 512 --sweep split=96,128,160,192 --steps 4 --warm-up 4 --json
    megatron-rl simulate examples/qwen3_30b_a3b.toml model.path=DIR train.prompts_per_batch=N \\
        --gpus 512 --sweep split=64,72,80,96,128 --steps 4 --warm-up 4 --json

The number of prompts in a batch grows with the GPUs. The best splits are 128 and 96.
completions_per_s: train.prompts_per_batch * train.group_size / (1 - zero_variance_share) / step_s.
"""


def learnt_rollouts_per_s(shape: ModelShape, tokens: int) -> float:
    """Completions/s of this length that half of the cluster could train on without idle time.

    Also an upper bound of the production, because admission stops faster engines.
    """
    flops = step_flops(shape, sequences=1, length=PROMPT_TOKENS + tokens).total
    return GPUS * TRAINER_SHARE * TRAINER_FLOPS / flops


class Variant(NamedTuple):
    """A load, and a cluster's rates in rollouts/s."""

    load: Load
    needed: float
    learnt: float
    is_encrypted: bool = False
    has_ledger: bool = True


class Window(NamedTuple):
    """Measurements between two times of the monotonic clock."""

    began: float
    ended: float
    rollouts: int
    """Returned rollouts."""
    cpu_s: float
    """User and system time of the server's threads."""
    loop_s: float
    """User and system time of its main thread."""

    @property
    def rollouts_per_s(self) -> float:
        return self.rollouts / (self.ended - self.began)

    @property
    def cpu_share(self) -> float:
        """Processor time over wall time; above 1 on several cores."""
        return self.cpu_s / (self.ended - self.began)

    def ms_per_rollout(self, seconds: float) -> float:
        """`seconds` of the window per rollout, in milliseconds."""
        return 1e3 * seconds / self.rollouts


class Outcome(NamedTuple):
    """Measurements of a server."""

    full: Window
    """At capacity."""
    paced: Window | None
    """At a given rate."""
    leases: list[tuple[float, float]]
    """(time of the lease, seconds since its slot was announced free)"""
    peak_rss_mb: float


class Seconds(NamedTuple):
    """Length of each part of a measurement."""

    warm: float
    full: float
    paced: float


def variants(*, is_quick: bool) -> dict[str, Variant]:
    """Variants by name; is_quick: smaller batches."""
    dense = Load(prompts_per_batch=32 if is_quick else 128, max_staleness=7 if is_quick else 3)
    # 13 MB per rollout: as many as fit a small machine.
    replay = Load(
        generators=100,
        slots=1,
        choices_per_token=EXPERTS.layers * EXPERTS.experts_per_token,
        prompts_per_batch=2,
        max_staleness=7,
        leaders=4,
    )
    short = replace(dense, tokens=DENSE_PRODUCED.mean_tokens)
    short_replay = replace(
        replay, tokens=EXPERTS_PRODUCED.mean_tokens, generators=400, slots=2, prompts_per_batch=16
    )
    return {
        "dense": _variant(dense, DENSE, DENSE_PRODUCED),
        "encrypted": _variant(dense, DENSE, DENSE_PRODUCED)._replace(is_encrypted=True),
        "dense_mean": _variant(short, DENSE, DENSE_PRODUCED),
        "replay": _variant(replay, EXPERTS, EXPERTS_PRODUCED),
        "replay_mean": _variant(short_replay, EXPERTS, EXPERTS_PRODUCED),
    }


def _variant(load: Load, shape: ModelShape, produced: Produced) -> Variant:
    rates = produced.tokens_per_s / load.tokens, learnt_rollouts_per_s(shape, load.tokens)
    return Variant(load, *rates, has_ledger=not load.choices_per_token)


def write_config(folder: Path, variant: Variant) -> Config:
    """Write a run folder with prompts and config.toml."""
    lines = (
        {"task": "math", "messages": [{"role": "user", "content": f"q {n}"}], "answer": "1"}
        for n in range(PROMPTS)
    )
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    load = variant.load
    keys_dir = folder / "keys" if variant.is_encrypted else None
    if keys_dir is not None:
        make_keys(keys_dir)
    config = Config.model_validate({
        "run": {"dir": folder},
        "prompts": [{"path": folder / "prompts.jsonl"}],
        "train": {
            "steps": 1_000_000, "prompts_per_batch": load.prompts_per_batch,
            "group_size": load.group_size, "microbatch_tokens": 40_960,
        },
        "queue": {"max_staleness": load.max_staleness, "ledger": variant.has_ledger},
        "sampling": {"max_new_tokens": load.tokens},
        "generator": {"context_tokens": 40_960, "kv_tokens": 500_000},
        "eval": {"prompts": 0},
        "ports": {"keys_dir": keys_dir},
    })  # fmt: skip
    config = resolve_ports(config)
    write_job(config, load)
    return config


@contextlib.contextmanager
def running_peers(load: Load, config: Config) -> Iterator[tuple[Control, list[Connection]]]:
    """Run the scripted peers in sub-processes; they send their results after `is_over`."""
    fresh = multiprocessing.get_context("spawn")
    control = Control(
        fresh.Value("i", -1), fresh.Value("d", 0.0), fresh.Value("i", 0), fresh.Event()
    )
    count = load.generators
    parts = [
        range(n * count // GENERATOR_PROCESSES, (n + 1) * count // GENERATOR_PROCESSES)
        for n in range(GENERATOR_PROCESSES)
    ]
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for numbers in (range(0), *parts):
            mine, theirs = fresh.Pipe(duplex=False)
            pipes.append(mine)
            arguments = (load, config.ports, numbers, control, theirs)
            process = fresh.Process(target=run_peers, args=arguments)
            process.start()
            processes.append(process)
            theirs.close()
        yield control, pipes
    finally:
        control.is_over.set()
        for process in processes:
            # After a failure nobody receives the results.
            process.join(PEER_END_S)
            if process.exitcode is None:
                process.kill()
                process.join()


def measure(module: str, variant: Variant, seconds: Seconds) -> Outcome:
    """Run the queue or the floor, first at capacity, then at a given rate."""
    with used_memory(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, log = write_config(folder, variant), folder / f"{module}.log"
        given = [folder] if module == FLOOR else ["--config", folder / "config.toml"]
        with (
            background([sys.executable, "-m", module, *given], log=log) as server,
            running_peers(variant.load, config) as (control, pipes),
        ):
            _await_first_batch(control, server, log)
            time.sleep(seconds.warm)
            full = _watch(server.pid, control, seconds.full)
            # The floor leases without admission, so only its capacity is measured.
            if module == FLOOR:
                return Outcome(full, None, [], 0.0)
            rate = min(TARGET * variant.needed, full.rollouts_per_s / 2)
            control.rate.value = rate / GENERATOR_PROCESSES
            time.sleep(seconds.warm)
            paced = _watch(server.pid, control, seconds.paced)
            peak_rss_mb = read_times(server.pid).peak_rss_mb
            control.is_over.set()
            measured = [pipe.recv() for pipe in pipes if pipe.poll(LIMIT_S)]
    if len(measured) != len(pipes):
        raise RuntimeError("a process of scripted peers did not end")
    leases = [lease for mine in measured for lease in mine]
    return Outcome(full, paced, leases, peak_rss_mb)


def _await_first_batch(control: Control, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while control.version.value < 1:
        if server.poll() is not None:
            end = log.read_text()[-2000:]
            raise RuntimeError(f"the server ended with exit code {server.returncode}:\n{end}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"the queue sent no batch within {LIMIT_S:.0f} s: see {log}")
        time.sleep(0.1)


def _watch(pid: int, control: Control, seconds: float) -> Window:
    began, before, sent = time.monotonic(), read_times(pid), control.sent.value
    time.sleep(seconds)
    rollouts = control.sent.value - sent
    if not rollouts:
        raise RuntimeError(f"no rollout was given back in {seconds:.0f} s")
    after = read_times(pid)
    cpu_s, loop_s = after.cpu_s - before.cpu_s, after.main_s - before.main_s
    return Window(began, time.monotonic(), rollouts, cpu_s, loop_s)


def figures(variant: Variant, queue: Outcome, floor: Outcome) -> dict[str, float]:
    """Figures of a variant; see the module's docstring."""
    assert queue.paced is not None
    paced = queue.paced
    waited_ms = [1e3 * s for at, s in queue.leases if paced.began <= at < paced.ended]
    full, load = queue.full, variant.load
    cpu_ms, loop_ms = full.ms_per_rollout(full.cpu_s), full.ms_per_rollout(full.loop_s)
    floor_ms = floor.full.ms_per_rollout(floor.full.cpu_s)
    found = {
        "needed_rollouts_per_s": variant.needed,
        "rollouts_per_s": full.rollouts_per_s,
        "over_needed": full.rollouts_per_s / variant.needed,
        "learnt_rollouts_per_s": variant.learnt,
        "over_learnt": full.rollouts_per_s / variant.learnt,
        "tokens_per_s": full.rollouts_per_s * load.tokens,
        "bytes_per_s": full.rollouts_per_s * load.rollout_bytes,
        "cpu_share": full.cpu_share,
        "cpu_ms_per_rollout": cpu_ms,
        "loop_ms_per_rollout": loop_ms,
        "floor_rollouts_per_s": floor.full.rollouts_per_s,
        "over_floor": full.rollouts_per_s / floor.full.rollouts_per_s,
        "floor_cpu_ms_per_rollout": floor_ms,
        "bookkeeping_share": 1 - floor_ms / cpu_ms,
        "lease_rate": paced.rollouts_per_s,
        "lease_cpu_share": paced.cpu_share,
        "lease_p50_ms": statistics.median(waited_ms),
        "lease_p99_ms": percentile(waited_ms, 99),
        "lease_max_ms": max(waited_ms),
        "leases": len(waited_ms),
        "peak_rss_mb": queue.peak_rss_mb,
        "held_bound_mb": load.held_bound * load.rollout_bytes / 1e6,
    }
    return rounded(found)


def main() -> None:
    made = parser(__doc__, quick="smaller batches, shorter")
    all_names = list(variants(is_quick=True))
    made.add_argument("--only", nargs="+", choices=all_names, default=all_names)
    options = made.parse_args()
    seconds = Seconds(2.0, 8.0, 6.0) if options.quick else Seconds(3.0, 12.0, 30.0)
    found: dict[str, object] = {}
    for name, variant in variants(is_quick=options.quick).items():
        if name in options.only:
            floor, queue = (measure(module, variant, seconds) for module in (FLOOR, QUEUE))
            found[name] = mine = figures(variant, queue, floor)
            if variant.has_ledger:
                plain = measure(QUEUE, variant._replace(has_ledger=False), seconds).full
                mine["over_without_ledger"] = queue.full.rollouts_per_s / plain.rollouts_per_s
            say(f"{name} {found[name]}")
    report(found | {"busy_share": busy_share(sorted(os.sched_getaffinity(0)))})


if __name__ == "__main__":
    main()
