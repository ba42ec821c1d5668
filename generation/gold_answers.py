"""The reference answer put where a completion gave its own, in tokens. Used by generators.

Objectives that learn from reference answers (JEPO) train on the thoughts of a completion followed
by the reference answer. Both have to be tokens that the tokenizer would make of their text.
"""

from bisect import bisect_left

import numpy as np

from megatron_rl.config.algorithm import GoldConfig
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import GoldAnswer

NO_PLACE = "gold_no_place"
"""The completion has no place for an answer."""
NO_ANSWER = "gold_no_answer"
"""The prompt has no reference answer."""
RETOKENIZED = "gold_retokenized"
"""With the reference answer behind them, the thoughts would be other tokens."""
TOO_LONG = "gold_too_long"
"""Prompt, thoughts and reference answer together exceed generator.context_tokens."""
_SHORTEST, _LONGEST = 8, 32
"""Thought tokens before the answer whose tokens are compared. Tokenizers look no further, and a
policy samples a rare other spelling somewhere in long thoughts, which does not matter there."""


def find_gold(
    token_ids: list[int],
    text: str,
    *,
    answer: str,
    cfg: GoldConfig,
    renderer: Renderer,
    room_tokens: int,
) -> GoldAnswer:
    """Where the reference answer goes in a completion, and its tokens.

    text: of the completion, decoded. room_tokens: how long thoughts and answer may be.
    """
    if not answer:
        return _none(NO_ANSWER)
    place = _place(token_ids, text, opening=cfg.opening, renderer=renderer)
    if place is None:
        return _none(NO_PLACE)
    if place == 0:
        return _none(RETOKENIZED)
    found = _answer_ids(token_ids[:place], answer + cfg.closing, renderer)
    if found is None:
        return _none(RETOKENIZED)
    if not cfg.closing:
        found = [*found, renderer.eos_id]
    if place + len(found) > room_tokens:
        return _none(TOO_LONG)
    return GoldAnswer(place, np.array(found, np.int32))


def _none(fault: str) -> GoldAnswer:
    return GoldAnswer(0, np.zeros(0, np.int32), fault)


def _place(token_ids: list[int], text: str, *, opening: str, renderer: Renderer) -> int | None:
    """How many tokens make the text up to the last opening; 0: none make just that. None: it has
    no opening."""
    start = text.rfind(opening)
    if start < 0:
        return None
    behind = text[start + len(opening) :]
    # The text of a suffix gets shorter with every token that is left out.
    place = bisect_left(
        range(len(token_ids)),
        -len(behind),
        key=lambda place: -len(renderer.decode(token_ids[place:])),
    )
    return place if renderer.decode(token_ids[place:]) == behind else 0


def _answer_ids(thought_ids: list[int], text: str, renderer: Renderer) -> list[int] | None:
    """Tokens of a text behind thoughts whose own tokens stay as they are; None: they change."""
    for length in range(min(_SHORTEST, len(thought_ids)), min(_LONGEST, len(thought_ids)) + 1):
        window = thought_ids[-length:]
        own_text = renderer.decode(window)
        if renderer.encode(own_text) != window:
            # It begins inside of something that is one token.
            continue
        ids = renderer.encode(own_text + text)
        return ids[length:] if ids[:length] == window else None
    return None
