"""`data sft`: selects rollouts of a run as SFT examples, for the cold start of another model.

It takes right rollouts of training, not of evaluations, whose prompts are held out. Each problem
gives a few, problems with a low pass rate more, and a share of instruction data is mixed in.
`[sft] dataset` reads the output (`trainer/sft_dataset.py`).

Source: Magistral (arXiv 2506.10910), on Magistral Small: correct SFT examples of the larger model's
RL run without early short ones, capped per problem, low pass rates upsampled, 10 % instruction
data, 4 epochs. The numbers of kept and repeated examples are ours.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import HOUSE_TAGS, ThinkTags
from megatron_rl.curation.tool import Drop, Outcome, Report, check_at_least, check_share, place_of
from megatron_rl.protocol.prompt import normalized
from megatron_rl.protocol.rollout import TOOLS
from megatron_rl.protocol.rollout_files import RolloutRecord, read_records, rollout_files
from megatron_rl.protocol.types import ChatMessage, Prompt
from megatron_rl.trainer.sft_dataset import SftExample
from megatron_rl.trainer.sft_messages import SftMessage
from verification.format import with_opening

_GIVEN_ROLES = {"system", "user", "tool", TOOLS}


@dataclass(frozen=True)
class SftExampleOptions:
    """Rules for rollouts that become SFT examples."""

    first_step: int = 0
    """Number of first batches to leave out."""
    min_tokens: int = 0
    """Minimum tokens of a completion."""
    per_problem: int = 4
    """Maximum SFT examples of a problem, before repetition."""
    upsample_below: float = 0.5
    """Examples of a problem with a pass rate r below this value occur upsample_below / r times."""
    max_copies: int = 4
    """Maximum copies of an SFT example."""
    instruction_share: float = 0.1
    """Share of instruction data in the output."""
    epochs: int = 4
    """Epochs of the cold start, for the report's number of steps."""
    batch_size: int = 32
    """SFT examples per step of the cold start (sft.batch_size)."""
    template_opens_thoughts: bool = False
    """Let responses begin after the opening think tag, for a chat template that ends prompts with
    it. Else responses get the tag that the run's template opened."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_share("--upsample-below", self.upsample_below)
        check_share("--instruction-share", self.instruction_share, high=0.9)
        for name in ("first_step", "min_tokens"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 0)
        for name in ("per_problem", "max_copies", "epochs", "batch_size"):
            check_at_least(f"--{name.replace('_', '-')}", getattr(self, name), 1)


class Mined(NamedTuple):
    """A rollout and its place."""

    record: RolloutRecord
    step: int
    """Step of its batch; of a dropped rollout, the next batch."""
    place: str


def read_training_rollouts(run_dir: Path) -> Iterator[Mined]:
    """Rollouts of a run's training, including those of dropped groups. Raises InputError."""
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
    prompts: Iterable[Prompt],
    options: SftExampleOptions,
    tags: ThinkTags = HOUSE_TAGS,
) -> Outcome:
    """SFT examples of right rollouts and instruction data, shuffled by the seed.

    prompts: for messages before the question, which records lack. tags: think tags of the run.
    Raises InputError if no rollout is left, or for too few instructions.
    """
    known = _by_problem(prompts)
    rollouts = list(rollouts)
    report = Report("sft", asdict(options), read=len(rollouts))
    solved, rates = _sift(rollouts, options, report)
    examples: list[tuple[float, SftExample]] = []
    for problem in sorted(solved):
        for mined in _capped(solved[problem], options, report):
            tail = "" if options.template_opens_thoughts else mined.record.prompt_tail
            opened = partial(with_opening, prompt_tail=tail, tags=tags)
            example = _example(mined.record, _find_prompt(mined.record, known), opened)
            copies = _copies(rates[problem], mined, options)
            report.added["repeated"] += copies - 1
            name = _name(mined)
            examples += [
                (place_of(options.seed, "order", name, str(i)), example) for i in range(copies)
            ]
    if not examples:
        counts = ", ".join(f"{count} {reason}" for reason, count in report.count_drops().items())
        raise InputError(
            f"none of {len(rollouts)} rollouts is left: {counts or 'nothing was dropped'}"
        )
    mixed = _choose(instructions, len(examples), options)
    report.added["instruction"] += len(mixed)
    report.figures = {
        "problems": len(solved),
        "instruction_examples_given": len(instructions),
        "epochs": options.epochs,
        "sft_steps": math.ceil(options.epochs * (len(examples) + len(mixed)) / options.batch_size),
    }
    ordered = [example for _, example in sorted(examples + mixed, key=lambda pair: pair[0])]
    return report.outcome(ordered)


def _sift(
    rollouts: list[Mined], options: SftExampleOptions, report: Report
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
            else "empty_reply" if not _last_text(record).strip()
            else _why_no_line(record)
            or ("short" if record.tokens < options.min_tokens else "")
        )  # fmt: skip
        if reason:
            report.drops.append(Drop(_name(mined), mined.place, reason))
        else:
            solved[problem].append(mined)
    return solved, {problem: right[problem] / count for problem, count in graded.items()}


def _capped(found: list[Mined], options: SftExampleOptions, report: Report) -> list[Mined]:
    """At most per_problem rollouts of one problem, with distinct texts."""
    kept: list[Mined] = []
    texts: set[str] = set()
    for mined in sorted(found, key=lambda m: (place_of(options.seed, "cap", _name(m)), _name(m))):
        if mined.record.text in texts:
            report.drops.append(Drop(_name(mined), mined.place, "same_text"))
        elif len(kept) >= options.per_problem:
            report.drops.append(Drop(_name(mined), mined.place, "over_cap"))
        else:
            texts.add(mined.record.text)
            kept.append(mined)
    return kept


def _copies(rate: float, mined: Mined, options: SftExampleOptions) -> int:
    """Copies of an SFT example: upsample_below / rate on average, in [1, max_copies]."""
    wanted = min(max(1.0, options.upsample_below / rate), float(options.max_copies))
    whole = math.floor(wanted)
    return whole + (place_of(options.seed, "copies", _name(mined)) < wanted - whole)


def _last_text(record: RolloutRecord) -> str:
    """What the policy said last."""
    return record.conversation[-1].text if record.conversation else record.text


def _why_no_line(record: RolloutRecord) -> str:
    """Why a rollout is not one chat whose replies are all the policy's, as SFT examples are."""
    turns = record.conversation
    if not turns:
        # An earlier release did not record its turns.
        return "conversation" if record.sampled_tokens < record.tokens else ""
    if [turn.follows for turn in turns] != list(range(-1, len(turns) - 1)):
        return "several_chats"
    roles = {given.role for turn in turns for given in turn.given}
    return "" if roles <= _GIVEN_ROLES else "other_roles"


def _example(
    record: RolloutRecord, prompt: Prompt | None, opened: Callable[[str], str]
) -> SftExample:
    """opened: a reply with the tag that the chat template opens."""
    if turns := record.conversation:
        messages, tools = [], []
        for turn in turns:
            for given in turn.given:
                if given.role == TOOLS:
                    tools = msgspec.json.decode(given.content)
                else:
                    messages.append(SftMessage(given.role, given.content))
            # An empty message teaches nothing but to end.
            weight = None if turn.text.strip() else 0
            messages.append(SftMessage("assistant", opened(turn.text), weight=weight))
        response = messages.pop().text
        return SftExample(messages, response, record.task, learns_all=True, tools=tools)
    response = opened(record.text)
    asked = prompt.messages if prompt else [ChatMessage("user", record.problem)]
    messages = [SftMessage(message.role, message.content) for message in asked]
    is_program = prompt is not None and prompt.is_program
    return SftExample(messages, response, record.task, is_program)


def _by_problem(prompts: Iterable[Prompt]) -> dict[tuple[str, str], Prompt]:
    """Prompts by (id, question), and by ("", question) where no other prompt has that question."""
    prompts = list(prompts)
    questions = [normalized(prompt.question) for prompt in prompts]
    count = Counter(questions)
    found = dict[tuple[str, str], Prompt]()
    for prompt, question in zip(prompts, questions, strict=True):
        found[prompt.id, question] = prompt
        if count[question] == 1:
            found["", question] = prompt
    return found


def _find_prompt(record: RolloutRecord, known: Mapping[tuple[str, str], Prompt]) -> Prompt | None:
    """The prompt of a record, by id and question; by the question alone if the id is another.

    A run puts the number of a later source before its ids, and line numbers change with the file.
    """
    question = normalized(record.problem)
    return known.get((record.prompt_id, question)) or known.get(("", question))


def _choose(
    instructions: Sequence[SftExample], examples: int, options: SftExampleOptions
) -> list[tuple[float, SftExample]]:
    """(place in the order, line) of instruction data for `examples`, each line at most once."""
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
