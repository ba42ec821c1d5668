"""Makes the prompts and SFT examples of the studies on the tiny model: two trained skills, one held
back.

`python -m tools.make_skills OUT_DIR [--seed S]` writes, into OUT_DIR,

| file | holds |
|---|---|
| `math.jsonl` | put five digits in order; task `exact`, train and held-out lines |
| `code.jsonl` | write a program that adds its input to the digits in order; task `code`, the same |
| `instructions.jsonl` | copy digits, turn them round, name the first or last; to evaluate on |
| `sft.jsonl` | of a teacher whose order is descending in --wrong-share of its answers |
| `expert.jsonl` | of a better one, in --expert-wrong-share |
| `instruction_examples.jsonl` | instructions that are followed |

Runs in no process of a run. No five digits are in two of them, but for the last file, whose lines
are in the two files before it as well: what is measured is not what was taught. The digits have no
0: a number of a program does not begin with one.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, permutations
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.whole_file import write_whole

Line = dict[str, object]

PROGRAM = "```python\nprint({digits}+int(input()))\n```"
INPUTS = (1, 40)
"""What the tests of a program put in; each expects the sum of it and the digits in order."""


@dataclass(frozen=True)
class Counts:
    """How many lines of each kind, and how often each teacher is wrong."""

    train: int = 3000
    """Of each trained skill."""
    held_out: int = 300
    """Of each trained skill, and instructions to evaluate on."""
    sft_examples: int = 400
    """Of each trained skill, for each teacher."""
    followed: int = 1200
    """SFT examples of instructions: they are told apart by a word alone, and need more."""
    wrong_share: float = 0.6
    expert_wrong_share: float = 0.1


def ordered(digits: str) -> str:
    """In ascending order."""
    return "".join(sorted(digits))


INSTRUCTIONS: dict[str, Callable[[str], str]] = {
    "copy": lambda digits: digits,
    "back": lambda digits: digits[::-1],
    "head": lambda digits: digits[0],
    "tail": lambda digits: digits[-1],
}


def math_line(digits: str) -> Line:
    """A prompt to put the digits in order."""
    return {"id": f"math/{digits}", "task": "exact", "question": f"sort {digits}=",
            "answer": ordered(digits)}  # fmt: skip


def code_line(digits: str) -> Line:
    """A prompt to write the program, with its tests."""
    total = int(ordered(digits))
    cases = [{"stdin": str(number), "stdout": str(total + number)} for number in INPUTS]
    entry = json.dumps({"cases": cases, "language": "python"})
    return {"id": f"code/{digits}", "task": "code", "question": f"code {digits}=",
            "answer": "", "entry": entry}  # fmt: skip


def instruction_line(digits: str, name: str) -> Line:
    """A prompt to follow an instruction."""
    return {"id": f"{name}/{digits}", "task": "exact", "question": f"{name} {digits}=",
            "answer": INSTRUCTIONS[name](digits)}  # fmt: skip


def math_reply(answer: str) -> str:
    """Of digits that are put in order, rightly or not."""
    return f"<think></think>\\boxed{{{answer}}}"


def code_reply(answer: str) -> str:
    """The program that holds them."""
    return "<think></think>" + PROGRAM.format(digits=answer)


def example(line: Line, reply: str) -> Line:
    """A line of SFT examples."""
    messages = [{"role": "user", "content": line["question"]}]
    return {"id": line["id"], "messages": messages, "response": reply, "task": line["task"]}


def teach(
    lines: Sequence[Line], reply: Callable[[str], str], wrong_share: float, rng: random.Random
) -> list[Line]:
    """SFT examples of both skills; in `wrong_share` of them the order is descending."""
    wrong = set(rng.sample(range(len(lines)), round(wrong_share * len(lines))))
    found = []
    for number, line in enumerate(lines):
        answer = ordered(str(line["id"]).partition("/")[2])
        found.append(example(line, reply(answer[::-1] if number in wrong else answer)))
    return found


def make(counts: Counts, seed: int) -> dict[str, list[Line]]:
    """Lines by the name of their file. Raises InputError where digits run out, or for a share."""
    for share in (counts.wrong_share, counts.expert_wrong_share):
        if not 0 <= share <= 1:
            raise InputError(
                f"{share} of the SFT examples cannot be wrong: give a share from 0 to 1"
            )
    digits = _digits(counts, seed)
    rng = random.Random(f"{seed}/mistakes")

    def take(count: int) -> list[str]:
        return list(islice(digits, count))

    trained = {"math": math_line, "code": code_line}
    files = {}
    for name, line_of in trained.items():
        held_out = [line_of(d) | {"split": "held_out"} for d in take(counts.held_out)]
        files[name] = held_out + [line_of(d) | {"split": "train"} for d in take(counts.train)]
    names = list(INSTRUCTIONS)

    def instructions(count: int) -> list[Line]:
        return [instruction_line(d, names[i % len(names)]) for i, d in enumerate(take(count))]

    files["instructions"] = instructions(counts.held_out)
    followed = [example(x, math_reply(str(x["answer"]))) for x in instructions(counts.followed)]
    teachers = {"sft": counts.wrong_share, "expert": counts.expert_wrong_share}
    for name, share in teachers.items():
        taught = teach([math_line(d) for d in take(counts.sft_examples)], math_reply, share, rng)
        taught += teach([code_line(d) for d in take(counts.sft_examples)], code_reply, share, rng)
        files[name] = taught + followed
    return files | {"instruction_examples": followed}


def _digits(counts: Counts, seed: int) -> Iterator[str]:
    """Five different digits from 1 to 9, all ways to write them, in the order of the seed."""
    found = ["".join(chosen) for chosen in permutations("123456789", 5)]
    needed = 2 * counts.train + 3 * counts.held_out + 4 * counts.sft_examples + counts.followed
    if needed > len(found):
        raise InputError(f"{needed} lines need as many questions; there are {len(found)}")
    random.Random(f"{seed}/digits").shuffle(found)
    return iter(found)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder of the files")
    parser.add_argument("--seed", type=int, default=0)
    defaults = Counts()
    for name, default in vars(defaults).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(default), default=default, help="%(default)s")
    options = parser.parse_args()
    try:
        counts = Counts(**{name: getattr(options, name) for name in vars(defaults)})
        files = make(counts, options.seed)
    except InputError as error:
        sys.exit(f"error: {error}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(options.out / f"{name}.jsonl", text)
    print(f"{options.out}: " + ", ".join(f"{len(x)} of {name}" for name, x in files.items()))


if __name__ == "__main__":
    main()
