"""Figures of a step or an evaluation, worked out from its records alone. Pure.

Used by the audit. It shares no code with the rollout queue, which writes the same figures to
metrics.jsonl from its messages; `metrics_table.py` says what each figure means.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from megatron_rl.observe.audit_findings import is_number
from megatron_rl.observe.missing_records import TRAINED
from megatron_rl.protocol.metrics import COMPLETIONS_DROPPED, GROUPS_DROPPED, Row
from megatron_rl.protocol.rollout import given_ranges
from megatron_rl.protocol.rollout_files import RolloutRecord
from megatron_rl.rollout_queue.drop_reasons import GROUP_REASONS, ZERO_VARIANCE

CACHED_SHARE = "environment/cached_share"
_OF_TASKS = ("rollout/reward", "rollout/correct", "reason/", "environment/")
_FROM_RECORDS = ("rollout/", "reward/", "reason/", "environment/", "task/", COMPLETIONS_DROPPED)
"""Records have all figures with these prefixes, so another one in a row has no source."""
Records = Sequence[RolloutRecord]


def step_figures(step: int, trained: Records, dropped: Records) -> dict[str, float]:
    """The figures of a row, by name. step: policy version before it. trained: at least one."""
    graded = [record for record in dropped if _ended_with_its_group(record)]
    scored = [*trained, *graded]
    staleness = [step - min(record.versions, default=step) for record in trained]
    alone = Counter(one.dropped for one in dropped if not _ended_with_its_group(one))
    zero_variance = {record.group for record in graded if record.dropped == ZERO_VARIANCE}
    figures: dict[str, float] = {
        TRAINED: len(trained),
        "queue/groups_trained": len({record.group for record in trained}),
        "queue/rollouts_spanning_versions": sum(len(set(one.versions)) > 1 for one in trained),
        "queue/staleness_versions_max": max(staleness),
        "queue/staleness_versions_mean": fmean(staleness),
        # Groups that failed before their first score are counted, but not recorded.
        f"{GROUPS_DROPPED}{ZERO_VARIANCE}": len(zero_variance),
        **{f"{COMPLETIONS_DROPPED}{reason}": count for reason, count in alone.items()},
        **_figures_of_rollouts(scored),
    }
    by_task: dict[str, list[RolloutRecord]] = {}
    for record in scored:
        by_task.setdefault(record.task, []).append(record)
    for task, records in by_task.items() if len(by_task) > 1 else ():
        for name, value in _figures_of_rollouts(records).items():
            if name.startswith(_OF_TASKS):
                figures[f"task/{task}/{name}"] = value
    return figures


def are_from_records(name: str, records: Records) -> bool:
    """Whether all that a row says under a name must come from its records."""
    if name.endswith(CACHED_SHARE):
        # Earlier releases did not record the turns of a conversation.
        return any(record.conversation for record in records)
    return name.startswith(_FROM_RECORDS)


def lost_lines(row: Row, trained: Records, dropped: Records) -> tuple[str, int, int] | None:
    """("trained" or "dropped", found, counted) rollouts of a step that lacks lines; None if whole.

    A row that counts other rollouts, while its groups are whole, contradicts them: no line is lost.
    """
    counted = row.get(TRAINED)
    reasons = [row[name] for name in row if name.startswith("reason/")]
    if not is_number(counted) or not all(map(is_number, reasons)):
        return None
    graded = [record for record in dropped if _ended_with_its_group(record)]
    in_all = int(sum(reasons))
    if in_all and len(trained) + len(graded) == in_all:
        return None
    if len(trained) < counted:
        return "trained", len(trained), int(counted)
    zero_variance = {record.group for record in graded if record.dropped == ZERO_VARIANCE}
    sizes = Counter(record.group for record in [*trained, *graded]).values()
    told = row.get(f"{GROUPS_DROPPED}{ZERO_VARIANCE}")
    lacks_some = is_number(told) and len(zero_variance) < told
    if len(graded) < in_all - counted and (lacks_some or min(sizes) < max(sizes)):
        return "dropped", len(graded), int(in_all - counted)
    return None


def evaluation_figures(by_prompt: Sequence[Records]) -> dict[str, float]:
    """The figures of an evaluation; by_prompt: the graded completions of each prompt.

    Without its standard error, for which earlier releases had another formula.
    """
    every = [record for records in by_prompt for record in records]
    return {
        "eval/n": len(by_prompt),
        "eval/accuracy": fmean(
            fmean(one.reason == "correct" for one in records) for records in by_prompt
        ),
        "eval/format": fmean(map(_is_well_formed, every)),
        "eval/length_tokens": fmean(record.sampled_tokens for record in every),
        "eval/reward": fmean(record.reward or 0.0 for record in every),
    }


def _ended_with_its_group(record: RolloutRecord) -> bool:
    """Whether a dropped rollout has a score and was dropped with its group, not alone."""
    return record.reward is not None and record.dropped in GROUP_REASONS


def _is_well_formed(record: RolloutRecord) -> bool:
    return record.is_outcome or record.parts.get("format", 0.0) > 0


def _figures_of_rollouts(scored: Records) -> dict[str, float]:
    count = len(scored)
    parts: Counter[str] = Counter()
    for record in scored:
        for name, value in record.parts.items():
            # Of a part that is 0 in all rollouts, too.
            parts[name] = parts[name] + value  # type: ignore[assignment]
    reasons = Counter(record.reason for record in scored)
    return {
        "rollout/reward": sum(record.reward or 0.0 for record in scored) / count,
        "rollout/correct": reasons["correct"] / count,
        "rollout/format": sum(map(_is_well_formed, scored)) / count,
        "rollout/length_tokens": sum(record.sampled_tokens for record in scored) / count,
        "rollout/truncated": sum(one.finish_reason == "length" for one in scored) / count,
        **{f"reward/{name}": total / count for name, total in parts.items()},
        **{f"reason/{name}": times for name, times in reasons.items() if times},
        **_figures_of_conversations([r for r in scored if r.is_outcome or r.to_grade is not None]),
    }


def _figures_of_conversations(talks: Records) -> dict[str, float]:
    if not talks:
        return {}
    figures = {
        "environment/turns": fmean(1 + len(given_ranges(record.spans)) for record in talks),
        "environment/given_tokens": fmean(one.tokens - one.sampled_tokens for one in talks),
        "environment/wait_s": fmean(record.environment_s or 0.0 for record in talks),
    }
    later = [turn for record in talks for turn in record.conversation if turn.follows >= 0]
    if known := sum(turn.before for turn in later):
        figures[CACHED_SHARE] = sum(turn.cached for turn in later) / known
    return figures
