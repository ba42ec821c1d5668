"""Ours beside our synchronous mode and beside TRL: `python -m tools.bench.end_to_end [--quick]`.

Runs on two cores, one variant after another in a rotating order. Two workloads:

| workload | variant | what |
|---|---|---|
| tiny | ours | asynchronous: queue.max_staleness as in examples/tiny.toml |
| | ours_sync | the same with queue.max_staleness=0 |
| | trl_1thread | GRPOTrainer of TRL (requirements-trl.txt), in one process, one thread |
| | trl_2threads | the same, two threads |
| real | ours | asynchronous, with the settings of tools/bench/real.toml |
| | ours_sync | the same with queue.max_staleness=0 |
| | trl | GRPOTrainer, two threads, microbatches of 16, in the quickest of its settings |

tiny: the sorting task of the quickstart. All start from the same weights after the same cold start,
with the same train prompts as the same token ids, rewards, 16 prompts x 16 rollouts a step, at most
12 new tokens, T=1, AdamW, clip-higher, float32, and take the same count of optimizer steps. One
difference stays: TRL trains on zero-variance groups (which give no gradient), ours drops them and
generates others in their place.

real: SmolLM2-135M-Instruct, open prompts whose answers differ in length (completion_tokens: p10,
p50, p90 of what was measured), 8 groups of 8 rollouts a step, at most 192 new tokens, a smooth
reward. Prompts come in the same order as the same token ids, one optimizer step each. TRL's setting
is the quickest in a probe of two steps of 16 tokens (trl_probe_step_s): float32, bfloat16 by
autocast, and float32 with its paged generation. --quick probes the first two, and halves groups and
tokens: its ratios are smaller. Weights that are
bfloat16 themselves are not among them: they lose the updates of a low learning rate. Rates count
completion tokens that were trained on, so that nobody gains by short ones; over_trl_rollouts counts
rollouts. Both sides keep float32 master weights; our products are bfloat16, as TRL's with bfloat16.
What stays unfair: TRL generates a step's rollouts from one policy, ours from one up to
max_staleness versions older; runs of TRL and of ours_sync are not repeated, for the sake of time.

tiny: rollouts_per_s counts generated rollouts, those of dropped zero-variance groups included, from
the end of step 3 to the end of the last step. rollouts_trained_per_s leaves the dropped ones out.

over_sync_bound is what over_sync would be if a synchronous run's waiting and the rest of its steps
ran side by side, each step as long as the longer of the two.

seconds_to_accuracy_0.7 is wall clock from the loop's start (ours: version 0 is synced; TRL:
on_train_begin) to the end of the first step at which the rollouts of the last 3 steps, at least
768, are right in 70 % of the cases. Nothing is evaluated meanwhile, so no time has to be taken
out: the train prompts are new at each step, so that what is sampled for training (T=1,
zero-variance groups included) is a sample of the policy's accuracy before it trained on them. Ours
samples some of it from a policy up to max_staleness versions older, which delays it a little. null:
never reached.

peak_memory_bytes: the sum of PSS over all processes of a variant, sampled every 2 s, start-up
included.

busy_share_between_runs is what other processes took of the two cores in pauses of 2 s before each
run: where it is not near 0, the figures say little.

Progress goes to stderr; the last line on stdout is one JSON object with the medians of the repeats,
one object a workload.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError
from tools.bench import real
from tools.bench.children import ChildFailed
from tools.bench.contention import busy_share
from tools.bench.measures import WARMUP_STEPS, StepMark, compare, learning
from tools.bench.memory import PeakMemory
from tools.bench.peer_venv import TRL_PINS, make_venv
from tools.bench.variants import ROOT, Workload, run_ours, run_peer
from tools.bench.workload import make_workload

CORES = 2
QUIET_SHARE = 0.1
PAUSE_S = 2.0
QUICK = {"steps": 12, "repeats": 1}
FULL = {"steps": 60, "repeats": 3}

Variant = Callable[[Path], list[StepMark]]


def main() -> int:
    """Command line."""
    options = _parse()
    steps = options.steps or (QUICK if options.quick else FULL)["steps"]
    repeats = options.repeats or (QUICK if options.quick else FULL)["repeats"]
    # As an exception, so that the run of the moment is ended too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    # Children inherit it: no variant gets a core that another one has not.
    os.sched_setaffinity(0, cores)
    work_dir = options.work_dir or ROOT / ".cache" / "bench" / time.strftime("%Y%m%d-%H%M%S")
    shares: list[float] = []
    bench = Bench(work_dir, options.quick, lambda: shares.append(busy_share(cores, PAUSE_S)))
    try:
        work_dir.mkdir(parents=True)
        _say(f"logs and metrics of all runs: {work_dir}")
        peer = make_venv(options.peer_venv, TRL_PINS)
        found: dict[str, Any] = {}
        if options.workload != "real":
            found["tiny"] = run_tiny(bench, peer, steps, repeats)
        if options.workload != "tiny":
            found["real"] = run_real(bench, peer)
    except (ChildFailed, ConfigError, InputError, FileExistsError) as error:
        _say(str(error))
        return 1
    conditions = {
        "mode": "quick" if options.quick else "full",
        "cores": len(cores),
        "busy_share_between_runs": round(statistics.fmean(shares), 3),
    }
    if max(shares) > QUIET_SHARE:
        _say(
            f"other processes took up to {max(shares):.0%} of the cores between the runs: these "
            "figures say little; run this again on a quiet machine"
        )
    print(json.dumps(conditions | found))
    return 0


@dataclass(frozen=True)
class Bench:
    """What both workloads need."""

    work_dir: Path
    is_quick: bool
    before_each: Callable[[], None]


@dataclass
class Runs:
    """What the variants left, by name."""

    loops: dict[str, list[list[StepMark]]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    """Bytes; the most of all repeats."""


def run_tiny(bench: Bench, peer: Path, steps: int, repeats: int) -> dict[str, Any]:
    """Figures of the workload tiny. Raises ChildFailed."""
    work_dir = bench.work_dir / "tiny"
    work_dir.mkdir()
    runs = Runs()
    run_all(
        variants(make_workload(work_dir, steps=steps), peer),
        runs,
        repeats=repeats,
        work_dir=work_dir,
        before_each=bench.before_each,
    )
    conditions = {"steps": steps, "repeats": repeats, "peak_memory_bytes": runs.peaks}
    learned = {} if bench.is_quick else learning(runs.loops)
    return conditions | compare(runs.loops) | learned


def run_real(bench: Bench, peer: Path) -> dict[str, Any]:
    """Figures of the workload real. Raises ChildFailed."""
    scale = real.QUICK if bench.is_quick else real.FULL
    work_dir = bench.work_dir / "real"
    work_dir.mkdir()
    workload = real.make_real(work_dir, scale)
    names = [name for name in real.SETTINGS if not (bench.is_quick and "paged" in name)]
    probed = real.probe(workload, peer, work_dir, names)
    setting = real.quickest(probed)
    _say(f"real: TRL's settings, seconds of a short step: {probed}")
    runs = Runs()
    by_name = real.variants(workload, peer, real.SETTINGS[setting], scale)
    run_all(
        by_name,
        runs,
        repeats=scale.repeats,
        work_dir=work_dir,
        before_each=bench.before_each,
        at_most={"trl": 1, "ours_sync": 1},
    )
    lengths = real.spread(real.lengths_of(work_dir, scale.repeats))
    _say(f"real: tokens of completions: {lengths}")
    return {
        **dataclasses.asdict(scale),
        "trl_setting": setting,
        "trl_probe_step_s": probed,
        "completion_tokens": lengths,
        **real.compare(runs.loops, runs.peaks, scale),
    }


def variants(workload: Workload, peer: Path) -> dict[str, Variant]:
    """The variants by name: each trains in the folder that it is given."""
    stale = workload.config.queue.max_staleness
    return {
        "ours": lambda run_dir: run_ours(workload, max_staleness=stale, run_dir=run_dir),
        "ours_sync": lambda run_dir: run_ours(workload, max_staleness=0, run_dir=run_dir),
        "trl_1thread": lambda run_dir: run_peer(workload, peer, threads=1, run_dir=run_dir),
        "trl_2threads": lambda run_dir: run_peer(workload, peer, threads=2, run_dir=run_dir),
    }


def run_all(
    by_name: dict[str, Variant],
    runs: Runs,
    *,
    repeats: int,
    work_dir: Path,
    before_each: Callable[[], None],
    at_most: dict[str, int] | None = None,
) -> None:
    """Fill `runs`; the order rotates, so that drift of the machine hits all.

    at_most: repeats of variants that have fewer.
    """
    for repeat, order in enumerate(rotations(list(by_name), repeats)):
        for name in order:
            if repeat >= (at_most or {}).get(name, repeats):
                continue
            before_each()
            started = time.monotonic()
            with PeakMemory() as memory:
                marks = by_name[name](work_dir / f"{name}-{repeat}")
            runs.loops.setdefault(name, []).append(marks)
            runs.peaks[name] = max(runs.peaks.get(name, 0), memory.peak_bytes)
            _say(
                f"repeat {repeat + 1}/{repeats} {name}: {len(marks)} steps in "
                f"{marks[-1].seconds:.1f} s, {time.monotonic() - started:.0f} s with set-up, "
                f"{memory.peak_bytes / 1e9:.1f} GB"
            )


def rotations(names: list[str], repeats: int) -> list[list[str]]:
    """The order of each repeat: the names, moved on by one each time."""
    return [names[i % len(names) :] + names[: i % len(names)] for i in range(repeats)]


def _say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, once, throughput only")
    parser.add_argument("--workload", choices=["tiny", "real", "all"], default="all")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run of tiny")
    parser.add_argument("--repeats", type=int, help="runs of each variant of tiny")
    parser.add_argument(
        "--work-dir", type=Path, help="new folder for all runs (default: in .cache/bench)"
    )
    parser.add_argument("--peer-venv", type=Path, default=ROOT / ".cache" / "bench-trl-venv")
    options = parser.parse_args()
    if options.steps is not None and options.steps <= WARMUP_STEPS:
        parser.error(f"--steps must exceed the first {WARMUP_STEPS}, which are left out")
    return options


if __name__ == "__main__":
    sys.exit(main())
