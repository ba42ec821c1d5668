"""Writes the rollouts of a run: rollouts/*.jsonl, one JSON object a rollout, and arrays beside.

| file                     | holds                                            | written        |
|--------------------------|--------------------------------------------------|----------------|
| step_NNNNNN.jsonl        | groups that the batch of that step consists of   | with the batch |
| dropped_NNNNNN.jsonl     | groups dropped since the batch before, those not | as they go     |
|                          | needed at the end, and completions that cannot   |                |
|                          | be graded; none: no file                         |                |
| eval_LABEL.jsonl         | groups of an evaluation                          | as they go     |
| dropped_eval_LABEL.jsonl | what it lost: groups that failed, and            | as they go     |
|                          | completions that cannot be graded; none: no file |                |
| the same with .int32     | prompt ids, token ids and logprobs of the lines; | before the     |
|                          | none without queue.record_tokens; old ones go by | lines          |
|                          | queue.keep_tokens_of_steps (`record_files.py`)       |                |
| trained_NNNNNN.RANK.npz  | what the trainer found of the tokens of a step   | by the trainer |
| superseded_N/            | what was written of steps that a resumed run     | when it        |
|                          | takes again                                      | resumes        |

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
from megatron_rl.rollout_queue.record_files import Entry, Job, RecordFiles, RecordThread


class Recorder:
    """Writes into the `rollouts` folder of a run. Times are the coordinator's: monotonic."""

    def __init__(
        self,
        run_dir: Path,
        *,
        keeps_tokens: bool = True,
        keeps_evaluated: bool = False,
        to_unix_s: Callable[[float], float] = float,
        writer: RecordFiles | RecordThread | None = None,
    ) -> None:
        """keeps_tokens: write arrays too. to_unix_s: unix seconds of the coordinator's time.

        writer: into the folder of the run's rollouts; None: write at once, with keeps_tokens.
        keeps_evaluated: resume the evaluations in the folder, rather than repeat them.
        """
        self.keeps_evaluated = keeps_evaluated
        self.run_dir = run_dir
        self._dir = run_dir / FOLDER
        self._dir.mkdir(parents=True, exist_ok=True)
        self._writer = writer or RecordFiles(self._dir, keeps_tokens=keeps_tokens)
        self._to_unix_s = to_unix_s
        self._next_step = 0
        self.dropped_file: Path | None = None
        """Rollouts dropped since the last batch."""
        self._evaluations: set[str] = set()
        """Evaluations of which rollouts were dropped."""
        self._begun: set[str] = set()
        """Evaluations whose files are of this part of the run."""

    def resume_at(self, step: int) -> None:
        """The next batch is that of `step`; call before any write.

        Files of this step and later ones, lines and arrays, move to superseded_N: the run repeats
        these steps, and each group is in one file alone.
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
        # Lines first: a kill in between leaves words alone, which no reader looks for.
        for path in [*stale, *(path.with_suffix(WORDS) for path in stale), *trained]:
            if path.exists():
                path.rename(aside / path.name)

    def write_step(self, step: int, groups: list[Group], now: float) -> None:
        """Write the groups that the batch of `step`, formed now, consists of."""
        stem = f"step_{step:06d}"
        self._writer.write(Job(stem, [], is_first=True, formed_step=step))
        for group in groups:
            self._write(stem, self._entries(group, trained_at=now))
        self._next_step, self.dropped_file = step + 1, None

    def write_dropped(self, group: Group, reason: str) -> None:
        """Write the scored rollouts, if any, of a group that is dropped."""
        if group.scored:
            self._write_dropped(group.evaluation, self._entries(group, dropped=reason))

    def _write_dropped(self, label: str, entries: list[Entry]) -> Path:
        """label: of their evaluation; empty: they were dropped before the next batch."""
        if label:
            is_first = label not in self._evaluations
            self._evaluations.add(label)
            return self._write(_dropped_stem(label), entries, is_first=is_first)
        is_first = self.dropped_file is None
        stem = f"dropped_{self._next_step:06d}"
        self.dropped_file = self._write(stem, entries, is_first=is_first)
        return self.dropped_file

    def write_left_out(self, group: Group, scored: ScoredRollout, reason: str) -> None:
        """Write a scored completion that its group is trained on without."""
        self._write_dropped("", [self._entry(group, scored, dropped=reason)])

    def write_ungraded(self, failure: ScoreFailure) -> Path:
        """Write a completion that cannot be graded; returns the file of lines."""
        record = _record(
            failure.group, failure.rollout, self._times(failure.group, failure.rollout)
        )
        record = msgspec.structs.replace(
            record, reason=failure.reason, dropped=failure.reason, detail=failure.detail
        )
        entry = Entry(record, failure.rollout)
        return self._write_dropped(failure.group.evaluation, [entry])

    def begin_evaluation(self, label: str, *, keeps_lines: bool = False) -> None:
        """Remove the records that an earlier part of the run wrote of an evaluation.

        keeps_lines: only the records of what it lost.
        """
        if label not in self._evaluations:
            # At once: no job of this part of the run writes the file.
            self._remove(_dropped_stem(label))
        self._begun.add(label)
        self._write(f"eval_{label}", [], is_first=not keeps_lines)

    def write_evaluation(self, label: str, groups: list[Group]) -> None:
        """Write groups of an evaluation, after those that are written."""
        if label not in self._begun:
            self.begin_evaluation(label)
        for group in groups:
            self._write(f"eval_{label}", self._entries(group))

    @property
    def put(self) -> int:
        """Jobs so far; all is on the disk once `written` is as large."""
        return self._writer.put

    @property
    def written(self) -> int:
        """Jobs that are on the disk: the first so many."""
        return self._writer.written

    @property
    def is_full(self) -> bool:
        """Whether the disk is so far behind that nothing more should be generated."""
        return self._writer.is_full

    def check(self) -> None:
        """Raise InputError when something could not be written, DeadlineExceeded when too slow."""
        self._writer.check()

    def _remove(self, stem: str) -> None:
        """Remove the two files of a name, lines first: no reader looks for words alone."""
        for suffix in (LINES, WORDS):
            (self._dir / (stem + suffix)).unlink(missing_ok=True)

    def _write(self, stem: str, entries: list[Entry], *, is_first: bool = False) -> Path:
        """Append to the two files of a name, or replace them; returns the file of lines."""
        self._writer.write(Job(stem, entries, is_first))
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
        """A copy: the group may still change."""
        rollout, score = scored.rollout, scored.score
        scored_at = group.scored_at.get(rollout.index)
        times = self._times(group, rollout, scored_at=scored_at, trained_at=trained_at)
        record = msgspec.structs.replace(
            _record(group, rollout, times),
            reward=score.reward,
            parts=score.parts,
            reason=score.reason,
            dropped=dropped,
            detail=score.detail,
        )
        return Entry(record, rollout)

    def _times(
        self,
        group: Group,
        rollout: Rollout,
        *,
        scored_at: float | None = None,
        trained_at: float | None = None,
    ) -> RolloutTimes:
        origin = group.origins[rollout.index]
        return RolloutTimes(
            leased=self._unix_s(origin.leased_at),
            done=self._unix_s(origin.done_at),
            scored=None if scored_at is None else self._unix_s(scored_at),
            trained=None if trained_at is None else self._unix_s(trained_at),
            first_token_s=round(rollout.first_token_s, 4),
        )

    def _unix_s(self, at: float) -> float:
        return round(self._to_unix_s(at), 3)


def _dropped_stem(label: str) -> str:
    return f"dropped_eval_{label}"


def _record(group: Group, rollout: Rollout, times: RolloutTimes) -> RolloutRecord:
    """What is known of a rollout before it is graded."""
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
        generator=group.origins[rollout.index].generator,
        prompt_tokens=len(rollout.prompt_ids),
        spans=[RecordedSpan(span.version, span.start, span.end) for span in rollout.spans],
        times=times,
        stage=group.stage,
    )
