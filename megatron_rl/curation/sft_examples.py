"""`data sft`: mines the rollouts of a run for SFT examples, the cold start of another model.

Right rollouts of training only: evaluations are left alone, their prompts are held out. Each
problem gives a few; problems that the run seldom solved count more; a share of instruction data is
mixed in. The output is what `[sft] dataset` reads (`trainer/sft_dataset.py`).

Source: Magistral (arXiv 2506.10910), on Magistral Small: correct SFT examples of the larger model's
RL run without early short ones, capped per problem, low pass rates upsampled, 10 % instruction
data, 4 epochs. How many are kept and repeated is ours.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.curation.draw import place_of
from megatron_rl.curation.options import check_at_least, check_share
from megatron_rl.curation.report import Report, Tally
from megatron_rl.protocol.rollout_files import RolloutRecord, read_records, rollout_files
from megatron_rl.protocol.types import ChatMessage, Prompt
from megatron_rl.trainer.sft_dataset import SftExample
from verification.format import with_opening


@dataclass(frozen=True)
class SftExampleOptions:
    """Which rollouts become SFT examples, how often, and beside what."""

    first_step: int = 0
    """Rollouts of batches before this one are too early to be learnt from."""
    min_tokens: int = 0
    """Rollouts of fewer completion tokens are too short."""
    per_problem: int = 4
    """Most SFT examples of a problem, before any is repeated."""
    upsample_below: float = 0.5
    """An SFT example of a problem with a pass rate r below this is repeated upsample_below / r
    times."""
    max_copies: int = 4
    """Most times that an SFT example is there."""
    instruction_share: float = 0.1
    """Share of the output that is instruction data."""
    epochs: int = 4
    """How often the supervised phase is to go over the output: says how many steps that takes."""
    batch_size: int = 32
    """SFT examples a step of it (sft.batch_size)."""
    template_opens_thoughts: bool = False
    """The chat template of the model to be trained ends prompts with <think>: responses begin
    behind it. Else a <think> that the run's own template has opened is put back."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("--upsample-below", self.upsample_below)
        check_share("--instruction-share", self.instruction_share, high=0.9)
        for name in ("first_step", "min_tokens"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 0)
        for name in ("per_problem", "max_copies", "epochs", "batch_size"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)


class Mined(NamedTuple):
    """A rollout and where it was found."""

    record: RolloutRecord
    step: int
    """Of the batch that it is in, or before which it was dropped."""
    place: str


class Outcome(NamedTuple):
    """What the tool makes of rollouts."""

    examples: list[SftExample]
    report: Report


def read_training_rollouts(run_dir: Path) -> Iterator[Mined]:
    """Rollouts of a run's training, those of zero-variance and other dropped groups too.
    InputError."""
    files = [file for file in rollout_files(run_dir) if file.step is not None]
    if not files:
        raise InputError(f"{run_dir} has no rollouts of training steps: expected step_NNNNNN.jsonl")
    for file in files:
        assert file.step is not None
        for number, record in enumerate(read_records(file.path), 1):
            yield Mined(record, file.step, f"{file.path}:{number}")


def mine_sft_examples(
    rollouts: Iterable[Mined],
    *,
    instructions: Sequence[SftExample],
    prompts: Mapping[str, Prompt],
    options: SftExampleOptions,
) -> Outcome:
    """SFT examples of right rollouts and instruction data, shuffled by the seed.

    prompts: by id, for the messages before the question; without, the question is all there is.
    Raises InputError where nothing is left, or instructions are too few for their share.
    """
    rollouts = list(rollouts)
    tally = Tally("sft", asdict(options), read=len(rollouts))
    solved, rates = _sift(rollouts, options, tally)
    examples: list[tuple[float, SftExample]] = []
    for problem in sorted(solved):
        for mined in _capped(solved[problem], options, tally):
            example = _example(mined.record, prompts.get(mined.record.prompt_id), options)
            copies = _copies(rates[problem], mined, options)
            tally.added["repeated"] += copies - 1
            name = _name(mined)
            examples += [
                (place_of(options.seed, "order", name, str(i)), example) for i in range(copies)
            ]
    if not examples:
        raise InputError(f"none of {len(rollouts)} rollouts is left: {tally.dropped_text()}")
    mixed = _choose(instructions, len(examples), options)
    tally.added["instruction"] += len(mixed)
    tally.figures = {
        "problems": len(solved),
        "instruction_examples_given": len(instructions),
        "epochs": options.epochs,
        "sft_steps": math.ceil(options.epochs * (len(examples) + len(mixed)) / options.batch_size),
    }
    ordered = [example for _, example in sorted(examples + mixed, key=lambda pair: pair[0])]
    return Outcome(ordered, tally.report(written=len(ordered)))


def _sift(
    rollouts: list[Mined], options: SftExampleOptions, tally: Tally
) -> tuple[dict[str, list[Mined]], dict[str, float]]:
    """Right rollouts by problem, and the pass rate of each problem from first_step on."""
    solved: defaultdict[str, list[Mined]] = defaultdict(list)
    graded: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for mined in rollouts:
        record, problem = mined.record, _problem(mined.record)
        is_early = mined.step < options.first_step
        if record.reward is not None and not is_early:
            graded[problem] += 1
            right[problem] += record.reason == "correct"
        reason = (
            "ungraded" if record.reward is None
            else "early" if is_early
            else "not_correct" if record.reason != "correct"
            else "cut_at_limit" if record.finish_reason == "length"
            else "short" if record.tokens < options.min_tokens
            else ""
        )  # fmt: skip
        if reason:
            tally.drop_item(_name(mined), mined.place, reason)
        else:
            solved[problem].append(mined)
    return solved, {problem: right[problem] / count for problem, count in graded.items()}


def _capped(found: list[Mined], options: SftExampleOptions, tally: Tally) -> list[Mined]:
    """At most so many rollouts of one problem, none with the text of another."""
    kept: list[Mined] = []
    texts: set[str] = set()
    for mined in sorted(found, key=lambda m: (place_of(options.seed, "cap", _name(m)), _name(m))):
        if mined.record.text in texts:
            tally.drop_item(_name(mined), mined.place, "same_text")
        elif len(kept) >= options.per_problem:
            tally.drop_item(_name(mined), mined.place, "over_cap")
        else:
            texts.add(mined.record.text)
            kept.append(mined)
    return kept


def _copies(rate: float, mined: Mined, options: SftExampleOptions) -> int:
    """How often an SFT example is there: upsample_below / rate on average, in [1, max_copies]."""
    wanted = min(max(1.0, options.upsample_below / rate), float(options.max_copies))
    whole = math.floor(wanted)
    return whole + (place_of(options.seed, "copies", _name(mined)) < wanted - whole)


def _example(
    record: RolloutRecord, prompt: Prompt | None, options: SftExampleOptions
) -> SftExample:
    messages = prompt.messages if prompt else [ChatMessage("user", record.problem)]
    tail = "" if options.template_opens_thoughts else record.prompt_tail
    is_program = prompt is not None and prompt.is_program
    return SftExample(messages, with_opening(record.text, tail), record.task, is_program)


def _choose(
    instructions: Sequence[SftExample], examples: int, options: SftExampleOptions
) -> list[tuple[float, SftExample]]:
    """Instruction data beside so many SFT examples, each line at most once. Raises InputError."""
    share = options.instruction_share
    wanted = round(examples * share / (1 - share))
    if wanted > len(instructions):
        raise InputError(
            f"{examples} SFT examples and a share of {share:g} need {wanted} lines of instruction "
            f"data, and {len(instructions)} are given: give more with --instructions, or lower "
            "--instruction-share (0: none)"
        )
    places = [
        (place_of(options.seed, "instruction", str(number)), number)
        for number in range(len(instructions))
    ]
    chosen = [number for _, number in sorted(places)[:wanted]]
    return [(place_of(options.seed, "order", str(n)), instructions[n]) for n in chosen]


def _problem(record: RolloutRecord) -> str:
    return f"{record.prompt_id}\0{record.problem}"


def _name(mined: Mined) -> str:
    return f"{mined.record.prompt_id} group {mined.record.group} index {mined.record.index}"
