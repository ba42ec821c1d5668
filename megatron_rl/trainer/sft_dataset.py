"""SFT examples: lines of a file, minibatches of sequences, and what a checkpoint says of them.

Runs in trainer ranks of supervised fine-tuning; the launcher reads examples too. A line is
{"messages": [...], "response": "..."}; only response tokens (and the end of sequence after them)
carry loss. In a line without a response, whose last message is the assistant's, all messages of the
assistant carry loss: a conversation with holes, as reinforcement learning has them. Such a line may
offer "tools": replies call them by "tool_calls", results have the role tool. `sft_rendering.py`
makes the sequences.
"""

import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.chat_template import Tool
from megatron_rl.protocol.checkpoint_folder import SFT_STATE
from megatron_rl.protocol.line_errors import json_fault
from megatron_rl.protocol.render import Conversation
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.sft_messages import ALLOWED_KEYS, ASSISTANT, SftMessage


class SftExample(msgspec.Struct, frozen=True):
    """One conversation and the response to learn."""

    messages: list[SftMessage]
    response: str = ""
    """"": the last message is the assistant's."""
    task: str = "math"
    """The task that chooses the system prompt, as in reinforcement learning."""
    is_program: bool = False
    """For the task code: the response is a program that reads standard input, not a function."""
    learns_all: bool = False
    """Learn the assistant's earlier messages too."""
    tools: list[Tool] | str | None = []
    """Offered to the assistant, as chat templates take them, or their JSON text; only with
    learns_all."""

    def __post_init__(self) -> None:
        _ = self.offered

    @property
    def offered(self) -> list[Tool]:
        """The tools as a list; empty for null. Raises ValueError."""
        if not isinstance(self.tools, str):
            return self.tools or []
        try:
            return msgspec.json.decode(self.tools or "[]", type=list[Tool])
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"the tools {self.tools[:80]!r} are no JSON list of objects: {error}"
            ) from error

    @property
    def conversation(self) -> Conversation:
        """Task and messages before what is learnt last, as text alone."""
        messages = self.messages if self.response else self.messages[:-1]
        return Conversation(self.task, [m.plain for m in messages], self.is_program)

    @property
    def answer(self) -> str:
        """The text that is learnt last."""
        return self.response or self.messages[-1].text


def read_sft_dataset(path: Path) -> list[SftExample]:
    """All SFT examples of a file; InputError names the file and line of the first bad one."""
    examples = []
    for number, line in _lines_of(path):
        try:
            examples.append(_checked(msgspec.json.decode(line, type=SftExample)))
        except msgspec.MsgspecError as error:
            raise InputError(
                f"{path}:{number}: not an SFT example: {json_fault(line, error)}; expected "
                '{"messages": [...], "response": "..."}, or {"messages": [...]} that ends with a '
                f"message of the assistant. Keys of a message: {ALLOWED_KEYS}"
            ) from error
    if not examples:
        raise InputError(f"{path} has no SFT examples")
    return examples


def _lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of the lines that are not blank. Raises InputError."""
    try:
        # Not splitlines(), which also splits at U+2028 inside JSON strings.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the SFT examples {path}: {error}") from error
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def line_of(path: Path, index: int) -> int:
    """The number of the line with this SFT example of a file. Raises InputError."""
    return next(itertools.islice(_lines_of(path), index, None))[0]


def _checked(example: SftExample) -> SftExample:
    """The example, which learns all replies if it has no response. Raises ValidationError."""
    if example.response and not example.learns_all:
        keys = [key for message in example.messages for key in message.keys_beside_text]
        if keys or example.offered:
            raise msgspec.ValidationError(
                f"Object has `{keys[0] if keys else 'tools'}`, which needs an example whose last "
                "message is the assistant's, without `response`"
            )
    if example.response and not example.response.strip():
        raise msgspec.ValidationError("the `response` is empty: remove the line")
    if example.response:
        _check_replies(example.messages if example.learns_all else [])
        return example
    if not example.messages or example.messages[-1].role != ASSISTANT:
        raise msgspec.ValidationError(
            "there is no reply: `response` is missing or empty, and the last message is not the "
            "assistant's"
        )
    if len(example.messages) < 2:
        raise msgspec.ValidationError("there is no message before the reply")
    _check_replies(example.messages)
    if not any(message.is_taught for message in example.messages):
        raise msgspec.ValidationError("every message of the assistant has `weight` 0")
    return msgspec.structs.replace(example, learns_all=True)


def _check_replies(messages: Sequence[SftMessage]) -> None:
    """Raise ValidationError for an empty message that would be taught as the end token alone."""
    for number, message in enumerate(messages):
        if message.is_taught and message.is_empty:
            raise msgspec.ValidationError(
                f"the reply of message {number} is empty: remove the line, or give the message "
                "`weight` 0"
            )


def keep_sft_dataset(path: Path) -> list[SftExample]:
    """As `read_sft_dataset`, but an unchanged file is parsed once, until `forget_sft_dataset`.

    For a start, which looks at the file for several reasons.
    """
    try:
        stat = path.stat()
    except OSError:
        return read_sft_dataset(path)  # which says why
    return _read_version(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=1)
def _read_version(path: Path, version: tuple[int, ...]) -> list[SftExample]:
    return read_sft_dataset(path)


def forget_sft_dataset() -> None:
    """Free what `keep_sft_dataset` keeps: a launcher lives as long as its run."""
    _read_version.cache_clear()


def minibatches(
    sequences: list[TrainSequence], *, batch_size: int, steps: int, seed: int, done: int = 0
) -> Iterator[list[TrainSequence]]:
    """`steps` minibatches, epoch after epoch, in an order fixed by the seed.

    Each response token weighs 1 / response tokens of the minibatch. done: number of minibatches to
    leave out at the start; the others stay the same.
    """
    order: list[int] = []
    rng = random.Random(seed)
    for step in range(steps):
        chosen: list[int] = []
        while len(chosen) < batch_size:
            if not order:
                order = rng.sample(range(len(sequences)), len(sequences))
            chosen.append(order.pop())
        if step < done:
            continue
        tokens = sum(len(sequences[i].generator_logprobs) for i in chosen)
        yield [msgspec.structs.replace(sequences[i], weight=1.0 / tokens) for i in chosen]


class SftState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of sft.json: with the step, it determines all later minibatches."""

    sequences: int
    """SFT examples."""
    digest: str
    """BLAKE2b of the examples' tokens in order, 16 bytes, hexadecimal."""
    batch_size: int
    steps: int
    seed: int


def describe_sft(cfg: Config, sequences: Sequence[TrainSequence]) -> SftState:
    """The state of a cold start on these sequences."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        ends = np.array(
            [sequence.prompt_length, len(sequence.token_ids), *itertools.chain(*sequence.given)],
            np.int64,
        )
        digest.update(ends.tobytes() + sequence.token_ids.tobytes())
    return SftState(
        len(sequences), digest.hexdigest(), cfg.sft.batch_size, cfg.sft.steps, cfg.run.seed
    )


def check_same(mine: SftState, folder: Path) -> None:
    """Raise InputError where the checkpoint in `folder` was made with other minibatches."""
    path = folder / SFT_STATE
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=SftState)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    for name in SftState.__struct_fields__:
        there, here = getattr(saved, name), getattr(mine, name)
        if there != here:
            raise InputError(
                f"the cold start that {folder} holds had other minibatches: its {name} was "
                f"{there}, now it is {here}. Give the SFT examples (sft.dataset), the system "
                "prompt and the seed that it began with, or name another folder with --run-dir DIR"
            )
