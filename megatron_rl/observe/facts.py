"""Facts of a run besides its metrics: paths, and configurations of its parts.

Used by the launcher at the end of a run, and by `megatron-rl report`, `audit` and `replay`.
"""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.staging import resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.observe.summary import RunFacts
from megatron_rl.protocol.exports import COLD_START, FINAL
from megatron_rl.protocol.line_errors import decode_lines
from megatron_rl.protocol.metrics import CONTINUED, RESUMED, iter_jsonl, step_before

_CONFIG = "config.toml"
KEPT_CONFIGS = "config.until_step_*.toml"
"""Pattern of the configurations that are kept."""
SAMPLED_STEPS = 10
"""Most steps to read at each end of a run, whose rollouts may have gigabytes."""


class _Verdict(msgspec.Struct):
    """What is read of a recorded rollout."""

    reward: float | None
    """None: it could not be graded."""
    reason: str


def run_facts(config: Config, run_dir: Path, wall_s: dict[str, float]) -> RunFacts:
    """Facts of a run; wall_s: seconds by phase; run_dir: present path of its folder."""
    names = ("summary.json", "config.toml", "metrics.jsonl", "rollouts", "checkpoints", "logs")
    paths = [run_dir / name for name in names]
    stages = [*resolve_stages(config), *Configurations(run_dir).stages]
    exports = [run_dir / "hf" / name for name in (FINAL, COLD_START)]
    return RunFacts(
        wall_s=wall_s,
        hf_export=next((str(path) for path in exports if path.exists()), None),
        max_staleness=max(stage.queue.max_staleness for stage in stages),
        strict_staleness=config.queue.strict_staleness,
        eval_temperature=config.eval.temperature,
        sampled_accuracy=sampled_accuracy(run_dir / "rollouts"),
        dataset_remark=config.sft.remark if config.sft.steps else "",
        run_dir=str(run_dir),
        files=tuple(path.name + "/" * path.is_dir() for path in paths if path.exists()),
    )


def kept_config_name(step: int) -> str:
    """File of the configuration before the first resume after a step."""
    return KEPT_CONFIGS.replace("*", f"{step:06d}")


_Part = tuple[int, int | None, Path | None]
"""(steps before it, its last step or None, configuration) of a part; None: it was not kept."""


def configured_parts(run_dir: Path) -> list[_Part]:
    """The parts of a run, in order. The launcher keeps the configuration before the first resume of
    a step."""
    parts: list[_Part] = [(0, None, run_dir / _CONFIG)]
    written: set[Path] = set()
    for row in iter_jsonl(run_dir / "metrics.jsonl", holding=RESUMED):
        if CONTINUED in row:
            continue
        step = row["step"]
        kept = run_dir / kept_config_name(step)
        # The steps after a resume are trained again, whatever configured them before.
        parts = [(begin, end, file) for begin, end, file in parts if begin < step]
        begin, end, file = parts[-1]
        if end is None:
            file = None if kept in written else kept
        parts[-1] = (begin, step if end is None else min(step, end), file)
        parts.append((step, None, run_dir / _CONFIG))
        written.add(kept)
    return parts


class Configurations:
    """The configurations of a run's parts, which may differ between resumes."""

    def __init__(self, run_dir: Path) -> None:
        self._parts: list[tuple[int | None, list[Config]]] = []
        """Last step of each part and its stages; none: its configuration is not known."""
        for _, end, file in configured_parts(run_dir):
            stages: list[Config] = []
            if file is not None and file.exists():
                # A part may have been run by another release.
                with contextlib.suppress(ConfigError):
                    stages = resolve_stages(load_config(file))
            self._parts.append((end, stages))

    @property
    def stages(self) -> list[Config]:
        """The stages of all parts whose configuration is known."""
        return [stage for _, stages in self._parts for stage in stages]

    def at(self, step: int, stage: int = 0) -> Config | None:
        """The configuration of a stage before batch `step`, from 0; None: it is not known."""
        stages = next(stages for end, stages in self._parts if end is None or step < end)
        return stages[min(stage, len(stages) - 1)] if stages else None


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The content of summary.json. Raises InputError for a damaged one."""
    path = run_dir / "summary.json"
    fix = "move it away: a report then summarizes the metrics, and a sweep takes the run again"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}; {fix}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} is no summary of a run: it holds {found!r:.40}; {fix}")
    return found


def steps_at_end(run_dir: Path) -> int:
    """The step after which a run with a summary has ended. Raises InputError for a damaged one."""
    # The summary counts the steps of this folder.
    steps: int = read_summary(run_dir).get("steps", 0)
    return steps + step_before(iter_jsonl(run_dir / "metrics.jsonl"))


def sampled_accuracy(rollouts: Path) -> tuple[float | None, float | None]:
    """Share of correct rollouts, trained or dropped, in the first and the last fifth of steps."""
    steps = sorted(rollouts.glob("step_*.jsonl"))
    count = min(SAMPLED_STEPS, max(1, len(steps) // 5))
    return _share_correct(steps[:count]), _share_correct(steps[-count:])


def _share_correct(steps: Sequence[Path]) -> float | None:
    """steps: files of trained rollouts, each with a file of dropped ones."""
    decoder = msgspec.json.Decoder(_Verdict)
    graded = correct = 0
    for step in steps:
        for path in (step, step.with_name(step.name.replace("step", "dropped"))):
            for rollout in decode_lines(path, decoder, expected="a recorded rollout"):
                graded += rollout.reward is not None
                correct += rollout.reason == "correct"
    return correct / graded if graded else None
