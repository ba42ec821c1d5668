"""Prompts of a run: the held-out list, and an endless seeded mixture of train prompts.

Used by the rollout queue, and by tools that need the same split.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.evaluation import EvalSet
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.tree import Config, PromptSource
from megatron_rl.data.dropped_prompts import DROPPED
from megatron_rl.data.epochs import ShuffledEpochs
from megatron_rl.data.kinds import unread_keys
from megatron_rl.data.sources import read_source
from megatron_rl.data.tables.source import Reading
from megatron_rl.protocol.queue_state import PromptCursor
from megatron_rl.protocol.types import Prompt
from verification import settings


@dataclasses.dataclass(frozen=True)
class PromptSets:
    """Prompts of all sources; no train prompt asks the question of a held-out one."""

    train: list[list[Prompt]]
    """By source, in the order of the configuration."""
    weights: list[float]
    """Share of each source in the mixture."""
    held_out: list[Prompt]
    """Sources interleaved, so that the first prompts represent all sources."""
    duplicates_removed: int
    """Train prompts left out because their question is held out."""
    dropped: int = 0
    """Prompts left out because they cannot be rendered."""
    eval_sets: dict[str, list[Prompt]] = dataclasses.field(default_factory=dict)
    """By name, in the order of the configuration."""
    sources: tuple[int, ...] = ()
    """Numbers of the sources with train prompts; empty: all sources."""
    notes: tuple[str, ...] = ()
    """Columns and rows that were read or left out, for the user."""
    files: tuple[Path, ...] = ()
    """Files that were read."""

    def weights_of(self, config: Config) -> list[float]:
        """Weights of the sources with train prompts, by a configuration."""
        if not config.prompts:
            return self.weights
        used = self.sources or range(len(self.train))
        return [config.prompts[source].weight for source in used]

    @property
    def sizes(self) -> list[int]:
        """Numbers of train prompts by source."""
        return [len(prompts) for prompts in self.train]

    @property
    def all(self) -> list[Prompt]:
        """Train and held-out prompts, and those of evaluation sets."""
        return [prompt for prompts in (*self.train, *self.evaluated) for prompt in prompts]

    @property
    def evaluated(self) -> list[list[Prompt]]:
        """The held-out prompts, and those of each evaluation set."""
        return [self.held_out, *self.eval_sets.values()]

    def describe(self) -> str:
        """Counts as one line."""
        train = " + ".join(str(len(prompts)) for prompts in self.train) or "none"
        text = f"prompts: {train} for training, {len(self.held_out)} held out"
        for name, prompts in self.eval_sets.items():
            text += f", {len(prompts)} of the evaluation set {name}"
        if self.duplicates_removed:
            text += (
                f"; {self.duplicates_removed} train prompts removed because their question is "
                "held out" + (" or in an evaluation set" if self.eval_sets else "")
            )
        if self.dropped:
            text += f"; {self.dropped} left out ({DROPPED})"
        return text


@dataclasses.dataclass(frozen=True)
class PromptMaterial:
    """Prompts of all sources, not yet divided into splits."""

    sources: list[PromptSource]
    loaded: list[list[Prompt]]
    """By source."""
    eval_sets: dict[str, list[Prompt]]
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    own_files: tuple[Path, ...] = ()  # of `sources`, in order

    def divide(
        self, dropped: frozenset[str] = frozenset(), *, most_held_out: int | None = None
    ) -> PromptSets:
        """Separate the splits.

        dropped: ids of prompts to leave out, because they cannot be rendered. most_held_out:
        maximum number of held-out prompts, None: no limit. Further spare ones become train prompts.
        A train prompt stays one when prompts are added, which only push others out of the held-out
        list.
        """
        loaded = [[p for p in prompts if p.id not in dropped] for prompts in self.loaded]
        eval_sets = {
            name: [p for p in prompts if p.id not in dropped]
            for name, prompts in self.eval_sets.items()
        }
        apart = _interleave([[p for p in ps if p.split == "held_out"] for ps in self.loaded])
        held_out = [prompt for prompt in apart if prompt.id not in dropped]
        if most_held_out is not None:
            first, later = held_out[:most_held_out], held_out[most_held_out:]
            held_out = first + [prompt for prompt in later if not prompt.is_spare]
        held = {prompt.normalized_question for prompt in held_out}
        for prompts in eval_sets.values():
            held |= {prompt.normalized_question for prompt in prompts}
        # The questions in `held` exclude spare prompts that are held out.
        candidates = [[p for p in ps if p.split == "train" or p.is_spare] for ps in loaded]
        train = [
            [
                msgspec.structs.replace(p, split="train", is_spare=False) if p.is_spare else p
                for p in prompts
                if p.normalized_question not in held
            ]
            for prompts in candidates
        ]
        used = [i for i, prompts in enumerate(train) if prompts]
        whole = [
            prompt for prompts in (*self.loaded, *self.eval_sets.values()) for prompt in prompts
        ]
        chosen = {prompt.id for prompt in held_out}
        return PromptSets(
            [train[i] for i in used],
            [self.sources[i].weight for i in used],
            held_out,
            sum(p.id not in chosen for ps in candidates for p in ps) - sum(map(len, train)),
            dropped=sum(prompt.id in dropped for prompt in whole),
            eval_sets=eval_sets,
            sources=tuple(used),
            notes=self.notes,
            files=self.files,
        )


def read_prompts(
    sources: list[PromptSource],
    seed: int,
    *,
    eval_sets: Sequence[EvalSet] = (),
    reward: RewardConfig | None = None,
) -> PromptMaterial:
    """Read all sources. Raises InputError.

    reward: of the run. Sources with faulty = "drop" lose the prompts that it could not grade.
    """
    if not sources and not eval_sets:
        raise InputError("no prompts are configured: add a [[prompts]] section")
    readings = [
        _without_ungradable(read_source(source, seed, key="prompts.kind"), source, reward)
        for source in sources
    ]
    loaded = _with_unique_ids([reading.prompts for reading in readings])
    loaded = [mark_episodes(prompts, reward) for prompts in loaded]
    evaluated = {}
    for one in eval_sets:
        reading = _read_eval_set(one, seed, reward)
        evaluated[one.name] = mark_episodes(reading.prompts, reward)
        readings.append(reading)
    given = [*sources, *(one.prompts for one in eval_sets)]
    return PromptMaterial(
        sources,
        loaded,
        evaluated,
        notes=tuple(
            note
            for source, reading in zip(given, readings, strict=True)
            for note in (*reading.notes, *unread_keys(source))
        ),
        files=tuple(dict.fromkeys(file for reading in readings for file in reading.files)),
        own_files=tuple(file for reading in readings[: len(sources)] for file in reading.files),
    )


def mark_episodes(prompts: Sequence[Prompt], reward: RewardConfig | None) -> list[Prompt]:
    """The prompts; those whose task's environment decides the reward know it."""
    tasks = reward.tasks.items() if reward else ()
    games = {name for name, task in tasks if task.is_decided_by_environment}
    return [
        msgspec.structs.replace(prompt, is_episode=True) if prompt.task in games else prompt
        for prompt in prompts
    ]


def _without_ungradable(
    reading: Reading, source: PromptSource, reward: RewardConfig | None
) -> Reading:
    """The prompts that the run's rewards can grade, where the source drops others by count."""
    if reward is None or source.faulty == "refuse":
        return reading
    found = [(prompt, settings.find_fault(prompt, reward)) for prompt in reading.prompts]
    kept = [prompt for prompt, fault in found if fault is None]
    faults = [fault for _, fault in found if fault is not None]
    if not faults:
        return reading
    if not kept:
        raise InputError(f"{faults[0].text}; prompts.faulty='drop' would leave no prompt")
    counts = Counter(fault.reason for fault in faults).most_common()
    named = ", ".join(f"{count} {reason}" for reason, count in counts)
    note = f"prompts left out: {named} (first {faults[0].text})"
    return reading._replace(prompts=kept, notes=[*reading.notes, note])


def prompts_of_run(
    config: Config, dropped: frozenset[str] = frozenset(), *, cursor: PromptCursor | None = None
) -> PromptSets:
    """The prompts of a run; see `divide_for_run`. Raises InputError."""
    return divide_for_run(material_of_run(config), config, dropped, cursor=cursor)


def divide_for_run(
    material: PromptMaterial,
    config: Config,
    dropped: frozenset[str] = frozenset(),
    *,
    cursor: PromptCursor | None = None,
) -> PromptSets:
    """The prompts of a run without the dropped ones, by id. Raises InputError.

    cursor: of a resumed run. A run that began without the limit of held-out prompts keeps its rule.
    """
    sets = material.divide(dropped, most_held_out=most_held_out(config))
    if cursor is not None and cursor.sizes != sets.sizes:
        earlier = material.divide(dropped)
        if cursor.sizes == earlier.sizes:
            return earlier
    return sets


def material_of_run(config: Config) -> PromptMaterial:
    """All prompts of a run, not yet divided. Raises InputError.

    A cold start alone needs none.
    """
    if not (config.prompts or config.eval.sets or config.train.steps or config.eval.is_wanted):
        return PromptMaterial([], [], {}, (), ())
    return read_prompts(
        config.prompts, config.run.seed, eval_sets=config.eval.sets, reward=config.reward
    )


def most_held_out(config: Config) -> int:
    """Maximum number of held-out prompts that an evaluation uses, not counting its sets."""
    return config.eval.most_held_out(
        chooses=bool(config.sft.candidates and not config.sft.choose_by)
    )


def _read_eval_set(wanted: EvalSet, seed: int, reward: RewardConfig | None) -> Reading:
    """Prompts of an evaluation set; their ids begin with its name. Raises InputError."""
    # The trainer uses no row of an evaluation set.
    source = wanted.prompts.model_copy(update={"held_out_share": 1.0, "train_size": 0})
    try:
        reading = read_source(source, seed, key="prompts.kind")
        reading = _without_ungradable(reading, source, reward)
    except InputError as error:
        # Its keys are those of [[prompts]].
        raise InputError(f"eval.sets, {wanted.name}: {error}") from error
    _check_ids(reading.prompts, f"the evaluation set {wanted.name!r}")
    prompts = [
        msgspec.structs.replace(prompt, id=f"{wanted.name}/{prompt.id}")
        for prompt in reading.prompts
        if prompt.split == "held_out"
    ]
    if len(prompts) < (wanted.problems or 1):
        lower = ", or lower eval.sets.problems" if wanted.problems else ""
        raise InputError(
            f"the evaluation set {wanted.name!r} has {len(prompts)} prompts that may be evaluated "
            f'on, expected {wanted.problems or "one or more"}: add lines (those of "split": '
            f'"train" do not count){lower}'
        )
    return reading._replace(prompts=prompts[: wanted.problems])


def _with_unique_ids(loaded: list[list[Prompt]]) -> list[list[Prompt]]:
    """The prompts; ids that an earlier source uses get a prefix.

    Raises InputError for a repeated id inside a source.
    """
    seen: set[str] = set()
    result = []
    for number, prompts in enumerate(loaded):
        _check_ids(prompts, f"prompts, source {number}")
        if not seen.isdisjoint(prompt.id for prompt in prompts):
            prompts = [msgspec.structs.replace(p, id=f"{number}:{p.id}") for p in prompts]
        seen |= {prompt.id for prompt in prompts}
        result.append(prompts)
    return result


def _check_ids(prompts: list[Prompt], source: str) -> None:
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if (other := first.setdefault(prompt.id, prompt)) is not prompt:
            where = f" ({other.place} and {prompt.place})" if prompt.place else ""
            raise InputError(f"{source}: id {prompt.id!r} occurs twice{where}")


def _interleave(lists: list[list[Prompt]]) -> list[Prompt]:
    longest = max((len(items) for items in lists), default=0)
    return [items[i] for i in range(longest) for items in lists if i < len(items)]


class MayDraw(Protocol):
    """The prompts that may be drawn."""

    def __call__(self, prompt: Prompt) -> bool:
        """Whether a prompt may be drawn."""

    def count(self, source: int) -> int:
        """Number of a source's prompts that may be drawn."""


class PromptStream:
    """Endless train prompts: a source by weight, then the next of its shuffled epoch.

    The n-th prompt depends only on seed, n, the prompts, the weights and the skipped prompts, so a
    restored stream continues exactly.
    """

    def __init__(self, sets: PromptSets, seed: int) -> None:
        self._sets = sets
        self._seed = seed
        self.draws = 0
        """Number of drawn prompts."""
        self._taken = [0] * len(sets.train)
        self._epochs = [
            ShuffledEpochs(len(prompts), f"{seed}/epoch/{source}")
            for source, prompts in enumerate(sets.train)
        ]

    def next(
        self, weights: Sequence[float] | None = None, may_draw: MayDraw | None = None
    ) -> Prompt:
        """The next train prompt. Raises InputError without one.

        weights: of the sources; None: the configuration's. may_draw: prompts that are not skipped;
        None: all.
        """
        if not self._sets.train:
            raise InputError(
                'there are no train prompts: lines need "split": "train", and a question that '
                "is not held out"
            )
        weights = list(self._sets.weights if weights is None else weights)
        if may_draw is not None:
            weights = [w * bool(may_draw.count(place)) for place, w in enumerate(weights)]
        if not any(weights):
            raise InputError(
                "no source with a weight above 0 has a train prompt that may be drawn: raise "
                "prompts.weight, or the weight that the stage gives, or lower curriculum.bands"
            )
        chance = random.Random(f"{self._seed}/draw/{self.draws}")
        source = chance.choices(range(len(weights)), weights=weights)[0]
        self.draws += 1
        while True:
            index = self._epochs[source].at(self._taken[source])
            self._taken[source] += 1
            prompt = self._sets.train[source][index]
            # Ends within two epochs: the source has a prompt that may be drawn.
            if may_draw is None or may_draw(prompt):
                return prompt

    def state(self) -> PromptCursor:
        return PromptCursor(self.draws, list(self._taken), self._sets.sizes, self._seed)

    def restore(self, cursor: PromptCursor) -> None:
        """Continue at a position of the same prompts. Raises InputError."""
        sizes = self._sets.sizes
        if (cursor.sizes, cursor.seed) != (sizes, self._seed):
            raise InputError(
                f"the saved prompt cursor is for {len(cursor.sizes)} sources of {cursor.sizes} "
                f"train prompts with run.seed={cursor.seed}; this run has {len(sizes)} of "
                f"{sizes} with run.seed={self._seed}: resume with the prompts and the seed "
                "of the saved run, its eval.prompts and its limits of tokens, by which prompts are "
                "held out or left out"
            )
        self.draws = cursor.draws
        self._taken = list(cursor.taken)
