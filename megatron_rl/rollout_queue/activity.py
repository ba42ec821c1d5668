"""Metrics rows about rollouts and groups between steps.

Used by the rollout queue. Steps may be minutes apart; these rows show progress between steps, and
name the likely fault when no group has different rewards. The caller has the clock.

A row (`activity/*` in docs/metrics.md) counts what happened since the previous row. It has
`activity/diagnosis` when the diagnosis changes ("": the fault is over), and the progress of the
running evaluation (`eval/completions_done`, ...).
"""

import collections
import logging
from pathlib import Path

from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.types import Rollout, ScoredRollout
from megatron_rl.rollout_queue.diagnosis import REFUSALS, Evidence, Finding, Setting, diagnose
from megatron_rl.rollout_queue.groups import Group

log = logging.getLogger(__name__)

PREFIX = "activity/"
ACTIVITY_S = "activity/seconds"
"""Every activity row has it."""
DIAGNOSIS = "activity/diagnosis"
ROW_S = 5.0
"""Minimum time between two rows."""
_LATE_S = 15.0
"""This long after the first score, fewer format failures are enough for a diagnosis."""
_REPEAT_FACTOR = 4
"""A diagnosis is repeated when the number of scores has grown by this factor."""
_EXAMPLE_CHARS = 80
_LOST = ("attempts_failed/", "groups_dropped/", "completions_dropped/")

Values = dict[str, float | int | str]


class Activity:
    """Counts events, and gives a row when one is due. Logs diagnoses."""

    def __init__(self, config: Config, prompts: PromptSets) -> None:
        self._setting = Setting.of(config, prompts.all)
        self._counts: collections.Counter[str] = collections.Counter()
        self._evidence = Evidence()
        self.trouble: Finding | None = None
        """A fault of grading itself, if any; it goes before other diagnoses."""
        self._ungraded = 0
        self._finding: Finding | None = None
        self._found_at = 0
        self._busy_since: float | None = None
        self._last_row: float | None = None
        self._first_score: float | None = None

    def add_rollout(self, rollout: Rollout) -> None:
        self._counts["rollouts_generated"] += 1
        self._counts["tokens"] += rollout.sampled_tokens

    def add_score(self, group: Group, scored: ScoredRollout) -> None:
        """A completion of the group was scored and added to the group."""
        reason = scored.score.reason
        self._counts["rollouts_scored"] += 1
        self._evidence.reasons[reason] += 1
        if reason in REFUSALS:
            self._counts[f"format_failures/{reason}"] += 1
            if begin := scored.rollout.text.strip()[:_EXAMPLE_CHARS]:
                self._evidence.examples.setdefault(reason, begin)
        else:
            self._counts[f"reason/{reason}"] += 1
        if group.evaluation:
            self._counts["rollouts_for_evaluation"] += 1
            return
        self._evidence.training[reason] += 1
        self._evidence.add_prompt(group.prompt.id)
        if scored.score.is_outcome:
            self._evidence.add_outcome(scored.score.reward)
        self._evidence.truncated += scored.rollout.finish_reason == "length"

    def add_complete(self, group: Group) -> None:
        """Every completion of a training group is scored or lost."""
        self._counts["groups_complete"] += 1
        self._evidence.groups += 1
        self._evidence.zero_variance_groups += group.has_zero_variance

    def add_ungraded(self, reason: str) -> None:
        self.add_left_out(reason)
        self._ungraded += 1

    def add_left_out(self, reason: str) -> None:
        """A scored completion cannot be trained on."""
        self._counts[f"completions_dropped/{reason}"] += 1

    def add_failed_attempt(self, fault: str) -> None:
        """A generator could not return a completion; it is leased again, up to the limits."""
        self._counts[f"attempts_failed/{fault}"] += 1

    def add_dropped(self, reason: str) -> None:
        self._counts[f"groups_dropped/{reason}"] += 1

    def take_row(
        self, now: float, in_flight: int, *, records: Path | None, is_last: bool = False
    ) -> Values | None:
        """Counts since the last row; None when no row is due or nothing happened.

        records: file with the rollouts of dropped groups. Call it about once a second.
        """
        if in_flight and self._busy_since is None:
            self._busy_since = now
        if self._first_score is None and self._counts["rollouts_scored"]:
            self._first_score = now
        if self._first_score is None and not any(name.startswith(_LOST) for name in self._counts):
            return None
        if self._last_row is not None and now - self._last_row < ROW_S and not is_last:
            return None
        diagnosis = self._new_diagnosis(now, records)
        if not self._counts and diagnosis is None:
            return None
        since = self._busy_since if self._last_row is None else self._last_row
        row: Values = {"seconds": round(now - since, 3) if since is not None else 0.0}
        row |= {name: count for name, count in self._counts.items() if count}
        row["completions_in_flight"] = in_flight
        if diagnosis is not None:
            row["diagnosis"] = diagnosis
        if diagnosis:
            log.warning("%s", diagnosis)
        self._counts.clear()
        self._last_row = now
        return {PREFIX + name: value for name, value in row.items()}

    def _new_diagnosis(self, now: float, records: Path | None) -> str | None:
        """The diagnosis, if its kind changed or scores grew by _REPEAT_FACTOR; else None."""
        found = self.trouble
        if found is None and self._first_score is not None:
            found = diagnose(
                self._evidence,
                self._setting,
                is_late=now - self._first_score >= _LATE_S,
                records=records,
            )
        scores = self._evidence.reasons.total() + self._ungraded
        known = self._finding.kind if self._finding else ""
        is_grown = found is not None and scores >= _REPEAT_FACTOR * self._found_at
        if (found.kind if found else "") == known and not is_grown:
            return None
        self._finding, self._found_at = found, scores
        return found.text if found else ""
