"""Writes the scored rollouts of a run: rollouts/*.jsonl, one JSON object a rollout.

| file                 | groups                                        | written        |
|----------------------|-----------------------------------------------|----------------|
| step_NNNNNN.jsonl    | the batch of that step consists of            | with the batch |
| dropped_NNNNNN.jsonl | dropped since the batch before; none: no file | as they go     |
| eval_LABEL.jsonl     | of an evaluation                              | at its end     |

Used by the rollout queue.
"""

from pathlib import Path

import msgspec

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
    reward: float
    parts: dict[str, float]
    reason: str
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
    """Why its group was not trained on, "flat" for equal rewards; left out of other records."""


class Recorder:
    """Writes into the `rollouts` folder of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir / "rollouts"
        self._dir.mkdir(parents=True, exist_ok=True)
        self._next_step = 0
        self.dropped_file: Path | None = None
        """Rollouts dropped since the last batch."""

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
        lines = msgspec.json.Encoder().encode_lines(_records(group, reason))
        path = self._dropped_path(self._next_step)
        with path.open("wb" if self.dropped_file is None else "ab") as file:
            file.write(lines)
        self.dropped_file = path

    def _dropped_path(self, step: int) -> Path:
        return self._dir / f"dropped_{step:06d}.jsonl"

    def write_evaluation(self, label: str, groups: list[Group]) -> None:
        """Write the groups of an evaluation."""
        self._write(f"eval_{label}.jsonl", groups)

    def _write(self, name: str, groups: list[Group]) -> None:
        records = [record for group in groups for record in _records(group)]
        (self._dir / name).write_bytes(msgspec.json.Encoder().encode_lines(records))


def _records(group: Group, dropped: str = "") -> list[RolloutRecord]:
    return [
        RolloutRecord(
            prompt_id=group.prompt.id,
            group=group.number,
            index=scored.rollout.index,
            task=group.prompt.task,
            problem=group.prompt.question,
            language=group.prompt.language,
            text=scored.rollout.text,
            answer=group.prompt.answer,
            reward=scored.score.reward,
            parts=scored.score.parts,
            reason=scored.score.reason,
            tokens=len(scored.rollout.token_ids),
            versions=[span.version for span in scored.rollout.spans],
            finish_reason=scored.rollout.finish_reason,
            seed=group.sampling.seed,
            dropped=dropped,
            prompt_tail=scored.rollout.prompt_tail,
        )
        for scored in group.ordered
    ]
