"""Makes prompts and SFT examples of the example tasks, `sort` and `chain_sum`.

Used by `python -m megatron_rl.data.tiny` and tools/make_tasks.py; runs in no process of a run. A
folder gets prompts.jsonl (train and held-out lines) and sft.jsonl. Train prompts, held-out prompts
and SFT examples share no question. The teacher makes a mistake in a given share of the SFT
examples, so that reinforcement learning can improve on it.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import PromptSource
from megatron_rl.data.sources import load_reasoning_gym
from megatron_rl.protocol.types import ChatMessage, Prompt
from megatron_rl.protocol.whole_file import write_whole

CHAIN_SUM_PREFIX = "State the final answer to the following arithmetic problem: "
SORT_DIGITS = 5
SORT_HELD_OUT_SEED = 777
_TERM = re.compile(r"[-+]?\s*\d+")


@dataclass(frozen=True)
class Sizes:
    """Numbers of questions and of wrong SFT examples."""

    train: int
    held_out: int
    sft_examples: int
    wrong_share: float
    """Share of the SFT examples with the teacher's mistake, in [0, 1]."""
    seed: int
    """Seed of train questions and SFT examples; held-out questions do not depend on it."""


@dataclass(frozen=True)
class Solved:
    """Thoughts and boxed answer of an SFT example."""

    thoughts: str
    answer: str


Solve = Callable[[Prompt, random.Random | None], Solved]
"""Solution of a prompt; with a random generator, one with the teacher's mistake."""


def write_tasks(
    out: Path, prompts: list[Prompt], *, teaching: list[Prompt], solve: Solve, sizes: Sizes
) -> None:
    """Write prompts.jsonl, and sft.jsonl from the prompts `teaching`."""
    out.mkdir(parents=True, exist_ok=True)
    write_lines(out / "prompts.jsonl", [_prompt_line(prompt) for prompt in prompts])
    rng = random.Random(f"{sizes.seed}/mistakes")
    wrong = set(rng.sample(range(len(teaching)), round(sizes.wrong_share * len(teaching))))
    lines = []
    for index, prompt in enumerate(teaching):
        solved = solve(prompt, rng if index in wrong else None)
        assert index in wrong or solved.answer == prompt.answer, prompt
        response = f"<think>{solved.thoughts}</think>\\boxed{{{solved.answer}}}"
        messages = msgspec.to_builtins(prompt.messages)
        lines.append({"id": f"example/{index}", "messages": messages, "response": response})
    write_lines(out / "sft.jsonl", lines)


def _prompt_line(prompt: Prompt) -> dict[str, object]:
    line = msgspec.to_builtins(prompt)
    return {key: value for key, value in line.items() if key not in ("entry", "pass_rate") or value}


def write_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """Write a JSONL file, as a whole or not at all."""
    write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))


# --- sort: put five different digits in order -------------------------------------------------


def make_sort(sizes: Sizes) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts of both splits, prompts of SFT examples). Raises InputError for too few strings."""
    held_out = _take(_digit_strings(random.Random(SORT_HELD_OUT_SEED)), sizes.held_out, set())
    stream = _digit_strings(random.Random(sizes.seed))
    train = _take(stream, sizes.train + sizes.sft_examples, set(held_out))
    prompts = [_sort_prompt(digits, "held_out") for digits in held_out]
    prompts += [_sort_prompt(digits, "train") for digits in train[sizes.sft_examples :]]
    return prompts, [_sort_prompt(digits, "train") for digits in train[: sizes.sft_examples]]


def solve_sort(prompt: Prompt, mistake: random.Random | None) -> Solved:
    """No thoughts; the teacher's mistake is the descending order."""
    return Solved("", prompt.answer[::-1] if mistake else prompt.answer)


def _digit_strings(rng: random.Random) -> Iterator[str]:
    while True:
        yield "".join(rng.sample("0123456789", SORT_DIGITS))


def _take(stream: Iterator[str], count: int, taken: set[str]) -> list[str]:
    """The next `count` strings that differ from each other and from `taken`."""
    available = 10 * 9 * 8 * 7 * 6 - len(taken)
    if count > available:
        raise InputError(f"sort has {available} more questions, fewer than the {count} asked for")
    found: dict[str, None] = {}
    while len(found) < count:
        digits = next(stream)
        if digits not in taken:
            found[digits] = None
    return list(found)


def _sort_prompt(digits: str, split: str) -> Prompt:
    return Prompt(
        id=f"sort/{digits}",
        task="exact",
        messages=[ChatMessage("user", f"sort {digits}=")],
        answer="".join(sorted(digits)),
        split=split,
    )


# --- chain_sum: reasoning_gym's sums and differences of a few numbers -------------------------


def make_chain_sum(
    sizes: Sizes, source: PromptSource, *, teaching_options: dict[str, int]
) -> tuple[list[Prompt], list[Prompt]]:
    """(prompts of both splits, prompts of SFT examples). Raises InputError for too few questions.

    teaching_options: options of the data set for the SFT examples.
    """
    wanted = sizes.train + sizes.sft_examples
    update = {"held_out_size": sizes.held_out, "train_size": wanted}
    prompts = load_reasoning_gym(source.model_copy(update=update), sizes.seed)
    taken = {prompt.normalized_question for prompt in prompts if prompt.split == "held_out"}
    if teaching_options == source.options:
        # From the same draw: a second draw would repeat its questions where few exist.
        teaching = [prompt for prompt in prompts if prompt.split == "train"][: sizes.sft_examples]
    else:
        options = {"options": teaching_options, "held_out_size": 0, "train_size": wanted}
        drawn = load_reasoning_gym(source.model_copy(update=options), sizes.seed)
        teaching = [p for p in drawn if p.normalized_question not in taken][: sizes.sft_examples]
    taught = {prompt.normalized_question for prompt in teaching}
    train = [p for p in prompts if p.split == "train" and p.normalized_question not in taught]
    if len(teaching) < sizes.sft_examples or not train:
        raise InputError(
            f"chain_sum of these sizes has too few different questions for {sizes.held_out} "
            f"held-out ones, {sizes.sft_examples} SFT examples and training: raise the terms or "
            "digits, or ask for fewer"
        )
    held_out = [prompt for prompt in prompts if prompt.split == "held_out"]
    return held_out + train[: sizes.train], teaching


def compact(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts without spaces: in many tokenizers " 7" is two tokens and "7" is one."""
    return [
        msgspec.structs.replace(
            prompt,
            messages=[ChatMessage(m.role, m.content.replace(" ", "")) for m in prompt.messages],
        )
        for prompt in prompts
    ]


def chain_sum_solver(template: str, mistake_name: str) -> Solve:
    """A solver that thinks in partial sums; its wrong solutions make a mistake of MISTAKES."""
    before, after = template.split("{question}")
    make_mistake = MISTAKES[mistake_name]

    def solve(prompt: Prompt, mistake: random.Random | None) -> Solved:
        content = prompt.messages[-1].content
        question = content[len(before) : len(content) - len(after)]
        terms = [int(term.replace(" ", "")) for term in _TERM.findall(question)]
        assert sum(terms) == int(prompt.answer), prompt
        return make_mistake(terms, mistake) if mistake else partial_sums(terms, [0] * len(terms))

    return solve


def partial_sums(terms: list[int], errors: list[int]) -> Solved:
    """One line per term, as in "12+7=19"; errors[i] is added to the result for terms[i]."""
    total, lines = terms[0], []
    for term, error in zip(terms[1:], errors[1:], strict=True):
        result = total + term + error
        # No spaces: in many tokenizers a space before a digit is a separate token.
        lines.append(f"{total}{'-' if term < 0 else '+'}{abs(term)}={result}")
        total = result
    return Solved("\n".join(lines), str(total))


def slip(terms: list[int], rng: random.Random) -> Solved:
    """One step is off by a little."""
    errors = [0] * len(terms)
    errors[rng.randrange(1, len(terms))] = rng.choice([-10, -2, -1, 1, 2, 10])
    return partial_sums(terms, errors)


def wrong_sign(terms: list[int], rng: random.Random) -> Solved:
    """One step adds what it should subtract, or the reverse."""
    index = rng.choice([i for i in range(1, len(terms)) if terms[i]] or [0])
    if index == 0:
        return slip(terms, rng)
    errors = [0] * len(terms)
    errors[index] = -2 * terms[index]
    return partial_sums(terms, errors)


def drop_last(terms: list[int], rng: random.Random) -> Solved:
    """The last term is left out; right all the same when that is 0."""
    return partial_sums(terms[:-1], [0] * (len(terms) - 1))


MISTAKES: dict[str, Callable[[list[int], random.Random], Solved]] = {
    "slip": slip,
    "wrong_sign": wrong_sign,
    "drop_last": drop_last,
}
