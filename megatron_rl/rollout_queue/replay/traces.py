"""Traces with rewards, of people or other models: JSONL -> recorded rollouts that can be replayed.

The launcher looks at them before a run (`check_traces`), puts them into tokens in a child process,
and writes RUN/replay in the form of a run's own records, which the rollout queue draws from.
"""

import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.render import Renderer, RenderError, open_renderer
from megatron_rl.protocol.rollout_files import read_file, rollout_files
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
from megatron_rl.rollout_queue.groups import Group, Origin
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.train_sequence import NO_VERSION

_FOLDER = "replay"
_TOKENIZE_S = 3600.0
"""For all traces; some 10,000 a second."""
_CHUNK_GROUPS = 4096
"""Groups of a file."""
_COMPARED = 8
"""Rollouts of a run by which its tokenizer is known."""
_EXPECTED = (
    'expected one JSON object a line: {"prompt": "..." or [{"role": "user", "content": "..."}], '
    '"response": "...", "reward": 1.0}, with optional "task"'
)


class RewardedTrace(msgspec.Struct, frozen=True):
    """One line: a response and what it was worth."""

    prompt: str | list[ChatMessage]
    response: str
    reward: float
    task: str = "math"
    """Whose system prompt it gets, as in reinforcement learning."""

    @property
    def messages(self) -> list[ChatMessage]:
        """The conversation; a text is one message of the user."""
        if isinstance(self.prompt, str):
            return [ChatMessage("user", self.prompt)]
        return self.prompt

    @property
    def key(self) -> tuple:
        """The same for the traces of a group."""
        return (self.task, *((message.role, message.content) for message in self.messages))


def folder_of_traces(run_dir: Path) -> Path:
    """Where the prepared traces of a run lie."""
    return run_dir / _FOLDER


def read_traces(path: Path) -> Iterator[RewardedTrace]:
    """The traces of a file. Raises InputError, naming file and line, for the first bad one."""
    try:
        # Not splitlines(), which also splits at U+2028 inside JSON strings.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the traces {path} (replay.traces): {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            trace = msgspec.json.decode(line, type=RewardedTrace)
        except msgspec.DecodeError as error:
            raise InputError(f"{path}:{number}: {error}; {_EXPECTED}") from error
        if not trace.messages or not trace.response.strip():
            raise InputError(f"{path}:{number}: an empty prompt or response; {_EXPECTED}")
        yield trace


def check_sources(config: Config) -> None:
    """Refuse files that cannot be replayed, before anything starts. Raises InputError."""
    for path in config.replay.traces:
        tasks = {trace.task for trace in read_traces(path)}
        if not tasks:
            raise InputError(f"replay.traces: {path} has no traces")
        for task in sorted(tasks - config.reward.format_checks.keys()):
            raise InputError(
                f"replay.traces: {path} names the task {task!r}; known are "
                f"{sorted(config.reward.format_checks)}, others are defined in [reward.tasks.NAME]"
            )
    for folder in config.replay.runs:
        if folder.resolve() == config.run.dir.resolve():
            raise InputError(
                f"replay.runs names {folder}, the folder of this run: its own groups are replayed "
                "by replay.buffer_groups"
            )
    if config.replay.runs:
        call_in_child(check_tokens, config, what="reading the runs to replay", limit_s=_TOKENIZE_S)


def check_tokens(config: Config) -> None:
    """Refuse runs with other tokens than the model's; imports transformers. Raises InputError."""
    renderer = open_renderer(config)
    for folder in config.replay.runs:
        files = [file for file in rollout_files(folder) if file.step is not None]
        if not files:
            raise InputError(f"replay.runs: {folder} holds no rollouts of training steps")
        for record, _ in zip(read_file(files[0]), range(_COMPARED), strict=False):
            if renderer.decode(record.token_ids.tolist()) != record.text:
                raise InputError(
                    f"replay.runs: {record.source.path}:{record.line} was recorded with another "
                    f"tokenizer than that of model.path={config.model.path}: its token ids stand "
                    "for another text; replay runs of models with the same tokenizer"
                )


def prepare_traces(config: Config) -> list[str]:
    """Write RUN/replay anew, if there are traces; returns lines for the user.

    Raises InputError where none can be used.
    """
    if not config.replay.traces or not config.train.steps:
        return []
    shutil.rmtree(folder_of_traces(config.run.dir), ignore_errors=True)
    count, refusals = call_in_child(
        write_traces, config, what="putting replay.traces into tokens", limit_s=_TOKENIZE_S
    )
    if refusals.total() == count:
        raise InputError(f"no trace of replay.traces can be used: {next(iter(refusals))}")
    notes = [f"{count - refusals.total()} traces are put into tokens, to be replayed"]
    if refusals:
        notes.append(
            f"warning: {refusals.total()} of {count} traces are left out; the first: "
            f"{next(iter(refusals))}"
        )
    return notes


def write_traces(config: Config) -> tuple[int, Counter[str]]:
    """Put the traces into tokens and record them: how many there were, and why some were refused.

    Imports transformers.
    """
    renderer = open_renderer(config)
    recorder = Recorder(folder_of_traces(config.run.dir))
    refusals: Counter[str] = Counter()
    count = 0
    numbered = enumerate(_grouped(config))
    for step in itertools.count():
        chunk = list(itertools.islice(numbered, _CHUNK_GROUPS))
        if not chunk:
            break
        groups = [_group(number, traces, renderer, refusals) for number, traces in chunk]
        recorder.write_step(step, groups, now=0.0)
        count += sum(len(traces) for _, traces in chunk)
    return count, refusals


def _grouped(config: Config) -> Iterator[list[RewardedTrace]]:
    """Traces of a prompt, no more at once than train.group_size."""
    size = config.train.group_size
    groups: defaultdict[tuple, list[RewardedTrace]] = defaultdict(list)
    for path in config.replay.traces:
        for trace in read_traces(path):
            groups[trace.key].append(trace)
    for traces in groups.values():
        yield from (traces[n : n + size] for n in range(0, len(traces), size))


def _group(
    number: int, traces: list[RewardedTrace], renderer: Renderer, refusals: Counter[str]
) -> Group:
    """Of the traces that can be rendered; the others are counted."""
    first = traces[0]
    prompt = Prompt(f"trace:{number}", first.task, first.messages, "")
    group = Group(number, prompt, Sampling(1, 1.0), len(traces), NO_VERSION)
    for index, trace in enumerate(traces):
        response = renderer.render_response(trace.response)
        try:
            prompt_ids = renderer.render(trace.messages, len(response), task=trace.task)
        except RenderError as error:
            refusals[str(error)] += 1
            continue
        rollout = _rollout(index, prompt_ids, response, trace.response)
        group.origins[index] = Origin("trace", 0.0, 0.0)
        group.add(ScoredRollout(rollout, Score(trace.reward, {}, "trace")), now=0.0)
    return group


def _rollout(index: int, prompt_ids: list[int], response: list[int], text: str) -> Rollout:
    return Rollout(
        lease_id=0,
        index=index,
        prompt_ids=np.array(prompt_ids, np.int32),
        token_ids=np.array(response, np.int32),
        # Nobody knows them; objectives that read them are refused.
        logprobs=np.zeros(len(response), np.float32),
        spans=[VersionSpan(NO_VERSION, 0, len(response))],
        finish_reason="stop",
        text=text,
    )
