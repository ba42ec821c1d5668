"""The workload `real`: SmolLM2-135M on open prompts, TRL's settings for it, and its figures.

Used by tools.bench.end_to_end.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tools.bench.children import ChildFailed
from tools.bench.measures import StepMark, median_bound, rollouts_per_s, tokens_per_s
from tools.bench.open_prompts import lines
from tools.bench.real_model import smollm2
from tools.bench.variants import (
    ROOT,
    PeerSetting,
    Workload,
    completion_lengths,
    run_ours,
    run_peer,
    with_steps,
    write_peer_prompts,
)

CONFIG = ROOT / "tools" / "bench" / "real.toml"
TRL_THREADS = 2
_TRL = PeerSetting(microbatch=16, is_shuffled=False, reward="text")
SETTINGS = {
    "float32": _TRL,
    "bfloat16": dataclasses.replace(_TRL, dtype="bfloat16"),
    "float32_paged": dataclasses.replace(_TRL, is_paged=True),
}
"""By which TRL may do the same work; the quickest in a probe is measured."""
PROBE_STEPS, PROBE_TOKENS = 2, 16
GROUP_SIZE = 8


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much the runs do; TRL (the peer) takes minutes a step."""

    groups: int
    """Of 8 rollouts, a step."""
    max_new_tokens: int
    steps: int
    """Of the optimizer."""
    skip: int
    """How many of them come before the clock starts."""
    peer_steps: int
    peer_skip: int
    repeats: int
    """Of ours; the others run once."""


FULL = Scale(groups=8, max_new_tokens=192, steps=6, skip=2, peer_steps=3, peer_skip=1, repeats=3)
QUICK = Scale(groups=4, max_new_tokens=96, steps=4, skip=2, peer_steps=2, peer_skip=1, repeats=1)


def make_real(work_dir: Path, scale: Scale) -> Workload:
    """Model, prompts and the peer's prompts. Raises ChildFailed."""
    prompts = work_dir / "prompts.jsonl"
    prompts.write_text("\n".join(lines()) + "\n")
    overrides = (
        f"model.path={json.dumps(str(smollm2().resolve()))}",
        f"prompts.0.path={json.dumps(str(prompts.resolve()))}",
        f"train.prompts_per_batch={scale.groups}",
        f"train.group_size={GROUP_SIZE}",
        f"sampling.max_new_tokens={scale.max_new_tokens}",
    )
    workload = with_steps(Workload(CONFIG, overrides, work_dir / "peer_prompts.jsonl"), scale.steps)
    write_peer_prompts(workload.config, workload.peer_prompts, task="open")
    return workload


def variants(
    workload: Workload, python: Path, setting: PeerSetting, scale: Scale
) -> dict[str, Callable[[Path], list[StepMark]]]:
    """By name; each trains in the folder that it is given."""
    stale = workload.config.queue.max_staleness
    peer = with_steps(workload, scale.peer_steps)
    return {
        "ours": lambda run_dir: run_ours(workload, max_staleness=stale, run_dir=run_dir),
        "ours_sync": lambda run_dir: run_ours(workload, max_staleness=0, run_dir=run_dir),
        "trl": lambda run_dir: run_peer(
            peer, python, threads=TRL_THREADS, run_dir=run_dir, setting=setting
        ),
    }


def probe(
    workload: Workload, python: Path, work_dir: Path, names: Sequence[str]
) -> dict[str, float | str]:
    """Seconds of TRL's second step with short completions, by setting; what failed, in words."""
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
                short, python, threads=TRL_THREADS, run_dir=run_dir, setting=SETTINGS[name]
            )
        except ChildFailed as error:
            found[name] = str(error).splitlines()[-1]
        else:
            found[name] = round(marks[-1].seconds - marks[-2].seconds, 2)
    return found


def quickest(probed: dict[str, float | str]) -> str:
    """The setting with the least seconds. Raises ChildFailed where none worked."""
    seconds = {name: value for name, value in probed.items() if isinstance(value, float)}
    if not seconds:
        raise ChildFailed(f"TRL failed in every setting: {probed}")
    return min(seconds, key=lambda name: seconds[name])


def compare(
    loops: dict[str, list[list[StepMark]]], peaks: dict[str, int], scale: Scale
) -> dict[str, Any]:
    """Medians over repeats, and ratios. Needs the variants ours, ours_sync and trl."""

    def median(name: str, rate: Callable[[Sequence[StepMark], int], float]) -> float:
        skip = scale.peer_skip if name == "trl" else scale.skip
        return statistics.median(rate(marks, skip) for marks in loops[name])

    tokens = {name: median(name, tokens_per_s) for name in loops}
    rollouts = {
        name: median(name, lambda marks, skip: rollouts_per_s(marks, skip=skip)) for name in loops
    }
    return {
        "tokens_per_s": {name: round(value, 1) for name, value in tokens.items()},
        "tokens_per_s_repeats": {
            name: [
                round(tokens_per_s(marks, scale.peer_skip if name == "trl" else scale.skip), 1)
                for marks in runs
            ]
            for name, runs in loops.items()
        },
        "step_s": {
            name: round(scale.groups * GROUP_SIZE / value, 2) for name, value in rollouts.items()
        },
        "over_trl": round(tokens["ours"] / tokens["trl"], 2),
        "over_sync": round(tokens["ours"] / tokens["ours_sync"], 2),
        "over_sync_bound": median_bound(loops["ours_sync"], scale.skip),
        "over_trl_rollouts": round(rollouts["ours"] / rollouts["trl"], 2),
        "over_sync_rollouts": round(rollouts["ours"] / rollouts["ours_sync"], 2),
        "peak_memory_bytes": peaks,
        "peak_memory_over_trl": round(peaks["ours"] / peaks["trl"], 3),
    }


def spread(lengths: Sequence[int]) -> dict[str, float]:
    """How much the lengths of completions differ: percentiles and p90 over p10."""
    deciles = statistics.quantiles(lengths, n=10)
    p10, p50, p90 = deciles[0], deciles[4], deciles[8]
    return {"p10": p10, "p50": p50, "p90": p90, "p90_over_p10": round(p90 / p10, 2)}


def lengths_of(work_dir: Path, repeats: int) -> list[int]:
    """Tokens of all completions that ours trained on."""
    return [n for i in range(repeats) for n in completion_lengths(work_dir / f"ours-{i}")]
