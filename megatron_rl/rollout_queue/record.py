"""Writes the rollouts of a run: rollouts/*.jsonl, one JSON object a rollout.

| file                     | holds                                            | written        |
|--------------------------|--------------------------------------------------|----------------|
| step_NNNNNN.jsonl        | groups that the batch of that step consists of   | with the batch |
| dropped_NNNNNN.jsonl     | groups dropped since the batch before, and       | as they go     |
|                          | completions that cannot be graded; none: no file |                |
| eval_LABEL.jsonl         | groups of an evaluation                          | at its end     |
| dropped_eval_LABEL.jsonl | its completions that cannot be graded            | as they go     |

Used by the rollout queue.
"""

from pathlib import Path

import msgspec

from megatron_rl.protocol.types import Rollout, Score
from megatron_rl.rollout_queue.failures import ScoreFailure
from megatron_rl.rollout_queue.groups import Group


class RolloutRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a rollouts file."""

    prompt_id: str
    group: int
    index: int
    task: str
    problem: str
    """The question."""
    language: str
    text: str
    answer: str
    reward: float | None
    """None: it could not be graded."""
    parts: dict[str, float]
    reason: str
    """Of the score; why there is none."""
    tokens: int
    """Completion tokens."""
    versions: list[int]
    """Policy versions of the tokens, in order."""
    finish_reason: str
    seed: int
    """The group's, by which tests were drawn."""
    prompt_tail: str
    """The end of the rendered prompt, which may open <think>."""
    dropped: str = ""
    """Why its group was not trained on, "flat" for equal rewards; or why it alone was dropped.
    Left out of other records."""
    detail: str = ""
    """What verifiers said last of a completion that they could not grade."""


class Recorder:
    """Writes into the `rollouts` folder of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir / "rollouts"
        self._dir.mkdir(parents=True, exist_ok=True)
        self._next_step = 0
        self.dropped_file: Path | None = None
        """Rollouts dropped since the last batch."""
        self._evaluations: set[str] = set()
        """Those of which completions were dropped."""

    def resume_at(self, step: int) -> None:
        """The next batch is that of `step`; call before any write."""
        self._next_step = step

    def write_step(self, step: int, groups: list[Group]) -> None:
        """Write the groups that the batch of `step` consists of."""
        self._write(f"step_{step:06d}.jsonl", groups)
        if self.dropped_file is None:
            # What an interrupted run, which took this step before, may have dropped.
            self._dropped_path(step).unlink(missing_ok=True)
        self._next_step, self.dropped_file = step + 1, None

    def write_dropped(self, group: Group, reason: str) -> None:
        """Write the scored rollouts, if any, of a group that is dropped before the next batch."""
        if not group.scored:
            return
        self._append_dropped(_records(group, reason))

    def _append_dropped(self, records: list[RolloutRecord]) -> None:
        path = self._dropped_path(self._next_step)
        _append(path, records, is_first=self.dropped_file is None)
        self.dropped_file = path

    def _dropped_path(self, step: int) -> Path:
        return self._dir / f"dropped_{step:06d}.jsonl"

    def write_ungraded(self, failure: ScoreFailure) -> Path:
        """Write a completion that cannot be graded; returns the file."""
        record = _record(failure.group, failure.rollout, None, failure.reason)
        record = msgspec.structs.replace(record, reason=failure.reason, detail=failure.detail)
        label = failure.group.evaluation
        if not label:
            self._append_dropped([record])
            return self._dropped_path(self._next_step)
        path = self._ungraded_path(label)
        _append(path, [record], is_first=label not in self._evaluations)
        self._evaluations.add(label)
        return path

    def _ungraded_path(self, label: str) -> Path:
        return self._dir / f"dropped_eval_{label}.jsonl"

    def write_evaluation(self, label: str, groups: list[Group]) -> None:
        """Write the groups of an evaluation."""
        if label not in self._evaluations:
            self._ungraded_path(label).unlink(missing_ok=True)
        self._write(f"eval_{label}.jsonl", groups)

    def _write(self, name: str, groups: list[Group]) -> None:
        records = [record for group in groups for record in _records(group)]
        (self._dir / name).write_bytes(msgspec.json.Encoder().encode_lines(records))


def _append(path: Path, records: list[RolloutRecord], *, is_first: bool) -> None:
    with path.open("wb" if is_first else "ab") as file:
        file.write(msgspec.json.Encoder().encode_lines(records))


def _records(group: Group, dropped: str = "") -> list[RolloutRecord]:
    return [_record(group, scored.rollout, scored.score, dropped) for scored in group.ordered]


def _record(group: Group, rollout: Rollout, score: Score | None, dropped: str) -> RolloutRecord:
    return RolloutRecord(
        prompt_id=group.prompt.id,
        group=group.number,
        index=rollout.index,
        task=group.prompt.task,
        problem=group.prompt.question,
        language=group.prompt.language,
        text=rollout.text,
        answer=group.prompt.answer,
        reward=score.reward if score else None,
        parts=score.parts if score else {},
        reason=score.reason if score else "",
        tokens=len(rollout.token_ids),
        versions=[span.version for span in rollout.spans],
        finish_reason=rollout.finish_reason,
        seed=group.sampling.seed,
        dropped=dropped,
        prompt_tail=rollout.prompt_tail,
    )
