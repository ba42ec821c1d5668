"""SFT examples: JSONL -> TrainSequences -> minibatches; and what a checkpoint says of them.

Runs in trainer ranks of supervised fine-tuning; the launcher reads examples too. A line is
{"messages": [...], "response": "..."}; only response tokens (and the end of sequence after them)
carry loss. In a line without a response, whose last message is the assistant's, all messages of the
assistant carry loss: a conversation with holes, as reinforcement learning has them. Such a line may
offer "tools": replies then call them as the chat template writes calls, results have the role tool.
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
from megatron_rl.config.thinking import continued
from megatron_rl.config.tree import Config
from megatron_rl.protocol.chat_template import RenderError, Tool
from megatron_rl.protocol.checkpoint_folder import SFT_STATE
from megatron_rl.protocol.render import Conversation, Renderer
from megatron_rl.protocol.tool_calls import with_tools
from megatron_rl.protocol.turns import Turns
from megatron_rl.protocol.types import ChatMessage, TrainSequence


class SftExample(msgspec.Struct, frozen=True):
    """One conversation and the response to learn."""

    messages: list[ChatMessage]
    response: str = ""
    task: str = "math"
    """The task that chooses the system prompt, as in reinforcement learning."""
    is_program: bool = False
    """For the task code: the response is a program that reads standard input, not a function."""
    learns_all: bool = False
    """Learn the assistant's earlier messages too."""
    tools: list[Tool] = []
    """Offered to the assistant, as chat templates take them; only with learns_all."""


def read_sft_dataset(path: Path) -> list[SftExample]:
    """All SFT examples of a file; InputError names the file and line of the first bad one."""
    try:
        # Not splitlines(), which also splits at U+2028 inside JSON strings.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the SFT examples {path}: {error}") from error
    examples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            examples.append(_with_response(msgspec.json.decode(line, type=SftExample)))
        except msgspec.MsgspecError as error:
            raise InputError(
                f"{path}:{number}: not an SFT example: {error}; expected "
                '{"messages": [...], "response": "..."}, or {"messages": [...]} that ends with a '
                "message of the assistant"
            ) from error
    if not examples:
        raise InputError(f"{path} has no SFT examples")
    return examples


def _with_response(example: SftExample) -> SftExample:
    """The example, whose last message is its response if it has none. Raises ValidationError."""
    if example.response and example.tools and not example.learns_all:
        raise msgspec.ValidationError(
            "Object has `tools`, which need an example whose last message is the assistant's, "
            "without `response`"
        )
    if example.response:
        return example
    if len(example.messages) < 2 or example.messages[-1].role != "assistant":
        raise msgspec.ValidationError("Object missing required field `response`")
    *earlier, last = example.messages
    return msgspec.structs.replace(
        example, messages=earlier, response=last.content, learns_all=True
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


def tokenize(examples: list[SftExample], renderer: Renderer) -> list[TrainSequence]:
    """SFT examples as sequences; `minibatches` sets their weights."""
    sequences = []
    turns = Turns(renderer) if any(example.learns_all for example in examples) else None
    for example in examples:
        given: list[tuple[int, int]] = []
        if turns is not None and example.learns_all:
            prompt, response, given = _render_replies(example, renderer, turns)
        else:
            prompt, response, _ = renderer.render_example(
                example.messages, example.response, task=example.task, is_program=example.is_program
            )
        count = len(response) - sum(end - start for start, end in given)
        sequences.append(
            TrainSequence(
                token_ids=np.array(prompt + response, np.int32),
                prompt_length=len(prompt),
                generator_logprobs=np.zeros(count, np.float32),
                token_versions=np.full(count, -1, np.int32),
                advantage=0.0,
                weight=0.0,
                given=given,
            )
        )
    return sequences


def _render_replies(
    example: SftExample, renderer: Renderer, turns: Turns
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """(prompt ids, completion ids, given ranges of the completion) of a whole conversation.

    Raises RenderError if it does not fit the context, or if the chat template cannot continue it.
    """
    conversation = Conversation(example.task, example.messages, example.is_program)
    messages = [*renderer.turns(conversation), {"role": "assistant", "content": example.response}]
    shown = len(messages) - 1 - len(example.messages)  # the run's own example is not learnt
    first = next(n for n, m in enumerate(messages) if n >= shown and m["role"] == "assistant")
    opened, tools = messages[:first], example.tools
    if tools and "tools" not in renderer.template.reads:
        opened, tools = with_tools(opened, tools), []
    prompt, completion = turns.start(opened, tools), list[int]()
    ranges: list[tuple[int, int]] = []
    for is_reply, run in itertools.groupby(messages[first:], lambda m: m["role"] == "assistant"):
        start = len(completion)
        if not is_reply:
            completion += turns.glue(completion, list(run), tools)
            ranges.append((start, len(completion)))
            continue
        reply, *more = run
        if more:
            raise RenderError("two messages of the assistant in a row: join them to one")
        text = reply["content"]
        if renderer.tags is not None:
            text = continued(text, renderer.tags, renderer.tail(prompt + completion))
        completion += renderer.render_response(text)
    refusal = renderer.find_refusal(len(prompt), len(completion))
    if refusal := refusal or renderer.find_foreign(completion):
        raise RenderError(refusal)
    return prompt, completion, ranges


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
