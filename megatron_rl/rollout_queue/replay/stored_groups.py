"""Recorded groups as an index: token ids and logprobs are read when a batch is dealt.

Used by the rollout queue.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.questions import normalized
from megatron_rl.protocol.rollout_files import (
    WORDS,
    RolloutFile,
    RolloutRecord,
    TokensThinned,
    missing_words,
    read_arrays,
    read_records,
    rollout_files,
    without_texts,
)
from megatron_rl.protocol.types import (
    Prompt,
    Rollout,
    Sampling,
    Score,
    ScoredRollout,
    VersionSpan,
)
from megatron_rl.rollout_queue.groups import ZERO_VARIANCE, Group, are_equal
from megatron_rl.rollout_queue.train_sequence import NO_VERSION

TOO_LONG = "too_long"
"""Why a group is left out of which a sequence has no place in the context."""
HELD_OUT = "held_out"
"""Why a group is left out whose question is an evaluation's."""
THINNED = "tokens_thinned"
"""Why a group is left out whose token ids were removed: queue.keep_tokens_of_steps."""
UNSCORED = "unscored"
"""Why a group is left out of which no completion has a reward."""


class StoredGroup(NamedTuple):
    """Where the rollouts of a group lie."""

    lines: Path
    """The file of lines; the words are beside."""
    question: str
    """Normalized."""
    members: tuple[RolloutRecord, ...]
    """Without their texts."""

    @property
    def rewards(self) -> list[float]:
        """Rewards by index."""
        return [record.reward or 0.0 for record in self.members]

    def load(self, *, keeps_versions: bool) -> Group:
        """The group with its arrays. Raises InputError where the file of words was cut.

        keeps_versions: of this run's own groups; another run's mean nothing here.
        """
        first = self.members[0]
        spans = [span for record in self.members for span in record.spans]
        opened = min(span.version for span in spans) if keeps_versions else NO_VERSION
        group = Group(
            first.group,
            Prompt(first.prompt_id, first.task, [], ""),
            Sampling(max(record.tokens for record in self.members), 1.0, seed=first.seed),
            len(self.members),
            opened,
        )
        for index, (record, reward) in enumerate(zip(self.members, self.rewards, strict=True)):
            rollout = self._rollout(record, index, keeps_versions=keeps_versions)
            score = Score(reward, record.parts, record.reason)
            group.add(ScoredRollout(rollout, score), now=0.0)
        return group

    def _rollout(self, record: RolloutRecord, index: int, *, keeps_versions: bool) -> Rollout:
        prompt_ids, token_ids, logprobs = read_arrays(record, self.lines)
        spans = [VersionSpan(NO_VERSION, 0, record.tokens)]
        if keeps_versions:
            spans = [VersionSpan(*span) for span in record.spans]
        return Rollout(
            lease_id=0,
            index=index,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            spans=spans,
            finish_reason=record.finish_reason,
            text="",
        )


@dataclasses.dataclass
class StoredGroups:
    """What can be drawn of some run folders, and what cannot."""

    groups: list[StoredGroup] = dataclasses.field(default_factory=list)
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    """Groups by the reason."""

    def add_run(
        self,
        run_dir: Path,
        *,
        context_tokens: int,
        drops_zero_variance: bool,
        held_out: frozenset[str],
    ) -> None:
        """Index the training groups of a run, zero-variance ones too unless drops_zero_variance.

        held_out: normalized questions that are not trained on. Raises InputError where there are no
        rollouts, or their words are missing.
        """
        files = [file for file in rollout_files(run_dir) if file.step is not None]
        if not files:
            raise InputError(f"{run_dir} holds no rollouts of training steps to replay")
        for file in files:
            try:
                groups = list(read_groups(file))
            except TokensThinned:
                groups = []
                self.left_out[THINNED] += len({r.group for r in read_records(file.path)})
            for group in groups:
                reason = _reason_to_leave_out(
                    group, context_tokens, drops_zero_variance=drops_zero_variance
                )
                if group.question in held_out:
                    reason = HELD_OUT
                if reason:
                    self.left_out[reason] += 1
                else:
                    self.groups.append(group)


def read_groups(file: RolloutFile) -> Iterator[StoredGroup]:
    """The groups of one file; a completion that had no part in its group is left out.

    Raises InputError where words are missing.
    """
    members: defaultdict[int, list[RolloutRecord]] = defaultdict(list)
    questions: dict[int, str] = {}
    has_words = file.path.with_suffix(WORDS).exists()
    for line, record in enumerate(read_records(file.path), 1):
        if record.words is None:
            raise InputError(
                f"{file.path}:{line} has no token ids: it was recorded with "
                "queue.record_tokens = false, and cannot be replayed"
            )
        if not has_words:
            raise missing_words(file.path, f"{file.path}:{line}")
        members[record.group].append(without_texts(record))
        questions[record.group] = normalized(record.problem)
    for number, records in members.items():
        # Its group went on without what was dropped alone.
        kept = [record for record in records if record.dropped in ("", ZERO_VARIANCE)]
        yield StoredGroup(file.path, questions[number], tuple(kept or records))


def _reason_to_leave_out(
    group: StoredGroup, context_tokens: int, *, drops_zero_variance: bool
) -> str:
    dropped = group.members[0].dropped
    if dropped not in ("", ZERO_VARIANCE):
        return dropped
    rewards = [record.reward for record in group.members if record.reward is not None]
    if len(rewards) < len(group.members):
        return UNSCORED
    if any(record.prompt_tokens + record.tokens > context_tokens for record in group.members):
        return TOO_LONG
    return ZERO_VARIANCE if drops_zero_variance and are_equal(rewards) else ""
