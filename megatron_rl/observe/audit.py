"""Checks a run's records for consistency: metrics, rollouts, evaluations, models, summary.

Used by `megatron-rl audit`. Read-only; checks the present records of a run that has not ended.
`audit_figures.py` works out figures from records, and `audit_summary.py` checks summary.json.
"""

import itertools
from bisect import bisect
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from megatron_rl.cli.command_line.printing import Report
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_run
from megatron_rl.config.tree import Config
from megatron_rl.observe.audit_figures import (
    are_from_records,
    evaluation_figures,
    lost_lines,
    step_figures,
)
from megatron_rl.observe.audit_findings import ROUNDING, WHOLE, Findings, agree, is_number
from megatron_rl.observe.audit_summary import check_summary
from megatron_rl.observe.facts import Configurations
from megatron_rl.observe.missing_records import TRAINED, missing_steps, packed_text, step_file
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, PARTIAL, read_complete_mark
from megatron_rl.protocol.metrics import Row, numbered_rows, step_before
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

_NUMBERS = "metrics are numbers"
_MATCH = "metrics of a step match its rollouts"
_MILLISECONDS = 1e-3
"""Recorded seconds have three decimals."""
_TEXTS = ("source", "label", "engine", "engine_version", "megatron_core_version")
"""Names in rows of steps and evaluations that have texts."""
_PARTLY_COMPARED = ("queue/", "eval/")
"""Areas of which records yield some figures."""


@dataclass
class _Audit:
    run_dir: Path
    config: Config
    findings: Findings = field(default_factory=Findings)
    rows: list[Row] = field(default_factory=list)
    """Without activity."""
    steps: dict[int, Row] = field(default_factory=dict)
    """Rows of trained steps by number, from 1."""
    group_files: dict[int, Path] = field(default_factory=dict)
    """By group: the file of its trained rollouts."""
    sampled: dict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """As in `check_summary`."""
    incomplete: set[int] = field(default_factory=set)
    """Steps that lack recorded rollouts."""
    not_compared: set[str] = field(default_factory=set)
    """Names in rows of steps that no record has."""

    def __post_init__(self) -> None:
        self.configurations = Configurations(self.run_dir)
        self.has_ended = (self.run_dir / "summary.json").exists()

    def config_at(self, step: int, stage: int = 0) -> Config | None:
        """As `Configurations.at`; the audit tells where it is not known."""
        config = self.configurations.at(step, stage)
        if config is None:
            self.skip(f"limits of steps with an unknown configuration, such as step {step + 1}")
        return config

    def skip(self, text: str) -> None:
        if text not in self.findings.skipped:
            self.findings.skipped.append(text)


def audit_records(run_dir: Path, report: Report) -> Findings:
    """Check all records of a run; report(done, all) counts files of rollouts.

    Raises InputError without a run.
    """
    audit = _Audit(run_dir, load_run(run_dir))
    findings = audit.findings
    are_numbers = _read_rows(audit)
    is_whole = _check_steps(audit)
    _check_files(audit)
    if (run_dir / FOLDER).is_dir():
        _check_rollouts(audit, report)
        _check_evaluations(audit)
    elif not audit.steps:
        findings.skipped.append(f"{FOLDER}/ is not there: nothing was generated")
    _tell_not_compared(audit)
    if not audit.has_ended:
        text = "summary.json is not there: the run continues or stopped, or is an evaluation"
        findings.skipped.append(text)
    elif not are_numbers or not is_whole:
        what = "lacks steps" if are_numbers else "has values that are no numbers"
        findings.skipped.append(f"summary.json: metrics.jsonl {what}")
    else:
        sampled = None if audit.incomplete else audit.sampled
        check_summary(run_dir, audit.rows, audit.configurations.stages, sampled, findings)
    _check_models(run_dir, findings)
    return findings


def _read_rows(audit: _Audit) -> bool:
    """Read and check metrics.jsonl; returns whether all its values are numbers."""
    path, is_sound = audit.run_dir / "metrics.jsonl", True
    for number, row in numbered_rows(path):
        bad = {name: value for name, value in row.items() if _is_bad(name, value, row)}
        if not is_number(row.get("step")):
            bad["step"] = row.get("step")
        text = ", ".join(f"{name} is {value!r:.40}" for name, value in bad.items())
        is_sound &= audit.findings.check(_NUMBERS, not bad, f"{path}:{number}: {text}")
        if "step" in bad or ACTIVITY_S in row:
            continue
        audit.rows.append(row)
        if TRAINED in row:
            audit.steps[row["step"]] = row
    return is_sound


def _is_bad(name: str, value: object, row: Row) -> bool:
    """Whether a value should be a number and is none."""
    if isinstance(value, str):
        return name not in _TEXTS and (TRAINED in row or "eval/n" in row)
    return not is_number(value)


def _check_steps(audit: _Audit) -> bool:
    """The trainer took its steps in order, and all of them if the run has ended.

    Returns whether metrics.jsonl has a row of each step so far.
    """
    path = audit.run_dir / "metrics.jsonl"
    taken = [row["step"] for row in audit.rows if TRAINED in row]
    before = step_before(audit.rows)
    last = max(taken, default=before)
    lacking = sorted(set(range(before + 1, last + 1)) - set(taken))
    audit.findings.check(
        "steps are taken once, in order, from the first one",
        taken == sorted(set(taken)) and all(step > before for step in taken),
        f"{path} has the steps {taken[:20]}...",
    )
    if lacking:
        of = last - before
        text = f"{path} has no row of {len(lacking)} of {of} steps, the first is {lacking[0]}"
        audit.findings.check(WHOLE, False, f"{text}: lines are missing")
    if audit.has_ended:
        audit.findings.check(
            "a run that ended took all steps", last == audit.config.train.steps,
            f"{last} of train.steps={audit.config.train.steps}",
        )  # fmt: skip
    return not lacking


def _check_files(audit: _Audit) -> None:
    """Each step has the file of its trained rollouts."""
    packed = packed_text(audit.run_dir)
    for step in missing_steps(audit.steps.values(), audit.run_dir):
        audit.incomplete.add(step)
        if not audit.has_ended and step == max(audit.steps):
            audit.skip(f"step {step}: the queue may not have written its rollouts yet")
            continue
        text = f"step {step}: {step_file(audit.run_dir, step)} is missing"
        audit.findings.check(WHOLE, False, f"{text}; {packed}" if packed else text)


def _check_rollouts(audit: _Audit, report: Report) -> None:
    files = [file for file in rollout_files(audit.run_dir) if file.step is not None]
    by_step: dict[int, dict[bool, list[RolloutRecord]]] = defaultdict(dict)
    for number, file in enumerate(files, 1):
        records = _read(file, audit)
        _check_groups(file, records, audit)
        step = file.step or 0
        by_step[step][file.is_dropped] = records
        if not file.is_dropped:
            # The file of a step's dropped rollouts comes first, so both are read now.
            of_step = by_step.pop(step)
            _check_step(step, of_step[False], of_step.get(True, []), audit)
        report(number, len(files))


def _read(file: RolloutFile, audit: _Audit) -> list[RolloutRecord]:
    """The records of a file; also checks their arrays, if they are recorded."""
    findings = audit.findings
    rule = "token ids and logprobs match their lines"
    try:
        if (config := audit.config_at(file.step or 0)) and config.queue.record_tokens:
            records: list[RolloutRecord] = list(read_file(file))
        else:
            records = list(read_records(file.path))
    except TokensThinned:
        audit.skip("token ids of old steps: tokens thinned (queue.keep_tokens_of_steps)")
        return list(read_records(file.path))
    except InputError as error:
        findings.check(rule, False, str(error))
        audit.incomplete.add((file.step or 0) + 1)
        return []
    findings.check(rule, True, "")
    return records


def _check_groups(file: RolloutFile, records: list[RolloutRecord], audit: _Audit) -> None:
    findings = audit.findings
    groups: dict[int, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        groups[record.group].append(record)
        place = f"{file.path}: group {record.group}, index {record.index}"
        findings.check(
            "versions of a rollout only rise", all(map(_rise, spans_by_row(record))),
            f"{place}: {[span.version for span in record.spans]}",
        )  # fmt: skip
        if record.reward is not None:
            findings.check(
                "a reward is the sum of its parts",
                abs(record.reward - sum(record.parts.values())) < ROUNDING,
                f"{place}: {record.reward} and {record.parts}",
            )
    for group, members in groups.items():
        place = f"{file.path}: group {group}"
        # One that could not be graded is replaced under its index, and both may be dropped.
        indexes = [record.index for record in members if record.reward is not None]
        is_one = len({record.prompt_id for record in members}) == 1
        findings.check("a group has one prompt", is_one, place)
        config = audit.config_at(file.step or 0, members[0].stage)
        is_once = len(set(indexes)) == len(indexes)
        has_room = config is None or len(indexes) <= config.train.group_size
        findings.check("a group has each rollout once", is_once and has_room, place)
        if not file.is_dropped:
            other = audit.group_files.setdefault(group, file.path)
            findings.check("no group is trained on twice", other == file.path, f"{place}, {other}")
            rewards = {record.reward for record in members}
            findings.check("every trained rollout was graded", None not in rewards, place)


def spans_by_row(record: RolloutRecord) -> list[list[RecordedSpan]]:
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
    step: int, trained: list[RolloutRecord], dropped: list[RolloutRecord], audit: _Audit
) -> None:
    """step: policy version before it."""
    for record in (*trained, *dropped):
        audit.sampled[step]["graded"] += record.reward is not None
        audit.sampled[step]["correct"] += record.reason == "correct"
    row = audit.steps.get(step + 1)
    if row is None or not is_number(row[TRAINED]) or (not trained and not row[TRAINED]):
        return
    path, findings = step_file(audit.run_dir, step + 1), audit.findings
    # A file that cannot be read breaks a rule already.
    is_unread = step + 1 in audit.incomplete
    if is_unread or not _are_all_there(row, trained, dropped, audit):
        audit.incomplete.add(step + 1)
        audit.skip(f"figures of steps that lack rollouts, such as step {step + 1}")
        return
    records = [*trained, *dropped]
    figures = step_figures(step, trained, dropped)
    names = figures.keys() | {name for name in row if are_from_records(name, records)}
    audit.not_compared |= row.keys() - names
    for name in sorted(names):
        written, value = row.get(name, 0.0), figures.get(name, 0.0)
        # The rule about numbers tells of others.
        if is_number(written):
            within = _MILLISECONDS if name.endswith("_s") else ROUNDING
            text = f"{name} is {written} in metrics.jsonl, {value} in {path.name}"
            findings.check(_MATCH, agree(written, value, within=within), f"step {step + 1}: {text}")
    stalest = figures["queue/staleness_versions_max"]
    config = audit.config_at(step, trained[0].stage)
    if config is not None and config.queue.strict_staleness:
        limit = config.queue.max_staleness
        findings.check(
            "no rollout is staler than queue.max_staleness", stalest <= limit,
            f"{path}: {stalest} versions, limit {limit}",
        )  # fmt: skip


def _are_all_there(
    row: Row, trained: list[RolloutRecord], dropped: list[RolloutRecord], audit: _Audit
) -> bool:
    lost = lost_lines(row, trained, dropped) if trained else ("trained", 0, int(row[TRAINED]))
    if lost is None:
        return audit.findings.check(WHOLE, True, "")
    if not audit.has_ended and row["step"] == max(audit.steps):
        audit.skip(f"step {row['step']}: the queue may not have written its rollouts yet")
        return False
    kind, found, counted = lost
    path = step_file(audit.run_dir, row["step"])
    if kind == "dropped":
        path = path.with_name(path.name.replace("step", "dropped"))
    text = f"step {row['step']}: {path} has {found} of {counted} {kind} rollouts: lines are missing"
    return audit.findings.check(WHOLE, False, text)


def _tell_not_compared(audit: _Audit) -> None:
    """Name the figures of steps and evaluations that records do not yield."""
    names = sorted(audit.not_compared - {"time", "source", "step", *_TEXTS})
    told = [
        name if name.startswith(_PARTLY_COMPARED) else f"{name.partition('/')[0]}/*"
        for name in names
    ]
    if told:
        audit.skip(f"figures that rollouts do not yield: {', '.join(dict.fromkeys(told))}")


def _check_evaluations(audit: _Audit) -> None:
    """Accuracies are means over prompts of the share of correct recorded samples."""
    graded: dict[str, dict[str, list[RolloutRecord]]] = {}
    samples: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in rollout_files(audit.run_dir):
        if file.step is None:
            of_prompt = graded.setdefault(file.label, defaultdict(list))
            for record in read_records(file.path):
                samples[file.label][record.prompt_id].add(record.index)
                if record.reward is not None and not file.is_dropped:
                    of_prompt[record.prompt_id].append(record)
    # Only the last evaluation of a label is recorded.
    last = {row["label"]: row for row in audit.rows if is_number(row.get("eval/accuracy"))}
    for label, row in last.items():
        found = graded.get(label, {})
        # Of a prompt without a verdict some samples may have come: eval/n does not count it.
        counts = [len(samples[label][prompt]) for prompt in found]
        short = sum(count < max(counts) for count in counts)
        lacks = not found or short > 0 or (is_number(row["eval/n"]) and len(found) < row["eval/n"])
        text = f"eval_{label}.jsonl has {len(found)} of {row['eval/n']} prompts"
        text += f", {short} of them with fewer completions" if short else ""
        if audit.findings.check(WHOLE, not lacks, f"{text}: lines or files are missing"):
            figures = evaluation_figures(list(found.values()))
            audit.not_compared |= row.keys() - figures.keys()
            _check_evaluation(label, row, figures, audit.findings)


def _check_evaluation(label: str, row: Row, figures: dict[str, float], findings: Findings) -> None:
    for name, value in figures.items():
        written = row.get(name, 0.0)
        if is_number(written):
            text = f"{name} is {written} in metrics.jsonl, {value} in eval_{label}.jsonl"
            findings.check(
                "accuracies match recorded completions", agree(written, value), f"{label}: {text}"
            )


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
