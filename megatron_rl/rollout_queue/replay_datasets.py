"""Converts rewarded examples (replay.datasets, JSONL) to recorded rollouts to replay.

The launcher checks the files before a run (`check_sources`), tokenizes them in a child process, and
writes RUN/replay in the format of a run's records, from which the rollout queue draws.
"""

import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.line_errors import text_lines
from megatron_rl.protocol.render import Renderer, RenderError, open_renderer
from megatron_rl.protocol.rollout_files import WORDS, read_file, rollout_files
from megatron_rl.protocol.tokenizer_child import call_in_child
from megatron_rl.protocol.types import (
    ChatMessage,
    Prompt,
    Rollout,
    Sampling,
    Score,
    ScoredRollout,
    VersionSpan,
)
from megatron_rl.rollout_queue.groups import NO_VERSION, Group, Origin
from megatron_rl.rollout_queue.record import Recorder

_FOLDER = "replay"
_TOKENIZE_S = 3600.0
"""Limit for all examples; about 10,000 per second are tokenized."""
_CHUNK_GROUPS = 4096
"""Groups per file."""
_COMPARED = 8
"""Rollouts of a run that are decoded to compare tokenizers."""
_EXPECTED = (
    'expected one JSON object a line: {"prompt": "..." or [{"role": "user", "content": "..."}], '
    '"response": "...", "reward": 1.0}, with optional "task"'
)


class _PlainMessage(ChatMessage, frozen=True):
    """A message of text; calls would be lost."""

    tool_calls: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.tool_calls:
            raise ValueError(
                "`tool_calls` are not read here: write the calls into `content` as the model "
                "writes them"
            )


class RewardedExample(msgspec.Struct, frozen=True):
    """One line: a response and its reward."""

    prompt: str | list[_PlainMessage]
    response: str
    reward: float
    task: str = "math"
    """The task whose system prompt it gets."""
    is_program: bool = False
    """Task code: the response is a program that reads standard input, not a function."""
    tools: list[Any] | None = None

    def __post_init__(self) -> None:
        if self.tools:
            raise ValueError("`tools` are not read here: describe them in a system message")

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation; a plain text is one user message."""
        if isinstance(self.prompt, str):
            return [ChatMessage("user", self.prompt)]
        return [ChatMessage(message.role, message.content) for message in self.prompt]

    @property
    def key(self) -> tuple:
        """Equal for all examples of a group."""
        return (
            self.task,
            self.is_program,
            *((message.role, message.content) for message in self.messages),
        )


def folder_of_datasets(run_dir: Path) -> Path:
    """Folder of the tokenized examples of a run."""
    return run_dir / _FOLDER


def read_examples(path: Path) -> Iterator[RewardedExample]:
    """The examples of a file. Raises InputError, with file and line, for the first bad one."""
    texts = text_lines(path, holds="the SFT examples ", hint=" (replay.datasets)")
    for number, line in texts:
        try:
            example = msgspec.json.decode(line, type=RewardedExample)
        except msgspec.DecodeError as error:
            raise InputError(f"{path}:{number}: {error}; {_EXPECTED}") from error
        if not example.messages or not example.response.strip():
            raise InputError(f"{path}:{number}: an empty prompt or response; {_EXPECTED}")
        yield example


def check_sources(config: Config) -> None:
    """Check all replay sources before a process starts. Raises InputError."""
    for path in config.replay.datasets:
        tasks = {example.task for example in read_examples(path)}
        if not tasks:
            raise InputError(
                f"replay.datasets: {path} has no SFT examples: remove it or name another file"
            )
        for task in sorted(tasks - config.reward.format_checks.keys()):
            raise InputError(
                f"replay.datasets: {path} names the task {task!r}; known are "
                f"{sorted(config.reward.format_checks)}, others are defined in [reward.tasks.NAME]"
            )
    for folder in config.replay.runs:
        if folder.resolve() == config.run.dir.resolve():
            raise InputError(
                f"replay.runs names {folder}, the folder of this run: remove it, and set "
                "replay.buffer_groups to replay the run's groups"
            )
    if config.replay.runs:
        call_in_child(check_tokens, config, what="reading the runs to replay", limit_s=_TOKENIZE_S)


def check_tokens(config: Config) -> None:
    """Refuse runs with another tokenizer; imports transformers. Raises InputError."""
    renderer = open_renderer(config)
    for folder in config.replay.runs:
        files = [file for file in rollout_files(folder) if file.step is not None]
        if not files:
            raise InputError(f"replay.runs: {folder} holds no rollouts of training steps")
        # Token files of old steps may have been removed.
        files = [file for file in files if file.path.with_suffix(WORDS).exists()] or files
        for record, _ in zip(read_file(files[0]), range(_COMPARED), strict=False):
            if renderer.decode(record.token_ids.tolist()) != record.text:
                raise InputError(
                    f"replay.runs: {record.source.path}:{record.line} was recorded with another "
                    f"tokenizer than that of model.path={config.model.path}: its token ids stand "
                    "for another text; replay runs of models with the same tokenizer"
                )


def prepare_datasets(config: Config) -> list[str]:
    """Rewrite RUN/replay, if there are datasets; returns lines for the user.

    Raises InputError if no example can be used.
    """
    if not config.replay.datasets or not config.train.steps:
        return []
    shutil.rmtree(folder_of_datasets(config.run.dir), ignore_errors=True)
    count, refusals = call_in_child(
        write_datasets, config, what="putting replay.datasets into tokens", limit_s=_TOKENIZE_S
    )
    if refusals.total() == count:
        raise InputError(f"no SFT example of replay.datasets can be used: {next(iter(refusals))}")
    notes = [f"{count - refusals.total()} SFT examples are put into tokens, to be replayed"]
    if refusals:
        notes.append(
            f"warning: {refusals.total()} of {count} SFT examples are left out; the first: "
            f"{next(iter(refusals))}"
        )
    return notes


def write_datasets(config: Config) -> tuple[int, Counter[str]]:
    """Tokenize and record the examples; returns their number and the refusals.

    Imports transformers.
    """
    renderer = open_renderer(config)
    recorder = Recorder(folder_of_datasets(config.run.dir))
    refusals: Counter[str] = Counter()
    count = 0
    numbered = enumerate(_grouped(config))
    for step in itertools.count():
        chunk = list(itertools.islice(numbered, _CHUNK_GROUPS))
        if not chunk:
            break
        groups = [_group(number, examples, renderer, refusals) for number, examples in chunk]
        recorder.write_step(step, groups, now=0.0)
        count += sum(len(examples) for _, examples in chunk)
    return count, refusals


def _grouped(config: Config) -> Iterator[list[RewardedExample]]:
    """Examples by prompt, in groups of at most train.group_size."""
    size = config.train.group_size
    groups: defaultdict[tuple, list[RewardedExample]] = defaultdict(list)
    for path in config.replay.datasets:
        for example in read_examples(path):
            groups[example.key].append(example)
    for examples in groups.values():
        yield from (examples[n : n + size] for n in range(0, len(examples), size))


def _group(
    number: int, examples: list[RewardedExample], renderer: Renderer, refusals: Counter[str]
) -> Group:
    """The group of the examples that can be rendered; counts the others as refusals."""
    first = examples[0]
    prompt = Prompt(f"example:{number}", first.task, first.messages, "")
    group = Group(number, prompt, Sampling(1, 1.0), len(examples), NO_VERSION)
    for index, example in enumerate(examples):
        try:
            rendered = renderer.render_example(
                example.messages, example.response, task=example.task, is_program=example.is_program
            )
        except RenderError as error:
            refusals[str(error)] += 1
            continue
        rollout = _rollout(index, *rendered)
        group.origins[index] = Origin("example", 0.0, 0.0)
        group.add(ScoredRollout(rollout, Score(example.reward, {}, "example")), now=0.0)
    return group


def _rollout(index: int, prompt_ids: list[int], response: list[int], text: str) -> Rollout:
    return Rollout(
        lease_id=0,
        index=index,
        prompt_ids=np.array(prompt_ids, np.int32),
        token_ids=np.array(response, np.int32),
        # Unknown; the configuration refuses objectives that read them.
        logprobs=np.zeros(len(response), np.float32),
        spans=[VersionSpan(NO_VERSION, 0, len(response))],
        finish_reason="stop",
        text=text,
    )
