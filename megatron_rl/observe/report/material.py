"""Reads a run for a report: its metrics and its recorded rollouts.

Records are read in one pass and reduced to plotted values; a long run has gigabytes of text.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from megatron_rl.config.tree import Config
from megatron_rl.protocol.line_errors import decode_lines
from megatron_rl.protocol.metrics import Row, stream_rows
from megatron_rl.protocol.rollout import given_ranges
from megatron_rl.protocol.rollout_files import FOLDER, RecordedSpan, RolloutTimes, rollout_files
from megatron_rl.rollout_queue.activity import ACTIVITY_S

_EXPECTED = "a recorded rollout"
GIVEN, WAITED = "report/given_tokens_share", "report/environment_wait_share"
"""Columns that the report adds to rows of steps."""
MAX_TRACED = 20_000
"""Rollouts of a timeline."""
MAX_EXAMPLES = 8
"""Shown prompts with completions before and after training."""
MAX_SHOWN_CHARS = 4_000
"""Shown characters of one text."""


class Record(msgspec.Struct):
    """The plotted part of a recorded rollout."""

    versions: list[int] = []
    generator: str = ""
    tokens: int = 0
    group: int = 0
    index: int = 0
    reason: str = ""
    reward: float | None = None
    times: RolloutTimes = RolloutTimes(leased=0.0, done=0.0)
    """Zeros: not recorded."""
    spans: list[RecordedSpan] = []
    environment_s: float | None = None
    """None: no conversation with an environment."""


class Answer(msgspec.Struct):
    """The shown part of an evaluated rollout."""

    prompt_id: str
    problem: str = ""
    text: str = ""
    answer: str = ""
    reason: str = ""
    reward: float | None = None
    other_answers: list[str] = []


@dataclass(frozen=True)
class Example:
    """The first completion of a prompt before and after training."""

    before: Answer
    after: Answer


@dataclass
class Run:
    name: str
    folder: Path
    config: Config
    rows: list[Row]
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained rollouts by policy versions between their oldest token and the step."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each trained rollout."""
    traced: list[Record] = field(default_factory=list)
    """The first trained rollouts, for the timeline."""
    examples: list[Example] = field(default_factory=list)

    @property
    def steps(self) -> list[Row]:
        """Rows of the trainer's steps."""
        return [r for r in self.rows if r.get("source") == "trainer" and "train/loss" in r]


def read_material(folder: Path, config: Config, name: str) -> Run:
    rows = [row for row in stream_rows(folder / "metrics.jsonl") if ACTIVITY_S not in row]
    run = Run(name, folder, config, rows)
    decoder = msgspec.json.Decoder(Record)
    sums: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for file in rollout_files(folder) if (folder / FOLDER).is_dir() else []:
        if file.step is None or file.is_dropped:
            continue
        for record in decode_lines(file.path, decoder, expected=_EXPECTED):
            # The batch of file s turns version s into s + 1.
            run.staleness[file.step - min(record.versions, default=file.step)] += 1
            run.lengths.append(record.tokens)
            if record.environment_s is not None:
                sums[file.step + 1].update(_conversation_sums(record, record.environment_s))
            if len(run.traced) < MAX_TRACED:
                run.traced.append(record)
    for row in run.steps:
        row |= _shares(sums[row["step"]])
    if not _was_extended(run):
        run.examples = _examples(folder / FOLDER)
    return run


def _was_extended(run: Run) -> bool:
    """Whether steps were trained after the evaluation whose completions are recorded."""
    evaluated = [row["step"] for row in run.rows if row.get("label") == "after"]
    return bool(evaluated and run.steps) and evaluated[-1] < run.steps[-1]["step"]


def _conversation_sums(record: Record, environment_s: float) -> dict[str, float]:
    given = sum(end - start for start, end in given_ranges(record.spans))
    lasted_s = record.times.done - record.times.leased
    return {"given": given, "tokens": record.tokens, "waited_s": environment_s, "s": lasted_s}


def _shares(sums: Counter[str]) -> Row:
    """Shares of the trained conversations of a step; {} without any."""
    if not sums["tokens"] or not sums["s"]:
        return {}
    return {GIVEN: sums["given"] / sums["tokens"], WAITED: sums["waited_s"] / sums["s"]}


def _examples(folder: Path) -> list[Example]:
    """Examples; prompts with a changed verdict come first."""
    before, after = (_answers(folder / f"eval_{label}.jsonl") for label in ("before", "after"))
    pairs = [Example(before[key], after[key]) for key in before if key in after]
    pairs.sort(key=lambda pair: pair.before.reason == pair.after.reason)
    return pairs[:MAX_EXAMPLES]


def _answers(path: Path) -> dict[str, Answer]:
    decoder = msgspec.json.Decoder(Answer)
    found: dict[str, Answer] = {}
    for answer in decode_lines(path, decoder, expected=_EXPECTED):
        found.setdefault(answer.prompt_id, answer)
    return found
