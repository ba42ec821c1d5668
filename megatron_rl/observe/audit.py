"""Checks a run's records for consistency: metrics, rollouts, evaluations, models, summary.

Used by `megatron-rl audit`. Read-only; checks the present records of a run that has not ended.
"""

import itertools
from bisect import bisect
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import isclose, isfinite
from pathlib import Path

from megatron_rl.cli.command_line.printing import Report
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_run
from megatron_rl.config.staging import resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.observe.facts import read_summary
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, PARTIAL, read_complete_mark
from megatron_rl.protocol.metrics import Row, stream_rows
from megatron_rl.protocol.rollout_files import (
    FOLDER,
    RecordedSpan,
    RolloutFile,
    RolloutRecord,
    TokensThinned,
    read_file,
    read_records,
    rollout_files,
)
from megatron_rl.protocol.weight_files import INDEX, indexed_files
from megatron_rl.rollout_queue.activity import ACTIVITY_S

_ROUNDING = 1e-6
_ZERO_VARIANCE = "zero_variance"

SHOWN = 5
"""Most examples per rule; all faults are counted."""


@dataclass
class Rule:
    """One rule with its checks and faults."""

    looked_at: int = 0
    broken: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Findings:
    """All rules of an audit."""

    rules: dict[str, Rule] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """Records that could not be checked, and why."""

    def check(self, rule: str, holds: bool, place: str) -> bool:
        """Count one check of a rule; place: location and found value."""
        found = self.rules.setdefault(rule, Rule())
        found.looked_at += 1
        if not holds:
            found.broken += 1
            if len(found.examples) < SHOWN:
                found.examples.append(place)
        return holds

    @property
    def is_sound(self) -> bool:
        """Whether no rule was broken."""
        return not any(rule.broken for rule in self.rules.values())


def audit_records(run_dir: Path, report: Report) -> Findings:
    """Check all records of a run; report(done, all) counts files of rollouts.

    Raises InputError without a run.
    """
    config, findings = load_run(run_dir), Findings()
    rows = []
    for row in stream_rows(run_dir / "metrics.jsonl"):
        bad = [n for n, value in row.items() if isinstance(value, float) and not isfinite(value)]
        findings.check("metrics are numbers", not bad, f"step {row['step']}: {bad}")
        if ACTIVITY_S not in row:
            rows.append(row)
    steps = {row["step"]: row for row in rows if "queue/rollouts_trained" in row}
    _check_steps(rows, config, run_dir, findings)
    if (run_dir / FOLDER).is_dir():
        _check_rollouts(run_dir, config, steps, findings, report)
        _check_evaluations(run_dir, rows, findings)
    else:
        findings.skipped.append(f"{FOLDER}/ is not there: nothing was generated")
    _check_summary(run_dir, rows, steps, findings)
    _check_models(run_dir, findings)
    return findings


def _check_steps(rows: list[Row], config: Config, run_dir: Path, findings: Findings) -> None:
    """The trainer took its steps in order, and all of them if the run has ended."""
    taken = [row["step"] for row in rows if "queue/rollouts_trained" in row]
    findings.check(
        "steps are taken once, in order, from 1", taken == list(range(1, len(taken) + 1)),
        f"metrics.jsonl has the steps {taken[:20]}...",
    )  # fmt: skip
    if (run_dir / "summary.json").exists():
        findings.check(
            "a run that ended took all steps", len(taken) == config.train.steps,
            f"{len(taken)} of train.steps={config.train.steps}",
        )  # fmt: skip


def _check_rollouts(
    run_dir: Path, config: Config, steps: dict[int, Row], findings: Findings, report: Report
) -> None:
    group_files: dict[int, Path] = {}
    files = [file for file in rollout_files(run_dir) if file.step is not None]
    by_step: dict[int, dict[bool, list[RolloutRecord]]] = defaultdict(dict)
    for number, file in enumerate(files, 1):
        records = _read(file, config, findings)
        _check_groups(file, records, config, group_files, findings)
        by_step[file.step or 0][file.is_dropped] = records
        if not file.is_dropped:
            # The file of a step's dropped rollouts comes first, so both are read now.
            _check_step(file, by_step.pop(file.step or 0), steps, config, findings)
        report(number, len(files))


def _read(file: RolloutFile, config: Config, findings: Findings) -> list[RolloutRecord]:
    """The records of a file; also checks their arrays, if they are recorded."""
    rule = "token ids and logprobs match their lines"
    try:
        if config.queue.record_tokens:
            records: list[RolloutRecord] = list(read_file(file))
        else:
            records = list(read_records(file.path))
    except TokensThinned:
        note = "token ids of old steps: tokens thinned (queue.keep_tokens_of_steps)"
        if note not in findings.skipped:
            findings.skipped.append(note)
        return list(read_records(file.path))
    except InputError as error:
        findings.check(rule, False, str(error))
        return []
    findings.check(rule, True, "")
    return records


def _check_groups(
    file: RolloutFile,
    records: list[RolloutRecord],
    config: Config,
    group_files: dict[int, Path],
    findings: Findings,
) -> None:
    size = max(stage.train.group_size for stage in resolve_stages(config))
    groups: dict[int, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record)
        place = f"{file.path}: group {record.group}, index {record.index}"
        findings.check(
            "versions of a rollout only rise", all(map(_rise, _spans_by_row(record))),
            f"{place}: {[span.version for span in record.spans]}",
        )  # fmt: skip
        if record.reward is not None:
            findings.check(
                "a reward is the sum of its parts",
                abs(record.reward - sum(record.parts.values())) < _ROUNDING,
                f"{place}: {record.reward} and {record.parts}",
            )
    for group, members in groups.items():
        place = f"{file.path}: group {group}"
        indexes = [record.index for record in members]
        is_one = len({record.prompt_id for record in members}) == 1
        findings.check("a group has one prompt", is_one, place)
        findings.check(
            "a group has each rollout once", len(set(indexes)) == len(indexes) <= size, place
        )
        if not file.is_dropped:
            other = group_files.setdefault(group, file.path)
            findings.check("no group is trained on twice", other == file.path, f"{place}, {other}")
            rewards = {record.reward for record in members}
            findings.check("every trained rollout was graded", None not in rewards, place)


def _spans_by_row(record: RolloutRecord) -> list[list[RecordedSpan]]:
    """Spans of each chat of a conversation: chats that wait at the same time have no order."""
    rows: list[list[RecordedSpan]] = [[] for _ in range(len(record.row_starts) + 1)]
    for span in record.spans:
        rows[bisect(record.row_starts, record.prompt_tokens + span.start)].append(span)
    return rows


def _rise(spans: list[RecordedSpan]) -> bool:
    """Whether each span has a later version than the one before, or begins another turn with it."""
    return all(
        one.version < two.version or (one.version == two.version and one.end < two.start)
        for one, two in itertools.pairwise(spans)
    )


def _check_step(
    file: RolloutFile,
    of_step: dict[bool, list[RolloutRecord]],
    steps: dict[int, Row],
    config: Config,
    findings: Findings,
) -> None:
    """The trainer's metrics of a step agree with the queue's record of its batch."""
    trained, dropped = of_step[False], of_step.get(True, [])
    # A file is named by the version before its step, a row by the version after it.
    row = steps.get((file.step or 0) + 1)
    if row is None or not trained:
        return
    step = file.step or 0
    staleness = [step - min(record.versions) for record in trained]
    seen: dict[str, float] = {
        "queue/rollouts_trained": len(trained),
        "queue/groups_trained": len({record.group for record in trained}),
        "queue/staleness_versions_max": max(staleness),
        "queue/staleness_versions_mean": sum(staleness) / len(staleness),
    }
    if config.replay.share:
        # The records do not contain replayed rollouts of the batch.
        seen = {}
    if all(record.dropped == _ZERO_VARIANCE for record in dropped):
        sampled = [record for record in [*trained, *dropped] if record.reward is not None]
        seen["rollout/reward"] = sum(r.reward or 0.0 for r in sampled) / len(sampled)
        seen["rollout/length_tokens"] = sum(r.sampled_tokens for r in sampled) / len(sampled)
        seen["queue/groups_dropped_zero_variance"] = len({record.group for record in dropped})
    for name, value in seen.items():
        written = row.get(name, 0.0)
        findings.check(
            "metrics of a step match its rollouts",
            isclose(written, value, rel_tol=_ROUNDING, abs_tol=_ROUNDING),
            f"step {step + 1}: {name} is {written} in metrics.jsonl, {value} in {file.path.name}",
        )
    limit = max(stage.queue.max_staleness for stage in resolve_stages(config))
    if config.queue.strict_staleness:
        findings.check(
            "no rollout is staler than queue.max_staleness", max(staleness) <= limit,
            f"{file.path}: {max(staleness)} versions, limit {limit}",
        )  # fmt: skip


def _check_evaluations(run_dir: Path, rows: list[Row], findings: Findings) -> None:
    """Accuracies are means over prompts of the share of correct recorded samples."""
    rates: dict[str, dict[str, list[bool]]] = {}
    for file in rollout_files(run_dir):
        if file.step is None and not file.is_dropped:
            of_prompt: dict[str, list[bool]] = defaultdict(list)
            for record in read_records(file.path):
                if record.reward is not None:
                    of_prompt[record.prompt_id].append(record.reason == "correct")
            rates[file.label] = of_prompt
    # Only the last evaluation of a label is recorded.
    for label, row in {row["label"]: row for row in rows if "eval/accuracy" in row}.items():
        found = rates.get(label)
        if not found:
            findings.skipped.append(f"evaluation {label!r}: its completions are not recorded")
            continue
        mean = sum(sum(right) / len(right) for right in found.values()) / len(found)
        findings.check(
            "accuracies match recorded completions",
            isclose(row["eval/accuracy"], mean, abs_tol=_ROUNDING) and row["eval/n"] == len(found),
            f"{label}: {row['eval/accuracy']} of {row['eval/n']} prompts in metrics.jsonl, "
            f"{mean} of {len(found)} in rollouts/",
        )


def _check_summary(
    run_dir: Path, rows: list[Row], steps: dict[int, Row], findings: Findings
) -> None:
    path = run_dir / "summary.json"
    if not path.exists():
        findings.skipped.append(
            "summary.json is not there: the run continues or stopped, or is an evaluation"
        )
        return
    summary = read_summary(run_dir)
    evaluations = {row["label"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    wanted: dict[str, object] = {
        "accuracy_before": evaluations.get("before"),
        "accuracy_after": evaluations.get("after"),
        "sft_baseline_accuracy": evaluations.get("sft_baseline"),
        "steps": len(steps),
        "rollouts_trained": int(sum(row["queue/rollouts_trained"] for row in steps.values())),
    }
    for name, value in wanted.items():
        findings.check(
            "the summary matches the metrics", summary.get(name) == value,
            f"{name} is {summary.get(name)} in summary.json and {value} in metrics.jsonl",
        )  # fmt: skip


def _check_models(run_dir: Path, findings: Findings) -> None:
    """Exports are complete, and checkpoints have their listed files."""
    for folder in sorted((run_dir / "hf").glob("*")):
        needed = [folder / "config.json"]
        if (folder / INDEX).exists():
            needed += indexed_files(folder)
        missing = sorted(path.name for path in needed if not path.is_file())
        has_weights = any(folder.glob("*.safetensors"))
        findings.check(
            "exported models are whole", has_weights and not missing, f"{folder}: {missing}"
        )
    tally = Counter(
        read_complete_mark(folder) is not None
        for folder in sorted((run_dir / CHECKPOINTS).glob("step_*"))
        if not folder.name.endswith(PARTIAL)
    )
    if tally:
        findings.check(
            "checkpoints have their listed files", not tally[False],
            f"{tally[False]} of {tally.total()} in {run_dir / CHECKPOINTS}",
        )  # fmt: skip
