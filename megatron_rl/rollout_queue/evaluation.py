"""Evaluation sets with their sampling, and the results that an interrupted run left.

Used by the rollout queue, and by the launcher before a run.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.evaluation import AUTO_PROMPTS, CLEAR_ERRORS
from megatron_rl.config.staging import longest_stage
from megatron_rl.config.tree import Config, EvalConfig
from megatron_rl.data.prompts import PromptSets
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
from megatron_rl.protocol.types import Prompt, Sampling
from megatron_rl.protocol.whole_file import write_whole

FINAL_LABEL = "after"
_FEW_PROMPTS = 30
"""With fewer prompts the standard error of an accuracy may exceed 0.09."""


@dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate on, and their sampling."""

    name: str
    """Empty for the held-out prompts."""
    prompts: list[Prompt]
    samples: int
    """Completions per prompt."""
    sampling: Sampling
    """Without the seed, which differs by prompt."""
    draws_by: str = ""
    """As in Group, without the label and the prompt."""

    @property
    def completions(self) -> int:
        return len(self.prompts) * self.samples

    @property
    def described(self) -> str:
        count = len(self.prompts)
        noun = "prompt" if count == 1 else "prompts"
        return f"{count} {noun} of the set {self.name}" if self.name else f"{count} held-out {noun}"

    def label(self, label: str) -> str:
        """Name of an evaluation on this set, in metrics and files."""
        return f"{label}.{self.name}" if self.name else label


def evaluation_sets(config: Config, prompts: PromptSets) -> list[EvaluationSet]:
    """All evaluation sets, the held-out prompts first. Raises InputError."""
    own = config.eval
    default = Sampling(
        _default_limit(config),
        own.temperature,
        own.top_p,
        own.top_k,
        own.min_p,
        tuple(config.sampling.stop),
    )
    sets = []
    draws_by = f"{config.run.seed}/evaluation" if config.generator.deterministic else ""
    if held_out := select_held_out(prompts.held_out, own):
        sets.append(EvaluationSet("", held_out, own.samples, default, draws_by))
    for one in own.sets:
        given = one.model_dump(include={"temperature", "top_p", "top_k", "min_p", "max_new_tokens"})
        changed = {name: value for name, value in given.items() if value is not None}
        sampling = msgspec.structs.replace(default, **changed)
        if not prompts.eval_sets[one.name]:
            raise InputError(
                f"no prompt of the evaluation set {one.name!r} can be rendered: raise "
                "generator.context_tokens, or lower its max_new_tokens"
            )
        chosen = prompts.eval_sets[one.name]
        samples = one.samples or own.samples
        sets.append(EvaluationSet(one.name, chosen, samples, sampling, draws_by))
    return sets


def describe_evaluation(sets: Sequence[EvaluationSet]) -> list[str]:
    """Lines that describe the sets, with a warning for each set that is too small."""
    if not sets:
        return []
    parts = [
        f"{one.described} ({one.samples} completion{'s' if one.samples > 1 else ''} each, "
        f"temperature {one.sampling.temperature:g})"
        for one in sets
    ]
    lines = [f"evaluated on: {', '.join(parts)}"]
    for one in sets:
        if len(one.prompts) < _FEW_PROMPTS:
            error = 0.5 / len(one.prompts) ** 0.5
            gain = CLEAR_ERRORS * 2**0.5 * error
            lines.append(
                f"warning: too few, {one.described}: the standard error of the accuracy is up "
                f"to {error:.2f}, so only a gain of {gain:.2f} would be {CLEAR_ERRORS} combined "
                "standard errors. Give more prompts, raise prompts.held_out_share, or name a "
                "larger set in [[eval.sets]]"
            )
    return lines


def _default_limit(config: Config) -> int:
    """Token limit of a completion, the same in all stages of a run for comparable results."""
    return config.eval.max_new_tokens or longest_stage(config).sampling.max_new_tokens


def completion_limits(config: Config, prompts: PromptSets) -> dict[str, int]:
    """By prompt id: token limit of a completion of each prompt that may be evaluated on."""
    default = _default_limit(config)
    training = longest_stage(config).sampling.max_new_tokens
    # A spare prompt may be trained on too.
    limits = {p.id: max(default, training * p.is_spare) for p in prompts.held_out}
    for one in config.eval.sets:
        own = one.max_new_tokens or default
        limits |= {prompt.id: own for prompt in prompts.eval_sets[one.name]}
    return limits


def select_held_out(held_out: list[Prompt], config: EvalConfig) -> list[Prompt]:
    """The held-out prompts to evaluate on; InputError when there are too few."""
    is_auto = config.prompts == "auto"
    # A run with [[eval.sets]] needs no held-out prompts.
    wanted = (0 if config.sets else 1) if is_auto else config.prompts
    if len(held_out) < wanted:
        raise InputError(
            f"eval.prompts={config.prompts}, but the prompt sources have only {len(held_out)} "
            'held-out prompts that can be used: add lines with "split": "held_out", raise '
            "prompts.held_out_share (jsonl) or prompts.held_out_size (reasoning_gym), or lower "
            "eval.prompts; 0 skips evaluation"
        )
    return held_out[: AUTO_PROMPTS if is_auto else wanted]


def label_at(version: int, *, is_final: bool, every_steps: int) -> list[str]:
    """Labels of the evaluations that are due at a synced version."""
    labels = ["before"] if version == 0 else []
    if is_final:
        labels.append(FINAL_LABEL)
    elif version > 0 and every_steps and version % every_steps == 0:
        labels.append(f"step_{version}")
    return labels


def read_ended(run_dir: Path, version: int) -> set[tuple[str, int]]:
    """(label, version) of the evaluations with results, up to a version.

    Raises InputError for a damaged metrics file.
    """
    rows = stream_rows(run_dir / "metrics.jsonl", holding='"eval/n"')
    return {(row["label"], row["step"]) for row in rows if row["step"] <= version}


def read_evaluated(run_dir: Path, label: str, what: EvaluationSet) -> dict[str, ProblemSamples]:
    """By id: problems of the set whose completions are all graded.

    Raises InputError for a file that is damaged, except at its end.
    """
    return {problem.prompt_id: problem for problem in of_records(_whole(run_dir, label, what))}


def recorded_problems(run_dir: Path, label: str) -> dict[str, RolloutRecord]:
    """A completion of each prompt with recorded completions, by the prompt's id.

    label: of an evaluation on one set. Raises InputError for a file that is damaged, except at its
    end.
    """
    path = _path(run_dir, label)
    records = read_records(path) if path.exists() else iter(())
    return {record.prompt_id: record for record in records}


def keep_evaluated(run_dir: Path, label: str, what: EvaluationSet) -> dict[str, ProblemSamples]:
    """As `read_evaluated`, and remove all other lines from the file.

    So a problem that lost a completion is generated again as a whole.
    """
    path = _path(run_dir, label)
    if not path.exists():
        return {}
    kept = _whole(run_dir, label, what)
    write_whole(path, msgspec.json.Encoder().encode_lines(kept))
    _cut_to_words(path.with_suffix(WORDS))
    return {problem.prompt_id: problem for problem in of_records(kept)}


def _path(run_dir: Path, label: str) -> Path:
    return run_dir / FOLDER / f"eval_{label}{LINES}"


def _whole(run_dir: Path, label: str, what: EvaluationSet) -> list[RolloutRecord]:
    """Records of the problems whose completions are all recorded."""
    path = _path(run_dir, label)
    records = list(read_records(path)) if path.exists() else []
    counts = Counter(record.prompt_id for record in records)
    prompts = {prompt.id: prompt for prompt in what.prompts}
    return [
        record
        for record in records
        if counts[record.prompt_id] == what.samples and is_of(record, prompts)
    ]


def is_of(record: RolloutRecord, prompts: dict[str, Prompt]) -> bool:
    """Whether a record belongs to an unchanged prompt of the set."""
    prompt = prompts.get(record.prompt_id)
    return prompt is not None and (prompt.question, prompt.answers) == (
        record.problem,
        [record.answer, *record.other_answers],
    )


def _cut_to_words(path: Path) -> None:
    """Cut off a torn word that a crash left, so that later words are aligned."""
    if path.exists() and (rest := path.stat().st_size % WORD_BYTES):
        with path.open("ab") as file:
            file.truncate(path.stat().st_size - rest)


def first_free_number(run_dir: Path) -> int:
    """A number above all group numbers in recorded evaluations."""
    if not (run_dir / FOLDER).is_dir():
        return 0
    files = [file for file in rollout_files(run_dir) if file.label]
    numbers = (record.group for file in files for record in read_records(file.path))
    return 1 + max(numbers, default=-1)
