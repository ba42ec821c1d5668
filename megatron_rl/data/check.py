"""Finds faults of prompts, each with its file and row, for `megatron-rl data check`.

A fault is a prompt that a run would refuse, leave out, grade wrongly or leak. The code of the run
finds it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_rl.config.hf_config import positions_of
from megatron_rl.config.prompts import PromptSource
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.staging import longest_stage
from megatron_rl.config.tree import Config
from megatron_rl.data.dropped_prompts import try_rendering
from megatron_rl.data.own_systems import describe_own_systems
from megatron_rl.data.prompts import mark_episodes
from megatron_rl.data.repeats import OTHER_ANSWER, REPEATED, answer_of
from megatron_rl.data.sources import read_source
from megatron_rl.data.tables.rows import RowFault
from megatron_rl.protocol.prompt import normalized
from megatron_rl.protocol.render import read_values
from megatron_rl.protocol.tokenizer_child import call_in_child
from megatron_rl.protocol.types import Prompt
from verification import settings
from verification.math.answer import find_illegible

Fault = RowFault
UNKNOWN_TASK = settings.UNKNOWN_TASK
CONTAINED_WORDS = 8
"""An evaluation question of fewer words counts only as a whole prompt, not inside another."""
_READING_S = 600.0


class Part(NamedTuple):
    """The prompts of one source, or of one evaluation set."""

    name: str
    """That of the evaluation set; empty: [[prompts]]."""
    prompts: list[Prompt]
    faults: list[Fault]

    @property
    def first_faults(self) -> dict[str, str]:
        """The reason of each faulty row's first fault, by place."""
        found: dict[str, str] = {}
        for fault in self.faults:
            found.setdefault(fault.place, fault.reason)
        return found

    @property
    def faultless(self) -> int:
        """Number of prompts without a fault."""
        faulty = self.first_faults
        return sum(_name(prompt) not in faulty for prompt in self.prompts)


class Findings(NamedTuple):
    parts: list[Part]
    notes: list[str]
    """Columns and rows read, system messages that ask for another form, checks left out."""

    @property
    def faults(self) -> list[Fault]:
        """All faults; a row may have several."""
        return [fault for part in self.parts for fault in part.faults]

    @property
    def faultless(self) -> int:
        """Number of prompts without a fault."""
        return sum(part.faultless for part in self.parts)

    @property
    def counts(self) -> Counter[str]:
        """Number of faulty rows by the reason of their first fault."""
        return Counter(reason for part in self.parts for reason in part.first_faults.values())


def check_prompts(config: Config, *, with_lengths: bool) -> Findings:
    """Every fault of the prompts and evaluation sets of a configuration.

    with_lengths: render prompts with the tokenizer of model.path. Raises InputError where a source
    as a whole cannot be read.
    """
    notes: list[str] = []
    parts: list[Part] = []
    for name, source, allowed in _sources(config):
        faults: list[Fault] = []
        reading = read_source(source, config.run.seed, key="prompts.kind", on_fault=faults.append)
        notes += reading.notes
        repetitions = _repetitions(reading.prompts)
        faults += [fault for fault in repetitions if fault.reason not in allowed]
        # Repetitions come first, as a run leaves them out before it looks at tasks.
        parts.append(Part(name, mark_episodes(reading.prompts, config.reward), faults))
    questions = _Questions([part for part in parts if part.name])
    for part in parts:
        part.faults.extend(_grading_faults(part.prompts, config.reward))
        if not part.name:
            part.faults.extend(_leaks(part.prompts, questions))
    prompts = [prompt for part in parts for prompt in part.prompts]
    notes += filter(None, [describe_own_systems(prompts, config)])
    if with_lengths:
        positions = positions_of(read_values(config.model.path / "config.json"))
        if positions is not None and positions >= config.generator.context_tokens:
            positions = None
        if positions is not None:
            notes.append(_describe_positions(positions, config))
        for part, fault in _lengths(parts, config, positions):
            part.faults.append(fault)
    else:
        notes.append("not checked: how long prompts are; give --model DIR, for its tokenizer")
    return Findings(parts, notes)


def _sources(config: Config) -> Iterator[tuple[str, PromptSource, set[str]]]:
    """(name of the evaluation set or "", source, reasons that are no faults there)."""
    held_out = {"held_out_share": 1.0, "train_size": 0}
    given = [("", source, {}) for source in config.prompts]
    given += [(one.name, one.prompts, held_out) for one in config.eval.sets]
    settings.check_sources([source for _, source, _ in given])
    settings.check_functions(config.reward)
    for name, source, update in given:
        allowed = {REPEATED, OTHER_ANSWER} if source.repeated == "keep" else set()
        # A run leaves repeated rows out; here each is a fault with its place.
        yield name, source.model_copy(update={"repeated": "keep", **update}), allowed


def _grading_faults(prompts: Sequence[Prompt], reward: RewardConfig) -> Iterator[Fault]:
    """Prompts whose completions could not be graded, or hardly."""
    tasks = reward.all_tasks
    mathematical: list[Prompt] = []
    for prompt in prompts:
        place = _name(prompt)
        fault = settings.find_fault(prompt, reward)
        if fault is not None:
            yield Fault(place, fault.reason, _after_place(fault.text, place))
            continue
        if tasks[prompt.task].compare == "math":
            mathematical.append(prompt)
    yield from _unreadable(mathematical)


def _unreadable(prompts: Sequence[Prompt]) -> Iterator[Fault]:
    """Prompts with an accepted answer that our grammar cannot read."""
    answers = [(prompt, answer) for prompt in prompts for answer in prompt.answers]
    if not answers:
        return
    texts = [answer for _, answer in answers]
    # In a child: a hostile answer may keep the parser busy.
    found = call_in_child(find_illegible, texts, what="reading the answers", limit_s=_READING_S)
    for index, why in found.items():
        prompt, answer = answers[index]
        place = _name(prompt)
        yield Fault(place, "unreadable_answer", f"{place}: the answer {answer[:200]!r}: {why}")


def _repetitions(prompts: Sequence[Prompt]) -> Iterator[Fault]:
    """Prompts with the question, or the id, of an earlier one."""
    first: dict[str, Prompt] = {}
    ids: dict[str, Prompt] = {}
    for prompt in prompts:
        place = _name(prompt)
        other = first.setdefault(prompt.normalized_question, prompt)
        if other is not prompt:
            same = answer_of(other) == answer_of(prompt)
            reason = REPEATED if same else OTHER_ANSWER
            if same and other.split != prompt.split:
                reason = "in_both_splits"
            answers = "" if same else f" with the answer {other.answer[:100]!r}"
            yield Fault(place, reason, f"{place}: the question is that of {_name(other)}{answers}")
        known = ids.setdefault(prompt.id, prompt)
        if known is not prompt:
            text = f"{place}: the id {prompt.id!r} is that of {_name(known)}"
            yield Fault(place, "repeated_id", text)


def _leaks(trained: Iterable[Prompt], questions: "_Questions") -> Iterator[Fault]:
    """Prompts that ask or contain a question of an evaluation set; no episodes of environments."""
    for prompt in trained:
        if prompt.is_episode:
            continue
        found = questions.find(prompt)
        if found is None:
            continue
        name, other, is_whole = found
        place = _name(prompt)
        how = "the question is that of" if is_whole else "it holds the question of"
        yield Fault(
            place, "in_evaluation_set", f"{place}: {how} {_name(other)} of the set {name!r}"
        )


class _Questions:
    """Questions of evaluation sets, found as a whole or by their first words."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._whole: dict[str, tuple[str, Prompt]] = {}
        self._by_start: dict[tuple[str, ...], list[tuple[str, str, Prompt]]] = {}
        for part in parts:
            for prompt in part.prompts:
                if prompt.is_episode:
                    continue
                self._whole.setdefault(prompt.normalized_question, (part.name, prompt))
                text = normalized(prompt.question)
                words = text.split()
                if len(words) >= CONTAINED_WORDS:
                    start = tuple(words[:CONTAINED_WORDS])
                    self._by_start.setdefault(start, []).append((text, part.name, prompt))

    def find(self, prompt: Prompt) -> tuple[str, Prompt, bool] | None:
        """(set, its prompt, whether the questions are equal) for a leaked question."""
        whole = self._whole.get(prompt.normalized_question)
        if whole is not None:
            return *whole, True
        text = prompt.normalized_question
        words = text.split()
        for at in range(len(words) - CONTAINED_WORDS + 1) if self._by_start else ():
            for question, name, other in self._by_start.get(
                tuple(words[at : at + CONTAINED_WORDS]), ()
            ):
                if question in text:
                    return name, other, False
        return None


def _describe_positions(positions: int, config: Config) -> str:
    return (
        f"note: the model has {positions} positions (max_position_embeddings), fewer than "
        f"generator.context_tokens = {config.generator.context_tokens}: only prompts that leave no "
        "room for one token are counted as too long. Lower generator.context_tokens and "
        "sampling.max_new_tokens for a run"
    )


def _lengths(
    parts: Sequence[Part], config: Config, positions: int | None
) -> Iterator[tuple[Part, Fault]]:
    """Parts with prompts that leave no room for a completion, or that the chat template refuses.

    positions: of the model; None: generator.context_tokens has the limit.
    """
    known = config.reward.all_tasks
    limits: dict[str, int] = {}
    prompts: list[Prompt] = []
    for number, part in enumerate(parts):
        for prompt in part.prompts:
            if prompt.task in known:
                # Sources may use the same ids.
                name = f"{number}:{prompt.id}"
                prompts.append(_renamed(prompt, name))
                if part.name:
                    limits[name] = _limit(part.name, config)
    if positions is not None:
        generator = config.generator.model_copy(update={"context_tokens": positions})
        config = config.model_copy(update={"generator": generator})
        limits = {prompt.id: 1 for prompt in prompts}
    for dropped in try_rendering(prompts, config, limits).dropped:
        reason = "too_long" if "tokens; allowed" in dropped.reason else "not_rendered"
        text = dropped.reason
        if reason == "too_long" and positions is not None:
            text = f"{text.partition(' = ')[0]}: the model has {positions} positions"
        part = parts[int(dropped.id.partition(":")[0])]
        yield part, Fault(dropped.where, reason, f"{dropped.where}: {text}")


def _limit(name: str, config: Config) -> int:
    chosen = next(one for one in config.eval.sets if one.name == name)
    limit = chosen.max_new_tokens or config.eval.max_new_tokens
    return limit or longest_stage(config).sampling.max_new_tokens


def _renamed(prompt: Prompt, name: str) -> Prompt:
    return Prompt(name, prompt.task, prompt.messages, prompt.answer, place=_name(prompt))


def _name(prompt: Prompt) -> str:
    return prompt.place or f"prompt {prompt.id!r}"


def _after_place(text: str, place: str) -> str:
    return text if text.startswith(place) else f"{place}: {text}"
