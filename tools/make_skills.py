"""Makes prompts and SFT examples for studies on the tiny model: two trained skills, one held out.

`python -m tools.make_skills OUT_DIR [--seed S]` writes, into OUT_DIR,

| file | content |
|---|---|
| `math.jsonl` | sort five digits; task `exact`, train and held-out lines |
| `code.jsonl` | write a program that adds its input to the sorted digits; task `code`, the same |
| `instructions.jsonl` | copy or reverse digits, or name the first or last; for evaluation |
| `sft.jsonl` | answers of a teacher, wrong (descending) in --wrong-share of the lines |
| `expert.jsonl` | answers of a better teacher, wrong in --expert-wrong-share |
| `instruction_examples.jsonl` | right answers to instructions |

The files share no five digits, so that evaluations measure untaught problems; only the lines of the
last file are also in the two files before it. The digits exclude 0, which cannot begin a number in
a program.
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
from megatron_rl.data.example_tasks import write_lines

Line = dict[str, object]

PROGRAM = "```python\nprint({digits}+int(input()))\n```"
INPUTS = (1, 40)
"""Inputs in a program's tests; the output is the input plus the sorted digits."""


@dataclass(frozen=True)
class Counts:
    """Numbers of lines, and the teachers' shares of wrong answers."""

    train: int = 3000
    """Train lines per trained skill."""
    held_out: int = 300
    """Held-out lines per trained skill, and instructions for evaluation."""
    sft_examples: int = 400
    """SFT examples per trained skill and teacher."""
    followed: int = 1200
    """SFT examples of instructions: only one word distinguishes instructions, so they need more."""
    wrong_share: float = 0.6
    expert_wrong_share: float = 0.1


def ordered(digits: str) -> str:
    """The digits in ascending order."""
    return "".join(sorted(digits))


INSTRUCTIONS: dict[str, Callable[[str], str]] = {
    "copy": lambda digits: digits,
    "back": lambda digits: digits[::-1],
    "head": lambda digits: digits[0],
    "tail": lambda digits: digits[-1],
}


def math_line(digits: str) -> Line:
    """A prompt to sort the digits."""
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
    """A reply with sorted digits."""
    return f"<think></think>\\boxed{{{answer}}}"


def code_reply(answer: str) -> str:
    """A reply with the program for sorted digits."""
    return "<think></think>" + PROGRAM.format(digits=answer)


def example(line: Line, reply: str) -> Line:
    messages = [{"role": "user", "content": line["question"]}]
    return {"id": line["id"], "messages": messages, "response": reply, "task": line["task"]}


def teach(
    lines: Sequence[Line], reply: Callable[[str], str], wrong_share: float, rng: random.Random
) -> list[Line]:
    """SFT examples; `wrong_share` of them have the digits in descending order."""
    wrong = set(rng.sample(range(len(lines)), round(wrong_share * len(lines))))
    found = []
    for number, line in enumerate(lines):
        answer = ordered(str(line["id"]).partition("/")[2])
        found.append(example(line, reply(answer[::-1] if number in wrong else answer)))
    return found


def make(counts: Counts, seed: int) -> dict[str, list[Line]]:
    """File name -> lines. Raises InputError when digits run out, or for an invalid share."""
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
    """All sequences of five different digits from 1 to 9, shuffled by the seed."""
    found = ["".join(chosen) for chosen in permutations("123456789", 5)]
    needed = 2 * counts.train + 3 * counts.held_out + 4 * counts.sft_examples + counts.followed
    if needed > len(found):
        raise InputError(f"{needed} lines need as many questions; there are {len(found)}")
    random.Random(f"{seed}/digits").shuffle(found)
    return iter(found)


def main() -> None:
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
        write_lines(options.out / f"{name}.jsonl", lines)
    print(f"{options.out}: " + ", ".join(f"{len(x)} of {name}" for name, x in files.items()))


if __name__ == "__main__":
    main()
