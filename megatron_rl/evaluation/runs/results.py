"""The folder of an evaluation's results: eval.json, made of the recorded completions alone.

| file                         | holds                                                        |
|------------------------------|--------------------------------------------------------------|
| `config.toml`                | the resolved configuration                                   |
| `rollouts/eval_LABEL*.jsonl` | every completion, a file a set                               |
| `eval.json`                  | settings and figures of each set, written at the end         |
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.evaluation.breakdown import set_report
from megatron_rl.evaluation.samples import ProblemSamples, of_records
from megatron_rl.protocol.rollout_files import FOLDER, LINES, read_records
from megatron_rl.protocol.whole_file import write_whole
from megatron_rl.rollout_queue.evaluation import EvaluationSet

RESULTS = "eval.json"
HELD_OUT = "held_out"
"""Name of the held-out prompts among the sets."""
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "stop", "max_new_tokens")
"""Sampling settings in eval.json."""
Report = dict[str, Any]


def make_report(
    config: Config, label: str, sets: Sequence[EvaluationSet], *, left_out: int = 0
) -> Report:
    """The content of eval.json. Raises InputError for a set without recorded completions.

    left_out: number of prompts without room for a completion.
    """
    reports = {one.name or HELD_OUT: _report_of(config.run.dir, label, one) for one in sets}
    return {
        "model": str(config.model.path),
        "label": label,
        "prompts_left_out": left_out,
        "sets": reports,
    }


def _report_of(run_dir: Path, label: str, one: EvaluationSet) -> Report:
    problems = read_problems(run_dir, label, one.name)
    wanted = {prompt.id for prompt in one.prompts}
    problems = [problem for problem in problems if problem.prompt_id in wanted]
    if not problems:
        raise InputError(f"{run_dir} holds no graded completion of {one.name or HELD_OUT}")
    sampling = json.loads(msgspec.json.encode(one.sampling))
    return {
        "prompts": len(one.prompts),
        **{name: sampling[name] for name in SETTINGS},
        # Problems without any, or with too few, graded completions.
        "missing_problems": len(one.prompts) - len(problems),
        "short_problems": sum(problem.n < one.samples for problem in problems),
        "dropped_completions": _dropped(run_dir, one.label(label)),
        **set_report(problems),
        "samples": one.samples,
    }


def _dropped(run_dir: Path, label: str) -> dict[str, int]:
    """Number of dropped completions by reason."""
    path = run_dir / FOLDER / f"dropped_eval_{label}{LINES}"
    records = read_records(path) if path.exists() else ()
    return dict(Counter(record.dropped for record in records))


def write_report(run_dir: Path, report: Report) -> None:
    """Write eval.json atomically."""
    write_whole(run_dir / RESULTS, json.dumps(report, indent=2) + "\n")


def read_report(run_dir: Path) -> Report:
    """The eval.json of a folder. Raises InputError when it is missing or invalid."""
    path = run_dir / RESULTS
    try:
        report: Report = json.loads(path.read_text())
    except OSError as error:
        raise InputError(
            f"{run_dir} holds no results of `megatron-rl eval`: {path}: {error.strerror}. To "
            "resume an interrupted evaluation, repeat its command"
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}: evaluate again") from error
    if not isinstance(report, dict) or not {"label", "sets"} <= report.keys():
        raise InputError(f"{path} was not written by `megatron-rl eval`: evaluate again")
    return report


def read_problems(run_dir: Path, label: str, name: str) -> list[ProblemSamples]:
    """Recorded problems of a set. Raises InputError when their file is missing."""
    whole = f"{label}.{name}" if name else label
    path = run_dir / FOLDER / f"eval_{whole}{LINES}"
    if not path.exists():
        raise InputError(f"{path} does not exist: the completions of the evaluation are gone")
    return of_records(read_records(path))
