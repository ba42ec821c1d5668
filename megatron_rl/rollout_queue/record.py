"""Writes what was trained on and evaluated: rollouts/*.jsonl, one JSON object a rollout.

Used by the rollout queue.
"""

from pathlib import Path

import msgspec

from megatron_rl.rollout_queue.groups import Group


class RolloutRecord(msgspec.Struct, frozen=True):
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


class Recorder:
    """Writes into the `rollouts` folder of a run."""

    def __init__(self, run_dir: Path) -> None:
        self._dir = run_dir / "rollouts"
        self._dir.mkdir(parents=True, exist_ok=True)

    def write_step(self, step: int, groups: list[Group]) -> None:
        """Write the groups that the batch of `step` consists of."""
        self._write(f"step_{step:06d}.jsonl", groups)

    def write_evaluation(self, label: str, groups: list[Group]) -> None:
        """Write the groups of an evaluation."""
        self._write(f"eval_{label}.jsonl", groups)

    def _write(self, name: str, groups: list[Group]) -> None:
        records = [record for group in groups for record in _records(group)]
        (self._dir / name).write_bytes(msgspec.json.Encoder().encode_lines(records))


def _records(group: Group) -> list[RolloutRecord]:
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
            prompt_tail=scored.rollout.prompt_tail,
        )
        for scored in group.ordered
    ]
