"""Texts and values of a rollout's tokens. Used by the viewer."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from megatron_rl.config.errors import InputError
from megatron_rl.observe.viewer.index import Place
from megatron_rl.protocol.rollout_files import RolloutRecord, parse_name, read_arrays
from megatron_rl.protocol.trained_tokens import read_trained

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GIVEN = -2
"""Version of a token that was given to the policy, such as a tool result."""
_WINDOW = 8
"""Tokens to decode together: characters and spaces depend on neighbouring tokens."""


class TrainedView(msgspec.Struct, frozen=True):
    """The trainer's values, by token; 0 for given ones."""

    gaps: list[float]
    """Trainer's logprobs minus the generator's, in nats."""
    entropies: list[float]
    """Entropies of the trainer's next-token distribution, in nats."""
    advantages: list[float]
    """Advantages given to the loss."""


class TokenView(msgspec.Struct, frozen=True):
    """The tokens of a completion; lists of equal length."""

    texts: list[str]
    logprobs: list[float]
    """The generator's logprobs at sampling, in nats."""
    versions: list[int]
    """GIVEN: the policy did not sample the token, and it carries no loss."""
    trained: TrainedView | None
    """None if the rollout was not trained on, or its values are not recorded."""


def read_record(place: Place) -> RolloutRecord:
    with place.path.open("rb") as file:
        file.seek(place.start)
        return msgspec.json.decode(file.read(place.size), type=RolloutRecord)


def load_decoder(model: Path) -> "Tokenizer | None":
    """The tokenizer of a model folder; None without a fast one."""
    path = model / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def view_tokens(place: Place, record: RolloutRecord, decoder: "Tokenizer") -> TokenView:
    """Tokens of a rollout. Raises InputError if the arrays are missing or do not fit."""
    if record.words is None:
        raise InputError("recorded without token ids (queue.record_tokens = false)")
    _, token_ids, logprobs = read_arrays(record, place.path)
    versions = np.full(len(token_ids), GIVEN, np.int64)
    for span in record.spans:
        versions[span.start : span.end] = span.version
    return TokenView(
        pieces(token_ids.tolist(), decoder),
        _rounded(logprobs),
        versions.tolist(),
        _trained(place, record, logprobs),
    )


def _trained(place: Place, record: RolloutRecord, logprobs: np.ndarray) -> TrainedView | None:
    file = parse_name(place.path)
    if file is None or file.step is None or file.is_dropped:
        return None
    found = read_trained(place.path.parent.parent, file.step, record.group, record.index)
    sampled = np.concatenate([np.arange(span.start, span.end) for span in record.spans])
    if found is None or len(found.logprobs) != len(sampled):
        return None
    spread = np.zeros((3, len(logprobs)), np.float32)
    spread[:, sampled] = found.logprobs - logprobs[sampled], found.entropies, found.advantages
    return TrainedView(*map(_rounded, spread))


def _rounded(values: np.ndarray) -> list[float]:
    return np.round(values.astype(np.float64), 5).tolist()


def pieces(ids: list[int], decoder: "Tokenizer") -> list[str]:
    """Text that each token adds; a character of several tokens belongs to its last one."""
    found, begin, shown = [], 0, ""
    for end in range(1, len(ids) + 1):
        text = decoder.decode(ids[begin:end], skip_special_tokens=False)
        is_torn = text.endswith("\ufffd")
        if is_torn and end < len(ids) and end - begin < 2 * _WINDOW:
            found.append("")
            continue
        found.append(text[len(shown) :])
        if end - begin >= _WINDOW:
            begin = end - 1
            shown = decoder.decode(ids[begin:end], skip_special_tokens=False)
        else:
            shown = text
    return found
