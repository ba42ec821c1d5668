"""Whether a weight sync of full tensors brings those that the engine's model has.

Used by the generator. Engines skip a tensor whose name they do not know, SGLang without a word, and
keep older weights where a tensor is missing. The names of the model's own files, from which the
engine was started, tell both.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from generation.engine import EngineError
from megatron_rl.weights.layout.slices import unmatched_text

_TIED = frozenset({"lm_head.weight"})
_LENGTH_BYTES = 8


class FullTensors:
    """Compares the tensor names of a weight sync with those of the model's files."""

    def __init__(self, model: Path | None) -> None:
        """model: folder of the engine's model; without files of weights nothing is checked."""
        self._model = model
        self._expected: frozenset[str] | None = None
        self._brought: set[str] = set()

    def begin(self) -> None:
        """A weight sync begins."""
        self._brought.clear()

    def add(self, names: Iterable[str]) -> None:
        """Tensors came."""
        self._brought.update(names)

    def check(self) -> None:
        """Raise EngineError, with both lists, if other tensors came than the model has."""
        if not self._brought or self._model is None:
            return
        if self._expected is None:
            self._expected = tensor_names(self._model)
        if not self._expected:
            return
        # A tied model may store its output matrix all the same.
        optional = _TIED if _is_tied(self._model) else frozenset()
        optional |= {name for name in self._expected if name.endswith("rotary_emb.inv_freq")}
        not_taken = self._brought - self._expected - optional
        if text := unmatched_text(not_taken, self._expected - self._brought - optional):
            raise EngineError(f"the weight sync does not fit {self._model}: {text}")


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of the tensors in a folder's safetensors; none without such files. Raises EngineError.

    By their headers alone: no tensor is read.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if single.is_file():
            with single.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                return frozenset(json.loads(file.read(length))) - {"__metadata__"}
        if index.is_file():
            return frozenset(json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError) as error:
        raise EngineError(f"cannot read the names of tensors in {folder}: {error!r}") from error
    return frozenset()


def _is_tied(folder: Path) -> bool:
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and bool(values.get("tie_word_embeddings"))
