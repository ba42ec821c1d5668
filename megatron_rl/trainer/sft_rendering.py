"""Turns SFT examples into token sequences: which tokens are learnt, which are only given.

Runs in trainer ranks of supervised fine-tuning, and in a child of the launcher, which tries some
examples before a run starts.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import ThinkTags, continued
from megatron_rl.protocol.chat_template import RenderError, Turn
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.tool_calls import with_tools
from megatron_rl.protocol.turns import Turns
from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.sft_dataset import SftExample, keep_sft_dataset, line_of
from megatron_rl.trainer.sft_messages import ASSISTANT, SftMessage

_TRIED_EXAMPLES = 256
"""The longest SFT examples of a file, and as many with tool calls, that a start tokenizes."""
_INSTEAD = 'write the last reply of the line as "response", which alone is then taught'
_Given = list[tuple[int, int]]
"""[start, end) of completion tokens that are not learnt."""


def tokenize(examples: Iterable[SftExample], renderer: Renderer) -> Iterator[TrainSequence]:
    """SFT examples as sequences; `minibatches` sets their weights.

    Raises RenderError for one that cannot be rendered or is too long.
    """
    turns: Turns | None = None
    for example in examples:
        if example.learns_all:
            # One reply behind one prompt needs no template that continues conversations.
            turns = turns or Turns(renderer, is_continued=False, instead=_INSTEAD)
            yield _tokenize_replies(example, renderer, turns)
        else:
            yield _tokenize_response(example, renderer)


def tokenize_lines(
    path: Path, examples: Mapping[int, SftExample], renderer: Renderer
) -> list[TrainSequence]:
    """As `tokenize`; examples: by their place among those of the file.

    Raises InputError with file and line.
    """
    found: list[TrainSequence] = []
    try:
        for sequence in tokenize(examples.values(), renderer):
            found.append(sequence)
    except RenderError as error:
        number = line_of(path, list(examples)[len(found)])
        raise InputError(
            f"{path}:{number}: {error}. Otherwise change or remove the line"
        ) from error
    return found


def trial_of(path: Path) -> Callable[[Renderer], object]:
    """A trial in which a start finds what `tokenize` would refuse in the trainer, for most files.

    The trial can be pickled; it raises InputError. The longest lines are tried, because rendering
    all of a large file takes as long as in the trainer.
    """
    examples = keep_sft_dataset(path)
    longest = sorted(range(len(examples)), key=lambda n: -_bytes(examples[n]))
    calling = [n for n in longest if any(m.keys_beside_text for m in examples[n].messages)]
    tried = sorted({*longest[:_TRIED_EXAMPLES], *calling[:_TRIED_EXAMPLES]})
    return partial(tokenize_lines, path, {n: examples[n] for n in tried})


def _bytes(example: SftExample) -> int:
    texts = [example.response, *(m.text + m.thoughts for m in example.messages)]
    return sum(len(text.encode()) for text in texts)


def _tokenize_response(example: SftExample, renderer: Renderer) -> TrainSequence:
    task, messages, is_program = example.conversation
    prompt, response, _ = renderer.render_example(
        messages, example.response, task=task, is_program=is_program
    )
    return _sequence(prompt, response, [])


def _sequence(prompt: list[int], completion: list[int], given: _Given) -> TrainSequence:
    count = len(completion) - sum(end - start for start, end in given)
    return TrainSequence(
        token_ids=np.array(prompt + completion, np.int32),
        prompt_length=len(prompt),
        generator_logprobs=np.zeros(count, np.float32),
        version_runs=[(-1, count)],
        advantage=0.0,
        weight=0.0,
        given=given,
    )


def _tokenize_replies(example: SftExample, renderer: Renderer, turns: Turns) -> TrainSequence:
    """A whole conversation, up to the last reply that is taught.

    Raises RenderError if it does not fit the context, or if the chat template cannot continue it.
    """
    messages = list(example.messages)
    if example.response:
        messages.append(SftMessage(ASSISTANT, example.response))
    last = max(n for n, message in enumerate(messages) if message.is_taught)
    messages = messages[: last + 1]
    first = next(n for n, message in enumerate(messages) if message.role == ASSISTANT)
    # The run's system prompt and its own example, which is not learnt.
    conversation = example.conversation
    shown = renderer.turns(conversation)[: -len(conversation.messages)]
    opened, tools = [*shown, *(message.turn() for message in messages[:first])], example.offered
    if tools and "tools" not in renderer.template.reads:
        opened, tools = with_tools(opened, tools), []
    if not opened:
        raise RenderError(
            "the first message is the assistant's, and the run has no system prompt to put before "
            "it: begin with a message of the user"
        )
    prompt, completion = turns.start(opened, tools), list[int]()
    given: _Given = []
    calls: dict[str, str] = {}
    for is_reply, run in itertools.groupby(messages[first:], lambda m: m.role == ASSISTANT):
        start = len(completion)
        if not is_reply:
            results = [_result(m, calls) if renderer.form.has_channels else m.turn() for m in run]
            completion += turns.glue(completion, results, tools)
            given.append((start, len(completion)))
            continue
        reply, *more = run
        if more:
            raise RenderError("two messages of the assistant in a row: join them to one")
        calls = {call.id: call.name for call in reply.calls}
        if reply.calls:
            completion += turns.call(reply.calls, reply.text, thoughts=reply.thoughts, tools=tools)
        else:
            text = _with_thoughts(reply, renderer.tags)
            if renderer.tags is not None:
                text = continued(text, renderer.tags, renderer.tail(prompt + completion))
            completion += renderer.render_response(text)
        if not reply.is_taught:
            given.append((start, len(completion)))
    excess = renderer.find_excess(len(prompt) + len(completion))
    if refusal := excess or renderer.find_foreign(completion):
        raise RenderError(refusal)
    return _sequence(*_joined(prompt, completion, given))


def _with_thoughts(reply: SftMessage, tags: ThinkTags | None) -> str:
    """The text of a reply without calls, with its thoughts in the model's tags."""
    if not reply.thoughts:
        return reply.text
    if tags is None:
        raise RenderError(
            "a message has thoughts (reasoning_content or thinking), and the model has no think "
            "tags: set render.thinking, or take the thoughts out"
        )
    return tags.around_thoughts(reply.thoughts) + reply.text


def _result(message: SftMessage, calls: dict[str, str]) -> Turn:
    """A tool's result with the name of its tool, which templates with channels write.

    calls: names by ids of the calls before it.
    """
    turn = message.turn()
    if message.role == "tool" and "name" not in turn:
        names = list(calls.values())
        name = calls.get(message.tool_call_id or "", names[0] if len(names) == 1 else "")
        if not name:
            raise RenderError("a result names no tool: give `tool_call_id` or `name`")
        turn["name"] = name
    return turn


def _joined(
    prompt: list[int], completion: list[int], given: _Given
) -> tuple[list[int], list[int], _Given]:
    """The same tokens; adjacent given ranges are one, and none is at the start."""
    ranges: _Given = []
    for start, end in given:
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, end))
    begin = ranges.pop(0)[1] if ranges and ranges[0][0] == 0 else 0
    moved = [(start - begin, end - begin) for start, end in ranges]
    return prompt + completion[:begin], completion[begin:], moved
