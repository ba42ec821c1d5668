"""What an interrupted run has left of its evaluations: problems that need not be generated again.

Used by the rollout queue, before it goes on with an evaluation or a run.
"""

from collections import Counter
from pathlib import Path

import msgspec

from megatron_rl.evaluation.samples import ProblemSamples, of_records
from megatron_rl.protocol.metrics import stream_rows
from megatron_rl.protocol.rollout_files import (
    FOLDER,
    LINES,
    WORD_BYTES,
    WORDS,
    RolloutRecord,
    read_records,
    rollout_files,
)
from megatron_rl.protocol.types import Prompt
from megatron_rl.rollout_queue.evaluation import EvaluationSet


def read_ended(run_dir: Path, version: int) -> set[tuple[str, int]]:
    """(label, version) of the evaluations, up to that version, whose results are written.

    Raises InputError for a damaged metrics file.
    """
    rows = stream_rows(run_dir / "metrics.jsonl", holding='"eval/n"')
    return {(row["label"], row["step"]) for row in rows if row["step"] <= version}


def read_evaluated(run_dir: Path, label: str, what: EvaluationSet) -> dict[str, ProblemSamples]:
    """Problems of the set with all their completions graded, by id.

    Raises InputError for a file that is damaged elsewhere than at its end.
    """
    return {problem.prompt_id: problem for problem in of_records(_whole(run_dir, label, what))}


def keep_evaluated(run_dir: Path, label: str, what: EvaluationSet) -> dict[str, ProblemSamples]:
    """The same; all other lines are taken out of the file.

    So a problem that lost a completion, or was cut short with the file, is made again as a whole.
    """
    path = _path(run_dir, label)
    if not path.exists():
        return {}
    kept = _whole(run_dir, label, what)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.Encoder().encode_lines(kept))
    partial.replace(path)
    _cut_to_words(path.with_suffix(WORDS))
    return {problem.prompt_id: problem for problem in of_records(kept)}


def _path(run_dir: Path, label: str) -> Path:
    return run_dir / FOLDER / f"eval_{label}{LINES}"


def _whole(run_dir: Path, label: str, what: EvaluationSet) -> list[RolloutRecord]:
    """Records of the problems that have all their completions."""
    path = _path(run_dir, label)
    records = list(read_records(path)) if path.exists() else []
    counts = Counter(record.prompt_id for record in records)
    prompts = {prompt.id: prompt for prompt in what.prompts}
    return [
        record
        for record in records
        if counts[record.prompt_id] == what.samples and _is_of(record, prompts)
    ]


def _is_of(record: RolloutRecord, prompts: dict[str, Prompt]) -> bool:
    """Whether a record answers a prompt as it is now."""
    prompt = prompts.get(record.prompt_id)
    return prompt is not None and (prompt.question, prompt.answer) == (
        record.problem,
        record.answer,
    )


def _cut_to_words(path: Path) -> None:
    """What is appended begins at a whole word, whatever a crash has left."""
    if path.exists() and (rest := path.stat().st_size % WORD_BYTES):
        with path.open("ab") as file:
            file.truncate(path.stat().st_size - rest)


def first_free_number(run_dir: Path) -> int:
    """A number above those of all groups that evaluations have recorded."""
    if not (run_dir / FOLDER).is_dir():
        return 0
    files = [file for file in rollout_files(run_dir) if file.label]
    numbers = (record.group for file in files for record in read_records(file.path))
    return 1 + max(numbers, default=-1)
