"""Whether the values of a column have the form that a part of a prompt needs. Pure."""

import re
from collections.abc import Callable
from typing import Any

from megatron_rl.config.reward import RewardConfig
from megatron_rl.data.answers import UNKNOWN_RATES, read_rate, texts_of_list


def _are_ids(values: list[Any]) -> bool:
    kinds = all(isinstance(value, str | int) and value != "" for value in values)
    return kinds and len(set(values)) == len(values) > 0


def _are_tasks(values: list[Any]) -> bool:
    known = RewardConfig().all_tasks
    return bool(values) and all(value is None or value in known for value in values)


def _are_splits(values: list[Any]) -> bool:
    return bool(values) and all(value in (None, "", "train", "held_out") for value in values)


def _are_languages(values: list[Any]) -> bool:
    texts = [value for value in values if value]
    return bool(texts) and all(
        isinstance(value, str) and re.fullmatch("[a-z]{2}", value) for value in texts
    )


def _are_shares(values: list[Any]) -> bool:
    found = [value for value in values if value is not None]
    try:
        rates = list(map(read_rate, found))
    except ValueError:
        return False
    # Where a rate is unknown, OpenMathReasoning writes "n/a".
    return any(rate is not None for rate in rates) or any(map(_is_unknown_text, found))


def _is_unknown_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip().casefold() in UNKNOWN_RATES[1:]


def are_lists(values: list[Any]) -> bool:
    """Whether all texts are lists of accepted answers."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    return bool(texts) and all(texts_of_list(text) is not None for text in texts)


OPTIONAL: dict[str, Callable[[list[Any]], bool]] = {
    "id": _are_ids,
    "task": _are_tasks,
    "language": _are_languages,
    "split": _are_splits,
    "pass_rate": _are_shares,
}
"""Optional columns -> whether values of a column have our form."""
