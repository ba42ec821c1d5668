"""Format and reader of recorded rollouts in RUN/rollouts.

Written by the rollout queue (`rollout_queue/record.py` lists the files); read by any process that
replays, shows or analyses rollouts. Two files belong together:

- NAME.jsonl: one `RolloutRecord` per line;
- NAME.int32: little-endian words of four bytes (`numpy.fromfile(path, "<i4")`). It has a group's
  prompt ids (int32) once, and each rollout's token ids (int32), followed by its logprobs (float32).
  `RolloutRecord.words` has the positions.

A line is written after its words, so the words of a complete line exist, until
queue.keep_tokens_of_steps removes old ones. tokens_thinned.json has the first step that keeps them.
"""

import contextlib
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.line_errors import decode_lines
from megatron_rl.protocol.metrics import end_of_lines
from megatron_rl.protocol.rollout import ConversationTurn, TurnReturn, find_bad_spans, given_ranges
from megatron_rl.protocol.types import ROUNDING_NATS, Rollout
from megatron_rl.protocol.whole_file import write_whole

log = logging.getLogger(__name__)

FOLDER = "rollouts"
_THINNED = "tokens_thinned.json"
LINES, WORDS = ".jsonl", ".int32"
WORD_BYTES = 4
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(prompt ids, token ids, logprobs) of a rollout."""
_NO_ARRAYS: Arrays = (np.zeros(0, _INT), np.zeros(0, _INT), np.zeros(0, _FLOAT))
_NAME = re.compile(
    r"(?:(?P<kind>step|dropped)_(?P<step>\d{6,})|(?P<lost>dropped_)?eval_(?P<label>.+))\.jsonl"
)


class RecordedSpan(NamedTuple):
    """Completion tokens [start, end) were sampled from policy `version`; an array in JSON."""

    version: int
    start: int
    end: int


class RolloutTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Times of a rollout: unix seconds of the queue's clock."""

    leased: float
    """Its lease was issued."""
    done: float
    """It arrived at the queue."""
    scored: float | None = None
    """Its score arrived. None: it could not be graded."""
    trained: float | None = None
    """Its batch was formed. None: it is in no batch."""
    first_token_s: float = -1.0
    """Seconds between lease and first token, by the generator's clock; -1: unknown."""


class RolloutRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of a rollouts file. Records of earlier releases lack some fields with defaults."""

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
    """Reason of the score, or why there is no score."""
    tokens: int
    """Completion tokens."""
    versions: list[int]
    """Policy versions of the tokens, in order."""
    finish_reason: str
    seed: int
    """Seed of the group, which drew its tests."""
    prompt_tail: str
    """The end of the rendered prompt, which may open the thoughts."""
    dropped: str = ""
    """Reason to drop its group ("zero_variance": equal rewards) or the completion; else empty."""
    detail: str = ""
    """The verifier's last error; or the first test that a program failed, and its output."""
    generator: str = ""
    prompt_tokens: int = 0
    spans: list[RecordedSpan] = []
    times: RolloutTimes | None = None
    answer_class: int | None = None
    """In an evaluation with several samples: class of equal answers of the prompt, 0 for right
    answers, -1 for no answer. None: unknown."""
    words: tuple[int, int] | None = None
    """Positions of its prompt ids and token ids in the .int32 file, in words; None without
    queue.record_tokens."""
    stage: int = 0
    """The stage whose rules sampled and judged it; 0: the configuration itself."""
    other_answers: list[str] = []
    """Further accepted answers."""
    row_starts: list[int] = []
    """As in Rollout."""
    environment_s: float | None = None
    """As in Rollout; None without an environment."""
    is_outcome: bool = False
    """As in Score."""
    turn_returns: list[TurnReturn] = []
    """As in Rollout."""
    to_grade: str | None = None
    """As in Rollout."""
    conversation: list[ConversationTurn] = []
    """As in Rollout."""

    @property
    def sampled_tokens(self) -> int:
        """Number of completion tokens that the policy sampled."""
        return self.tokens - sum(end - start for start, end in given_ranges(self.spans))


class RolloutFile(NamedTuple):
    """One file of lines."""

    path: Path
    step: int | None
    """Step of the batch, or of the next batch after a drop; None: an evaluation."""
    label: str = ""
    """Label of the evaluation."""
    is_dropped: bool = False
    """Whether it has dropped groups and completions."""


class RecordedRollout(RolloutRecord, frozen=True, kw_only=True, eq=False):
    """A record with its arrays."""

    source: RolloutFile
    line: int
    """Line number in the source, from 1."""
    prompt_ids: np.ndarray
    """[prompt tokens] int32."""
    token_ids: np.ndarray
    """[completion tokens] int32, as in Rollout."""
    logprobs: np.ndarray
    """[completion tokens] float32, as in Rollout."""


class TokensThinned(InputError):
    """queue.keep_tokens_of_steps removed the tokens."""


class _Thinned(msgspec.Struct, frozen=True):
    """Content of tokens_thinned.json."""

    before_step: int
    """Token files of earlier steps may be removed."""


def append_words(file: BinaryIO, rollouts: Iterable[Rollout]) -> list[tuple[int, int]]:
    """Append the arrays of rollouts; returns `RolloutRecord.words` of each.

    A prompt equal to the previous one, as in a group, is stored only once.
    """
    places: list[tuple[int, int]] = []
    prompt_ids: np.ndarray | None = None
    prompt_at, end = 0, file.tell() // WORD_BYTES
    for rollout in rollouts:
        if prompt_ids is None or not np.array_equal(prompt_ids, rollout.prompt_ids):
            prompt_ids, prompt_at = rollout.prompt_ids, end
            end += _append(file, prompt_ids, _INT)
        places.append((prompt_at, end))
        end += _append(file, rollout.token_ids, _INT)
        end += _append(file, rollout.logprobs, _FLOAT)
    return places


def _append(file: BinaryIO, array: np.ndarray, dtype: np.dtype) -> int:
    """Append an array; returns its number of words."""
    # Array by array: a joined copy would block all other threads meanwhile.
    file.write(np.ascontiguousarray(array, dtype=dtype).data)
    return len(array)


def write_thinned(folder: Path, before_step: int) -> None:
    """Record that token files of earlier steps are removed. Raises OSError, InputError."""
    mark = _Thinned(max(before_step, _thinned_before(folder)))
    write_whole(folder / _THINNED, msgspec.json.encode(mark))


# --- reading ------------------------------------------------------------------------------------


def rollout_files(run_dir: Path) -> list[RolloutFile]:
    """Files of a run by step, dropped groups before the batch; then files of evaluations.

    Raises InputError if the folder of rollouts is missing or unreadable.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir():
        raise InputError(f"{run_dir} holds no rollouts: expected the folder {folder}")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise InputError(f"cannot read {folder}: Permission denied")
    found = []
    for path in sorted(folder.glob(f"*{LINES}")):
        if (file := parse_name(path)) is not None:
            found.append(file)
    training = [file for file in found if file.step is not None]
    training.sort(key=lambda file: (file.step, not file.is_dropped))
    return training + [file for file in found if file.step is None]


def parse_name(path: Path) -> RolloutFile | None:
    """The meaning of a file name; None if it is not a file of lines."""
    if (match := _NAME.fullmatch(path.name)) is None:
        return None
    is_dropped = match["kind"] == "dropped" or match["lost"] is not None
    step = None if match["step"] is None else int(match["step"])
    return RolloutFile(path, step, match["label"] or "", is_dropped)


def read_records(path: Path, torn: Counter[str] | None = None) -> Iterator[RolloutRecord]:
    """Lines of one file, without arrays. Raises InputError for a line that is not a record.

    A torn last line is left out, and counted in `torn` under the file's path.
    """
    decoder = msgspec.json.Decoder(RolloutRecord)
    yield from decode_lines(path, decoder, expected="a recorded rollout")
    if (complete := end_of_lines(path)) < path.stat().st_size:
        log.warning("%s: what follows byte %d was cut short, and is left out", path, complete)
        if torn is not None:
            torn[str(path)] += 1


def without_texts(record: RolloutRecord) -> RolloutRecord:
    """A record without texts, to keep many in memory."""
    turns = [msgspec.structs.replace(turn, text="", given=[]) for turn in record.conversation]
    return msgspec.structs.replace(
        record, text="", problem="", answer="", prompt_tail="", detail="", other_answers=[],
        conversation=turns,
    )  # fmt: skip


def read_rollouts(run_dir: Path) -> Iterator[RecordedRollout]:
    """All recorded rollouts of a run with their arrays, in the order of `rollout_files`.

    Raises InputError, with file and line, if arrays are missing or contradict the line.
    """
    return itertools.chain.from_iterable(map(read_file, rollout_files(run_dir)))


def read_file(file: RolloutFile) -> Iterator[RecordedRollout]:
    """The rollouts of one file with their arrays; as `read_rollouts`."""
    # All lines before the words: a running queue writes the words of a line first.
    records = list(read_records(file.path))
    with contextlib.ExitStack() as stack:
        words = None
        # The queue may remove the file at any time; an open file stays readable.
        with contextlib.suppress(FileNotFoundError):
            words = stack.enter_context(file.path.with_suffix(WORDS).open("rb"))
        for line, record in enumerate(records, 1):
            place = f"{file.path}:{line}"
            if record.words is None and not record.tokens:
                # Nothing was left of it, as after a failure of its environment.
                yield _with_arrays(record, file, line, _NO_ARRAYS)
                continue
            if record.words is None:
                raise InputError(
                    f"{place} has no token ids: it was recorded without them "
                    "(queue.record_tokens = false, or an older release)"
                )
            if words is None:
                raise missing_words(file.path, place)
            yield _with_arrays(record, file, line, _read_words(record, words, place))


def _with_arrays(
    record: RolloutRecord, file: RolloutFile, line: int, arrays: Arrays
) -> RecordedRollout:
    prompt_ids, token_ids, logprobs = arrays
    return RecordedRollout(
        **msgspec.structs.asdict(record),
        source=file,
        line=line,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
    )


def read_arrays(record: RolloutRecord, lines: Path) -> Arrays:
    """The arrays of one record. Raises InputError."""
    place = f"{lines}: group {record.group}, index {record.index}"
    try:
        with lines.with_suffix(WORDS).open("rb") as words:
            return _read_words(record, words, place)
    except FileNotFoundError as error:
        raise missing_words(lines, place) from error


def missing_words(lines: Path, place: str) -> InputError:
    """The error for a file of lines without words. place: the line, for the message."""
    before, file = _thinned_before(lines.parent), parse_name(lines)
    if file is not None and file.step is not None and file.step < before:
        return TokensThinned(
            f"{place}: tokens thinned: queue.keep_tokens_of_steps removed those of steps before "
            f"{before}"
        )
    words = lines.with_suffix(WORDS)
    return InputError(f"{place} has its token ids in {words}, which does not exist")


def _thinned_before(folder: Path) -> int:
    try:
        return msgspec.json.decode((folder / _THINNED).read_bytes(), type=_Thinned).before_step
    except FileNotFoundError:
        return 0
    except msgspec.MsgspecError as error:
        raise InputError(f"{folder / _THINNED} is damaged: {error}; remove it") from error


def _read_words(record: RolloutRecord, words: BinaryIO, place: str) -> Arrays:
    assert record.words is not None
    prompt_at, tokens_at = record.words
    prompt_end, end = prompt_at + record.prompt_tokens, tokens_at + 2 * record.tokens
    size = os.fstat(words.fileno()).st_size // WORD_BYTES
    if min(prompt_at, tokens_at) < 0 or max(prompt_end, end) > size:
        raise InputError(
            f"{place} needs words {prompt_at} to {prompt_end} and {tokens_at} to {end} of its "
            f"{WORDS} file, which has {size}: one of the two files was cut or replaced"
        )
    # Not a memory map: reading a map of a truncated file kills the process.
    words.seek(prompt_at * WORD_BYTES)
    prompt_ids = np.fromfile(words, _INT, record.prompt_tokens)
    words.seek(tokens_at * WORD_BYTES)
    found = np.fromfile(words, _INT, 2 * record.tokens)
    token_ids, logprobs = found[: record.tokens], found[record.tokens :].view(_FLOAT)
    if fault := _find_fault(record, prompt_ids, token_ids, logprobs):
        raise InputError(f"{place}: {fault}")
    return prompt_ids, token_ids, logprobs


def _find_fault(
    record: RolloutRecord, prompt_ids: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray
) -> str:
    """Why arrays contradict the line or belong to another one; empty if they fit."""
    if fault := find_bad_spans(record.spans, record.tokens):
        return fault
    if not len(prompt_ids) or not len(token_ids):
        return f"{len(prompt_ids)} prompt tokens and {len(token_ids)} completion tokens"
    # Logprobs misread as token ids are negative, because their sign bit is set.
    is_sound = np.isfinite(logprobs).all() and logprobs.max() <= ROUNDING_NATS
    if min(prompt_ids.min(), token_ids.min()) < 0 or not is_sound:
        return f"the words in its {WORDS} file are not its token ids and logprobs"
    return ""
