"""Solutions of code problems: read from files, and run on the inputs of tests.

Programs are run by `verification/code/outputs.py`, one process a solution, which is killed when it
exceeds its time.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import RewardConfig
from megatron_rl.curation.rows import read_jsonl
from megatron_rl.protocol.questions import normalized
from megatron_rl.protocol.rollout_files import RolloutRecord, read_records, rollout_files
from megatron_rl.protocol.types import Prompt
from verification.code.outputs import Job, Printed
from verification.code.setup import CodeLimits, longest_item_s, prepare
from verification.format import FORMAT_CHECKS
from verification.verdict import GradingError

OUTPUT_BYTES = 1 << 20
"""Output of a test from which it does not count: all of them are held in memory."""
START_S = 60.0
"""Time that a process takes beside its programs."""
_EXPECTED = '{"id": "...", "language": "python", "source": "..."}, or records of rollouts'


class Solution(NamedTuple):
    """A program that somebody wrote for a problem."""

    source: str
    tag: str
    """Its language, as the tag of a code fence."""


class _Line(msgspec.Struct, frozen=True):
    id: str | int
    source: str
    language: str = "python"


class Solutions(NamedTuple):
    """What was read."""

    by_id: dict[str, list[Solution]]
    without_program: int
    """Completions in which the format check found none."""
    id_of: dict[str, str] = {}
    """Normalized question of a record -> its id there: in sets of evaluations it is another."""

    def id_for(self, prompt: Prompt) -> str:
        """The id by which solutions of a problem are there: its own, else that of its question."""
        if prompt.id in self.by_id:
            return prompt.id
        return self.id_of.get(prompt.normalized_question, prompt.id)


def read_solutions(path: Path, reward: RewardConfig) -> Solutions:
    """Solutions by problem, from a folder with rollouts or a file. Raises InputError."""
    by_id: dict[str, list[Solution]] = {}
    id_of: dict[str, str] = {}
    without = 0
    for name, question, solution in _all(path, reward):
        if question:
            id_of.setdefault(normalized(question), name)
        if solution is None:
            without += 1
        else:
            by_id.setdefault(name, []).append(solution)
    return Solutions(by_id, without, id_of)


def _all(path: Path, reward: RewardConfig) -> Iterable[tuple[str, str, Solution | None]]:
    """(id, question if it is known, solution) of every line or record."""
    if path.is_dir():
        for file in rollout_files(path):
            yield from (_of_record(record, reward) for record in read_records(file.path))
        return
    for _, line in read_jsonl(path, dict[str, msgspec.Raw], expected=_EXPECTED):
        raw = msgspec.json.encode(line)
        try:
            if "text" in line:
                yield _of_record(msgspec.json.decode(raw, type=RolloutRecord), reward)
            else:
                found = msgspec.json.decode(raw, type=_Line)
                yield str(found.id), "", Solution(found.source, found.language)
        except msgspec.MsgspecError as error:
            raise InputError(f"{path}: {error}; expected {_EXPECTED}") from error


def _of_record(record: RolloutRecord, reward: RewardConfig) -> tuple[str, str, Solution | None]:
    task = reward.all_tasks.get(record.task)
    if task is None or task.format_check not in ("think_code", "code"):
        return record.prompt_id, record.problem, None
    checked = FORMAT_CHECKS[task.format_check](record.text, record.prompt_tail)
    solution = None if checked.refusal else Solution(checked.answer, checked.tag)
    return record.prompt_id, record.problem, solution


# --- running ------------------------------------------------------------------------------------


def check_sandbox(limits: CodeLimits) -> CodeLimits:
    """The limits with the isolation that works here. InputError where none does."""
    try:
        return prepare(msgspec.structs.replace(limits, output_bytes=OUTPUT_BYTES))
    except GradingError as error:
        raise InputError(str(error)) from error


def run_all(
    jobs: Sequence[tuple[Solution, list[str]]],
    limits: CodeLimits,
    *,
    workers: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[Printed] | str]:
    """What each solution prints for its inputs; a text says why our own side failed instead."""
    found = []
    with ThreadPoolExecutor(workers) as threads:
        for result in threads.map(lambda job: run_solution(*job, limits), jobs):
            found.append(result)
            progress(len(found), len(jobs))
    return found


def run_solution(solution: Solution, inputs: list[str], limits: CodeLimits) -> list[Printed] | str:
    """The same for one solution."""
    job = msgspec.msgpack.encode(Job(solution.source, solution.tag, inputs, limits))
    limit_s = START_S + limits.host_patience * longest_item_s(limits, len(inputs))
    process = subprocess.Popen(
        [sys.executable, "-m", "verification.code.outputs"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        try:
            output, errors = process.communicate(job, timeout=limit_s)
        except subprocess.TimeoutExpired:
            # What runs in its sandbox dies with it.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return f"no answer within {limit_s:.0f} s"
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        return f"exit code {process.returncode}: {' '.join(last)}"
    return msgspec.msgpack.decode(output, type=list[Printed])
