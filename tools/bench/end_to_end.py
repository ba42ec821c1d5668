"""Ours beside our synchronous mode and beside TRL: `python -m tools.bench.end_to_end [--quick]`.

Runs on two cores, one variant after another in a rotating order, on the tiny task of the
quickstart:

| variant     | what                                                                              |
|-------------|-----------------------------------------------------------------------------------|
| ours        | asynchronous: queue.max_staleness as in examples/tiny.toml                         |
| ours_sync   | the same with queue.max_staleness=0                                                |
| trl_1thread | GRPOTrainer of TRL (tools/bench/requirements-trl.txt), in one process, one thread  |
| trl_2threads| the same, two threads                                                              |

All start from the same weights after the same cold start, with the same train prompts as the same
token ids, rewards, 16 prompts x 16 rollouts a step, at most 12 new tokens, T=1, AdamW, clip-higher,
float32, and take the same count of optimizer steps. One difference stays: TRL trains on flat
groups (which give no gradient), ours drops them and generates others in their place.

rollouts_per_s counts generated rollouts, those of dropped flat groups included, from the end of
step 3 to the end of the last step. rollouts_trained_per_s leaves the dropped ones out.

seconds_to_accuracy_0.7 is wall clock from the loop's start (ours: version 0 is published; TRL:
on_train_begin) to the end of the first step at which the rollouts of the last 3 steps, at least
768, are right in 70 % of the cases. Nothing is evaluated meanwhile, so no time has to be taken
out: the train prompts are new at each step, so that what is sampled for training (T=1, flat groups
included) is a sample of the policy's accuracy before it trained on them. Ours samples some of it
from a policy up to max_staleness versions older, which delays it a little. null: never reached.

busy_share_between_runs is what other processes took of the two cores in pauses of 2 s before each
run: where it is not near 0, the figures say little.

Progress goes to stderr; the last line on stdout is one JSON object with the medians of the repeats.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError
from tools.bench.children import ChildFailed
from tools.bench.contention import busy_share
from tools.bench.measures import WARMUP_STEPS, StepMark, compare, learning
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
    try:
        work_dir.mkdir(parents=True)
        _say(f"logs and metrics of all runs: {work_dir}")
        peer = make_venv(options.peer_venv, TRL_PINS)
        workload = make_workload(work_dir, steps=steps)
        shares: list[float] = []
        loops = run_all(
            variants(workload, peer),
            repeats=repeats,
            work_dir=work_dir,
            before_each=lambda: shares.append(busy_share(cores, PAUSE_S)),
        )
    except (ChildFailed, ConfigError, InputError, FileExistsError) as error:
        _say(str(error))
        return 1
    conditions = {
        "mode": "quick" if options.quick else "full",
        "steps": steps,
        "repeats": repeats,
        "cores": len(cores),
        "busy_share_between_runs": round(statistics.fmean(shares), 3),
    }
    if max(shares) > QUIET_SHARE:
        _say(
            f"other processes took up to {max(shares):.0%} of the cores between the runs: these "
            "figures say little; run this again on a quiet machine"
        )
    print(json.dumps(conditions | compare(loops) | ({} if options.quick else learning(loops))))
    return 0


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
    *,
    repeats: int,
    work_dir: Path,
    before_each: Callable[[], None],
) -> dict[str, list[list[StepMark]]]:
    """Steps by variant and repeat; the order rotates, so that drift of the machine hits all."""
    loops: dict[str, list[list[StepMark]]] = {name: [] for name in by_name}
    for repeat, order in enumerate(rotations(list(by_name), repeats)):
        for name in order:
            before_each()
            started = time.monotonic()
            marks = by_name[name](work_dir / f"{name}-{repeat}")
            loops[name].append(marks)
            _say(
                f"repeat {repeat + 1}/{repeats} {name}: {len(marks)} steps in "
                f"{marks[-1].seconds:.1f} s, {time.monotonic() - started:.0f} s with set-up"
            )
    return loops


def rotations(names: list[str], repeats: int) -> list[list[str]]:
    """The order of each repeat: the names, moved on by one each time."""
    return [names[i % len(names) :] + names[: i % len(names)] for i in range(repeats)]


def _say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, throughput only")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--repeats", type=int, help="runs of each variant")
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
