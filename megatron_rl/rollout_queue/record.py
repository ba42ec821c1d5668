"""Writes the rollouts of a run: rollouts/*.jsonl, one JSON object per rollout, and array files.

| file                     | content                                           | written          |
|--------------------------|---------------------------------------------------|------------------|
| step_NNNNNN.jsonl        | groups of the batch of that step                  | with the batch   |
| dropped_NNNNNN.jsonl     | groups dropped since the previous batch or not    | when dropped     |
|                          | needed at the end; completions without a grade    |                  |
| eval_LABEL.jsonl         | groups of an evaluation                           | when complete    |
| dropped_eval_LABEL.jsonl | failed groups of an evaluation; completions       | when dropped     |
|                          | without a grade                                   |                  |
| the same with .int32     | prompt ids, token ids and logprobs of the lines   | before the lines |
|                          | (queue.record_tokens, queue.keep_tokens_of_steps) |                  |
| trained_NNNNNN.RANK.npz  | values of trained tokens                          | by the trainer   |
| superseded_N/            | earlier files of steps that a resumed run repeats | at resume        |

Used by the rollout queue. `protocol/rollout_files.py` has the format, and reads it back. Not
recorded: expert choices (train.router_replay), which are many times as large as everything else;
completions whose group was dropped before they had a score.
"""

import itertools
from collections.abc import Callable
from pathlib import Path

import msgspec

from megatron_rl.protocol.rollout_files import (
    FOLDER,
    LINES,
    WORDS,
    RecordedSpan,
    RolloutRecord,
    RolloutTimes,
    rollout_files,
)
from megatron_rl.protocol.trained_tokens import trained_files
from megatron_rl.protocol.types import Rollout, ScoredRollout
from megatron_rl.rollout_queue.drop_reasons import ScoreFailure
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.record_files import Entry, Job, RecordFiles, Writer


class Recorder:
    """Writes into the `rollouts` folder of a run. Times are the coordinator's: monotonic."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keeps_tokens: bool = True,
        keeps_evaluated: bool = False,
        to_unix_s: Callable[[float], float] = float,
        writer: Writer | None = None,
    ) -> None:
        """keeps_tokens: write arrays too. to_unix_s: converts the coordinator's time.

        keeps_evaluated: resume the evaluations in the folder instead of repeating them.
        writer: writes the files; by default at once, with keeps_tokens.
        """
        self.keeps_evaluated = keeps_evaluated
        self.run_dir = run_dir
        self._dir = run_dir / FOLDER
        self._dir.mkdir(parents=True, exist_ok=True)
        self.writer = writer or RecordFiles(self._dir, keeps_tokens=keeps_tokens)
        self._to_unix_s = to_unix_s
        self._next_step = 0
        self.dropped_file: Path | None = None
        """File of the rollouts dropped since the last batch, if any."""
        self._evaluations: set[str] = set()
        """Labels of evaluations with dropped rollouts."""
        self._begun: set[str] = set()
        """Labels of evaluations that began since the run was started or resumed."""

    def resume_at(self, step: int) -> None:
        """Resume at `step`; call before the first write.

        Moves the files of this step and later steps to superseded_N: the run repeats these steps,
        and each group may be in only one file.
        """
        self._next_step = step
        stale = [
            file.path
            for file in rollout_files(self.run_dir)
            if file.step is not None and file.step >= step
        ]
        trained = [path for at, path in trained_files(self.run_dir) if at >= step]
        if not stale and not trained:
            return
        folders = (self._dir / f"superseded_{number}" for number in itertools.count(1))
        aside = next(folder for folder in folders if not folder.exists())
        aside.mkdir()
        # Lines first: a kill in between leaves only words, which no reader looks for.
        for path in [*stale, *(path.with_suffix(WORDS) for path in stale), *trained]:
            if path.exists():
                path.rename(aside / path.name)

    def write_step(self, step: int, groups: list[Group], now: float) -> None:
        """Write the groups of the batch of `step`, which is formed now."""
        stem = f"step_{step:06d}"
        self.writer.write(Job(stem, [], is_first=True, formed_step=step))
        for group in groups:
            self._write(stem, self._entries(group, trained_at=now))
        self._next_step, self.dropped_file = step + 1, None

    def write_dropped(self, group: Group, reason: str) -> None:
        if group.scored:
            self._write_dropped(group.evaluation, self._entries(group, dropped=reason))

    def _write_dropped(self, label: str, entries: list[Entry]) -> Path:
        """label: of the evaluation; empty for training."""
        if label:
            is_first = label not in self._evaluations
            self._evaluations.add(label)
            return self._write(_dropped_stem(label), entries, is_first=is_first)
        is_first = self.dropped_file is None
        stem = f"dropped_{self._next_step:06d}"
        self.dropped_file = self._write(stem, entries, is_first=is_first)
        return self.dropped_file

    def write_left_out(self, group: Group, scored: ScoredRollout, reason: str) -> None:
        """Write a scored completion that is left out of its trained group."""
        self._write_dropped("", [self._entry(group, scored, dropped=reason)])

    def write_ungraded(self, failure: ScoreFailure) -> Path:
        """Write a completion that cannot be graded; returns the file of lines."""
        group, rollout, reason = failure.group, failure.rollout, failure.reason
        record = msgspec.structs.replace(
            self._record(group, rollout), reason=reason, dropped=reason, detail=failure.detail
        )
        return self._write_dropped(group.evaluation, [Entry(record, rollout)])

    def begin_evaluation(self, label: str, *, keeps_lines: bool = False) -> None:
        """Remove the records of an evaluation that an interrupted run left.

        keeps_lines: remove only the records of dropped rollouts.
        """
        if label not in self._evaluations:
            self.writer.write(Job(_dropped_stem(label), [], is_first=True, is_removal=True))
        self._begun.add(label)
        self._write(f"eval_{label}", [], is_first=not keeps_lines)

    def write_evaluation(self, label: str, groups: list[Group]) -> None:
        if label not in self._begun:
            self.begin_evaluation(label)
        for group in groups:
            self._write(f"eval_{label}", self._entries(group))

    def _write(self, stem: str, entries: list[Entry], *, is_first: bool = False) -> Path:
        """Append to both files of a name, or replace them; returns the file of lines."""
        self.writer.write(Job(stem, entries, is_first))
        return self._dir / (stem + LINES)

    def _entries(
        self, group: Group, *, dropped: str = "", trained_at: float | None = None
    ) -> list[Entry]:
        return [
            self._entry(group, scored, dropped=dropped, trained_at=trained_at)
            for scored in group.ordered
        ]

    def _entry(
        self,
        group: Group,
        scored: ScoredRollout,
        *,
        dropped: str = "",
        trained_at: float | None = None,
    ) -> Entry:
        """A copy, since the group may still change."""
        rollout, score = scored.rollout, scored.score
        record = msgspec.structs.replace(
            self._record(group, rollout, trained_at),
            reward=score.reward,
            parts=score.parts,
            reason=score.reason,
            dropped=dropped,
            detail=score.detail,
            is_outcome=score.is_outcome,
        )
        return Entry(record, rollout)

    def _record(
        self, group: Group, rollout: Rollout, trained_at: float | None = None
    ) -> RolloutRecord:
        """The record without the score."""
        origin, scored_at = group.origins[rollout.index], group.scored_at.get(rollout.index)
        times = RolloutTimes(
            leased=self._unix_s(origin.leased_at),
            done=self._unix_s(origin.done_at),
            scored=None if scored_at is None else self._unix_s(scored_at),
            trained=None if trained_at is None else self._unix_s(trained_at),
            first_token_s=round(rollout.first_token_s, 4),
        )
        return RolloutRecord(
            prompt_id=group.prompt.id,
            group=group.number,
            index=rollout.index,
            task=group.prompt.task,
            problem=group.prompt.question,
            language=group.prompt.language,
            text=rollout.text,
            answer=group.prompt.answer,
            reward=None,
            parts={},
            reason="",
            tokens=len(rollout.token_ids),
            versions=[span.version for span in rollout.spans],
            finish_reason=rollout.finish_reason,
            seed=group.sampling.seed,
            prompt_tail=rollout.prompt_tail,
            answer_class=group.classes.get(rollout.index) if group.evaluation else None,
            generator=origin.generator,
            prompt_tokens=len(rollout.prompt_ids),
            spans=[RecordedSpan(span.version, span.start, span.end) for span in rollout.spans],
            times=times,
            stage=group.stage,
            other_answers=group.prompt.other_answers,
            row_starts=rollout.row_starts,
            turn_returns=rollout.turn_returns,
            to_grade=rollout.to_grade,
            conversation=rollout.conversation,
            environment_s=round(rollout.environment_s, 3) if rollout.environment_s else None,
        )

    def _unix_s(self, at: float) -> float:
        return round(self._to_unix_s(at), 3)


def _dropped_stem(label: str) -> str:
    return f"dropped_eval_{label}"
