"""End-to-end training, compared with our synchronous mode and with TRL:
`python -m tools.bench.end_to_end [--quick]`.

Runs on two cores, one variant after another in a rotating order. Three workloads:

| workload | variant | what |
|---|---|---|
| tiny | ours | asynchronous: queue.max_staleness as in examples/tiny.toml |
| | ours_sync | the same with queue.max_staleness=0 |
| | trl_1thread | GRPOTrainer of TRL (requirements-trl.txt), in one process, one thread |
| | trl_2threads | the same, two threads |
| lookup | as tiny | examples/agents/lookup.py, TRL with `environment_factory` |
| real | ours | asynchronous, with the settings of tools/bench/real.toml |
| | ours_sync | the same with queue.max_staleness=0 |
| | trl | GRPOTrainer, two threads, microbatches of 16, in the quickest of its settings |

tiny: the sorting task of the quickstart. All variants start from the same weights and take equally
many optimizer steps of 16 prompts x 16 rollouts. Prompts (as token ids), rewards, sampling (at most
12 new tokens, T=1), AdamW, clip-higher and float32 are the same. One difference: TRL trains on
zero-variance groups, which give no gradient; ours drops them and generates others.

lookup: a tool in two turns, with the model, cold start and sizes of examples/agents/lookup.toml (30
steps of 8 prompts x 8 conversations, at most 3 new tokens a turn), and the other settings of tiny.
Prompts (as token ids), the tool and the rewards are the same. The benchmark fails if a completion
of TRL lacks what its environment told, or if a side has fewer than 1.8 turns per rollout. Unfair:

- TRL's environment is an object in the trainer's process. Ours has processes of its own, which take
  half of the processor time when a conversation has 7 tokens.
- TRL is one process, ours are many: other programs on the machine slow ours more.
- TRL generates a step's rollouts from one policy, ours from versions up to max_staleness older.
- ours_sync and trl_2threads run once.

real: SmolLM2-135M-Instruct, open prompts with answers of different lengths (`completion_tokens`), 8
groups of 8 rollouts a step, at most 192 new tokens, a smooth reward. --quick halves groups and
tokens, so its ratios are smaller. A probe of two short steps (`trl_probe_step_s`) chooses TRL's
fastest setting: float32, bfloat16 by autocast, float32 with paged generation (not in --quick).
Weights in bfloat16 are excluded: they lose the updates of a low learning rate. Rates count trained
completion tokens, so that short completions give no advantage; over_*_rollouts count rollouts. Both
sides keep float32 master weights. Unfair: TRL generates a step's rollouts from one policy, ours
from versions up to max_staleness older; TRL and ours_sync run once.

| figure | what |
|---|---|
| rollouts_per_s | generated, dropped zero-variance groups included, after step 3 |
| rollouts_trained_per_s | without the dropped groups |
| over_sync, over_trl | ours over ours_sync, and over the faster TRL |
| turns_per_rollout | replies of the policy in a conversation of lookup |
| over_sync_bound | over_sync if a synchronous run's waiting and work overlapped perfectly |
| seconds_to_accuracy_0.7 | until 70 % of the rollouts of 3 steps are right; null: never |
| peak_memory_bytes | PSS of all processes of a variant, sampled every 2 s, start-up included |
| busy_share_between_runs | other processes' share of the cores before each run: must be near 0 |

The clock of seconds_to_accuracy starts with the loop (ours: sync of version 0; TRL:
on_train_begin). Train prompts are new at each step, so their rollouts measure accuracy.
The last line on stdout is one JSON object with medians of the repeats, one object per workload.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.protocol.metrics import read_jsonl
from tools.bench.children import (
    CACHE,
    MODEL_TIMEOUT_S,
    ROOT,
    TRL_PINS,
    ChildFailed,
    environment,
    make_venv,
    run_child,
    run_tool,
    smollm2,
)
from tools.bench.end_to_end_peer import lines
from tools.bench.loops import (
    GROUP_SIZE,
    WARMUP_STEPS,
    Loops,
    Scale,
    StepMark,
    compare_real,
    compare_tiny,
    learning,
    spread,
    turns_per_rollout,
)
from tools.bench.measuring import CORES, PeakMemory, busy_share, parser, rotations, run, say
from tools.bench.variants import (
    Workload,
    run_cli,
    run_ours,
    run_peer,
    with_steps,
    write_peer_prompts,
)

TINY = (ROOT / "examples" / "tiny.toml", ROOT / "tools" / "bench" / "tiny.toml")
LOOKUP = (TINY[1], ROOT / "examples" / "agents" / "lookup.toml")
"""The example's sizes precede those of tiny."""
REAL = (ROOT / "tools" / "bench" / "real.toml",)
QUIET_SHARE = 0.1
STEPS, LOOKUP_STEPS, QUICK_STEPS = 60, 30, 12
REPEATS, QUICK_REPEATS = 3, 1
FULL = Scale(groups=8, max_new_tokens=192, steps=6, skip=2, peer_steps=3, peer_skip=1, repeats=3)
QUICK = Scale(groups=4, max_new_tokens=96, steps=4, skip=2, peer_steps=2, peer_skip=1, repeats=1)
"""Sizes of the workload real."""
TRL_THREADS = 2
_REAL = {"per_device_train_batch_size": 16, "shuffle_dataset": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": _REAL,
    "bfloat16": _REAL | {"bf16": True},
    "float32_paged": _REAL | {"use_transformers_continuous_batching": True},
}
"""Settings of TRL for real; the benchmark measures the fastest one of a probe."""
PROBE_STEPS, PROBE_TOKENS = 2, 16
LEAST_TURNS = 1.8
"""Of a rollout of lookup: the teacher always calls the tool, so nearly all have two."""

Variant = Callable[[Path], list[StepMark]]


def main() -> int:
    options = _parse()
    return run("end-to-end", options, partial(measure, options), cores=CORES)


def measure(options: argparse.Namespace, work_dir: Path, cores: list[int]) -> dict[str, Any]:
    """Figures of the workloads. Raises ChildFailed."""
    shares: list[float] = []
    bench = Bench(work_dir, options.quick, lambda: shares.append(busy_share(cores)))
    peer = make_venv(options.peer_venv, TRL_PINS)
    found: dict[str, Any] = {}
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    if options.workload in ("tiny", "all"):
        steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
        found["tiny"] = run_small(bench, peer, "tiny", steps=steps, repeats=repeats)
    if options.workload in ("lookup", "all"):
        steps = options.steps or LOOKUP_STEPS
        found["lookup"] = run_small(bench, peer, "lookup", steps=steps, repeats=repeats)
    if options.workload in ("real", "all"):
        found["real"] = run_real(bench, peer)
    if max(shares) > QUIET_SHARE:
        say(
            f"other processes took up to {max(shares):.0%} of the cores between the runs, which "
            f"makes these figures useless; below {QUIET_SHARE:.0%} is allowed: run this again on a "
            "quiet machine"
        )
    return {"busy_share_between_runs": statistics.fmean(shares)} | found


@dataclass(frozen=True)
class Bench:
    """Conditions of both workloads."""

    work_dir: Path
    is_quick: bool
    before_each: Callable[[], None]


@dataclass
class Runs:
    """Measurements by variant."""

    loops: dict[str, list[list[StepMark]]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    """Peak memory in bytes, the maximum of the repeats."""


def run_small(bench: Bench, peer: Path, name: str, *, steps: int, repeats: int) -> dict[str, Any]:
    """Figures of the workload tiny or lookup. Raises ChildFailed, also if turns are missing."""
    work_dir = bench.work_dir / name
    work_dir.mkdir()
    workload = (make_lookup if name == "lookup" else make_tiny)(work_dir, steps)
    by_name = ours(workload) | {
        "trl_1thread": lambda run_dir: run_peer(workload, peer, threads=1, run_dir=run_dir),
        "trl_2threads": lambda run_dir: run_peer(workload, peer, threads=2, run_dir=run_dir),
    }
    once = {"ours_sync": 1, "trl_2threads": 1} if name == "lookup" else {}
    runs = run_all(by_name, work_dir, bench.before_each, repeats=repeats, at_most=once)
    conditions = {"steps": steps, "repeats": repeats, "peak_memory_bytes": runs.peaks}
    found = conditions | compare_tiny(runs.loops)
    if name == "lookup":
        found["turns_per_rollout"] = checked_turns(runs.loops)
    return found | ({} if bench.is_quick and name == "tiny" else learning(runs.loops))


def checked_turns(loops: Loops) -> dict[str, float]:
    """Turns per rollout of each variant of lookup. Raises ChildFailed below LEAST_TURNS."""
    turns = turns_per_rollout(loops)
    if min(turns.values()) < LEAST_TURNS:
        raise ChildFailed(f"a rollout has fewer than {LEAST_TURNS} turns on average: {turns}")
    return turns


def run_real(bench: Bench, peer: Path) -> dict[str, Any]:
    """Figures of the workload real. Raises ChildFailed."""
    scale = QUICK if bench.is_quick else FULL
    work_dir = bench.work_dir / "real"
    work_dir.mkdir()
    workload = make_real(work_dir, scale)
    names = [name for name in SETTINGS if not (bench.is_quick and "paged" in name)]
    probed = probe(workload, peer, work_dir, names)
    setting = quickest(probed)
    say(f"real: TRL's settings, seconds of a short step: {probed}")
    slow = with_steps(workload, scale.peer_steps)
    by_name = ours(workload) | {
        "trl": lambda run_dir: run_peer(
            slow, peer, threads=TRL_THREADS, run_dir=run_dir, settings=SETTINGS[setting]
        )
    }
    once = {"trl": 1, "ours_sync": 1}
    runs = run_all(by_name, work_dir, bench.before_each, repeats=scale.repeats, at_most=once)
    lengths = spread(_lengths(work_dir, scale.repeats))
    say(f"real: tokens of completions: {lengths}")
    return {
        **dataclasses.asdict(scale),
        "trl_setting": setting,
        "trl_probe_step_s": probed,
        "completion_tokens": lengths,
        **compare_real(runs.loops, runs.peaks, scale),
    }


def ours(workload: Workload) -> dict[str, Variant]:
    """Our two variants by name; each trains in the given folder."""
    stale = workload.config.queue.max_staleness
    return {
        "ours": lambda run_dir: run_ours(workload, max_staleness=stale, run_dir=run_dir),
        "ours_sync": lambda run_dir: run_ours(workload, max_staleness=0, run_dir=run_dir),
    }


def run_all(
    by_name: dict[str, Variant],
    work_dir: Path,
    before_each: Callable[[], None],
    *,
    repeats: int,
    at_most: dict[str, int],
) -> Runs:
    """Run all variants in rotating order. at_most: variants with fewer repeats."""
    runs = Runs()
    for repeat, order in enumerate(rotations(list(by_name), repeats)):
        for name in order:
            if repeat >= at_most.get(name, repeats):
                continue
            before_each()
            started = time.monotonic()
            with PeakMemory() as memory:
                marks = by_name[name](work_dir / f"{name}-{repeat}")
            runs.loops.setdefault(name, []).append(marks)
            runs.peaks[name] = max(runs.peaks.get(name, 0), memory.peak_bytes)
            say(
                f"repeat {repeat + 1}/{repeats} {name}: {len(marks)} steps in "
                f"{marks[-1].seconds:.1f} s, {time.monotonic() - started:.0f} s with set-up, "
                f"{memory.peak_bytes / 1e9:.1f} GB"
            )
    return runs


def make_tiny(work_dir: Path, steps: int) -> Workload:
    """Model, tasks, cold start and the peer's prompts, in `work_dir`. Raises ChildFailed."""
    model, tasks = work_dir / "model", work_dir / "tasks"
    run_tool("make_tiny_model", model, log=work_dir / "make_tiny_model.log")
    run_tool("make_tasks", "sort", tasks, log=work_dir / "make_tasks.log")
    data = cold_started(TINY[0], tasks, model, work_dir)
    workload = with_steps(Workload(TINY, data, work_dir / "peer_prompts.jsonl"), steps)
    write_peer_prompts(workload.config, workload.peer_prompts)
    return workload


def make_lookup(work_dir: Path, steps: int) -> Workload:
    """As make_tiny, of examples/agents/lookup.py. Raises ChildFailed."""
    tasks, script = work_dir / "tasks", ROOT / "examples" / "agents" / "make_inputs.py"
    command = [sys.executable, script, "lookup", tasks, 0]
    log = work_dir / "make_inputs.log"
    run_child(command, log=log, timeout_s=MODEL_TIMEOUT_S, environment=environment())
    module = "reward.tasks.lookup.environment=examples.agents.lookup:lookup"
    data = cold_started(LOOKUP[1], tasks, tasks / "model", work_dir, module)
    overrides = (*data, "sft.steps=0", "eval.prompts=0")
    workload = with_steps(Workload(LOOKUP, overrides, work_dir / "peer_prompts.jsonl"), steps)
    write_peer_prompts(workload.config, workload.peer_prompts, task="lookup")
    return workload


def cold_started(
    config: Path, tasks: Path, model: Path, work_dir: Path, *overrides: str
) -> tuple[str, ...]:
    """Train a model on an example's SFT; returns the overrides of runs that start from it."""
    data = (
        _path_override("prompts.0.path", tasks / "prompts.jsonl"),
        _path_override("sft.dataset", tasks / "sft.jsonl"),
        *overrides,
    )
    only_sft = [_path_override("model.path", model), "train.steps=0", "eval.prompts=0"]
    run_cli((config,), [*data, *only_sft], run_dir=work_dir / "cold_start")
    return (*data, _path_override("model.path", work_dir / "cold_start" / "hf" / "cold_start"))


def make_real(work_dir: Path, scale: Scale) -> Workload:
    """Model, prompts and the peer's prompts. Raises ChildFailed."""
    prompts = work_dir / "prompts.jsonl"
    prompts.write_text("\n".join(lines()) + "\n")
    overrides = (
        _path_override("model.path", smollm2()),
        _path_override("prompts.0.path", prompts),
        f"train.prompts_per_batch={scale.groups}",
        f"train.group_size={GROUP_SIZE}",
        f"sampling.max_new_tokens={scale.max_new_tokens}",
    )
    workload = with_steps(Workload(REAL, overrides, work_dir / "peer_prompts.jsonl"), scale.steps)
    write_peer_prompts(workload.config, workload.peer_prompts, task="open")
    return workload


def _path_override(key: str, path: Path) -> str:
    return f"{key}={json.dumps(str(path.resolve()))}"


def probe(
    workload: Workload, python: Path, work_dir: Path, names: Sequence[str]
) -> dict[str, float | str]:
    """By setting: seconds of TRL's second step with short completions, or the error."""
    short = dataclasses.replace(
        with_steps(workload, PROBE_STEPS),
        overrides=(
            *workload.overrides,
            f"train.steps={PROBE_STEPS}",
            f"sampling.max_new_tokens={PROBE_TOKENS}",
        ),
    )
    found: dict[str, float | str] = {}
    for name in names:
        run_dir = work_dir / f"probe-{name}"
        try:
            marks = run_peer(
                short, python, threads=TRL_THREADS, run_dir=run_dir, settings=SETTINGS[name]
            )
        except ChildFailed as error:
            found[name] = str(error).splitlines()[-1]
        else:
            found[name] = round(marks[-1].seconds - marks[-2].seconds, 2)
    return found


def quickest(probed: dict[str, float | str]) -> str:
    """The fastest setting. Raises ChildFailed when none worked."""
    seconds = {name: value for name, value in probed.items() if isinstance(value, float)}
    if not seconds:
        raise ChildFailed(f"TRL failed in every setting: {probed}")
    return min(seconds, key=lambda name: seconds[name])


def _lengths(work_dir: Path, repeats: int) -> list[int]:
    """Tokens of every trained completion of our runs."""
    folders = [work_dir / f"ours-{repeat}" / "rollouts" for repeat in range(repeats)]
    files = [file for folder in folders for file in sorted(folder.glob("step_*.jsonl"))]
    return [row["tokens"] for file in files for row in read_jsonl(file)]


def _parse() -> argparse.Namespace:
    made = parser(
        __doc__, quick="few steps, once", repeats="runs of each variant of tiny and lookup"
    )
    made.add_argument("--workload", choices=["tiny", "lookup", "real", "all"], default="all")
    made.add_argument("--steps", type=int, help="optimizer steps of each run of tiny and lookup")
    made.add_argument("--peer-venv", type=Path, default=CACHE / "bench-trl-venv")
    options = made.parse_args()
    if options.steps is not None and options.steps <= WARMUP_STEPS:
        made.error(f"--steps must exceed the first {WARMUP_STEPS}, which are left out")
    return options


if __name__ == "__main__":
    sys.exit(main())
