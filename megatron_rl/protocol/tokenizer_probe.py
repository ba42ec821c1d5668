"""Compares a tokenizer as transformers loads it with its own file, on short texts.

Used by a Renderer at a run's start. Only a Renderer makes token ids in a run: engines and trainer
ranks are given ids. So it is enough to compare the Renderer's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROBES = (
    "Hello world, it's 12,345.67 (3/4)!\n",
    "def f(x):\n    return x  # \ttab\n\n\n",
    "HelloWorld iPhone 'The' \"QUOTED\" don't a//b/\n",
    "\\frac{1}{2}+\\sqrt{x_{10}}=\\boxed{-7}",
    "naïve Größe, задача 数学 🙂",
)
_MISTRAL = ("mistral", "mistral3", "voxtral", "ministral", "ministral3", "pixtral")
_MISTRAL_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Mistral's tokenizers divide a text, as `fix_mistral_regex` of transformers 5.19 has it."""

Encode = Callable[[str], list[int]]


def compare_tokenizers(
    tokenizer: Any, folder: Path, encode: Encode, decode: Callable[[list[int]], str]
) -> list[str]:
    """Warnings about a tokenizer; encode and decode are the run's."""
    return [
        text
        for text in (
            _differs_from_file(tokenizer, folder, encode),
            _splits_wrongly(tokenizer, folder),
            _loses_text(tokenizer, folder, encode, decode),
        )
        if text
    ]


def _differs_from_file(tokenizer: Any, folder: Path, encode: Encode) -> str:
    """A warning if transformers makes other ids than tokenizer.json."""
    path = folder / "tokenizer.json"
    # Mistral's regex is mended at load on request; then the file is known to differ.
    if not path.exists() or tokenizer.init_kwargs.get("fix_mistral_regex"):
        return ""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(path))
    plain.no_truncation()
    plain.no_padding()
    for text in PROBES:
        own, theirs = encode(text), plain.encode(text, add_special_tokens=False).ids
        if own != theirs:
            return (
                f"warning: transformers loads the tokenizer of {folder} as "
                f"{type(tokenizer).__name__}, which makes other ids than its tokenizer.json: of "
                f"{text!r} {_first_difference(own, theirs)}. The model was most likely trained "
                'with tokenizer.json: set "tokenizer_class": "PreTrainedTokenizerFast" in '
                "tokenizer_config.json"
            )
    return ""


def _first_difference(own: list[int], theirs: list[int]) -> str:
    place = next(
        (n for n, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b),
        min(len(own), len(theirs)),
    )
    return f"{own[place : place + 3]} in place of {theirs[place : place + 3]} at token {place}"


def _splits_wrongly(tokenizer: Any, folder: Path) -> str:
    """A warning for a tokenizer of Mistral that was saved with another family's regex."""
    path = folder / "config.json"
    kind = json.loads(path.read_text()).get("model_type") if path.exists() else None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if kind not in _MISTRAL or backend is None or backend.pre_tokenizer is None:
        return ""
    if backend.token_to_id("[INST]") is None:
        return ""  # another family's tokenizer
    state = backend.pre_tokenizer.__getstate__().decode()
    # Older tokenizers of Mistral divide no text before they merge.
    if '"Split"' not in state or '"ByteLevel"' not in state:
        return ""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(_MISTRAL_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    right = pre_tokenizers.Sequence([split, byte_level])
    for text in PROBES:
        own = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        expected = [piece for piece, _ in right.pre_tokenize_str(text)]
        if own != expected:
            return (
                f"warning: the tokenizer of {folder} was saved with a regex that is not Mistral's: "
                f"it divides {text!r} into {len(own)} pieces in place of {len(expected)}, so "
                "prompts have other tokens than the model was trained on. Save it anew: "
                f'AutoTokenizer.from_pretrained("{folder}", fix_mistral_regex=True)'
                f'.save_pretrained("{folder}")'
            )
    return ""


def _loses_text(
    tokenizer: Any, folder: Path, encode: Encode, decode: Callable[[list[int]], str]
) -> str:
    """A warning if a text does not come back from its ids; closed vocabularies do not count."""
    for text in PROBES:
        ids = encode(text)
        if tokenizer.unk_token_id in ids:
            continue
        if (back := decode(ids)) != text:
            return (
                f"warning: the tokenizer of {folder} does not give a text back: {text!r} becomes "
                f"{back!r}, and answers are graded by their text. See its normalizer and decoder "
                "in tokenizer.json, and clean_up_tokenization_spaces in tokenizer_config.json"
            )
    return ""
