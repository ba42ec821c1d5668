"""Puts the reference answer in place of a completion's answer, in tokens. Used by generators.

Objectives that learn from reference answers (JEPO) train on the thoughts of a completion followed
by the reference answer. Both must be the tokens that the tokenizer makes of their text.
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
"""Followed by the reference answer, the thoughts tokenize differently."""
TOO_LONG = "gold_too_long"
"""Prompt, thoughts and reference answer together exceed generator.context_tokens."""
_SHORTEST, _LONGEST = 8, 32
"""Number of thought tokens before the answer that are compared. Tokenizers look no further back,
and a rare non-canonical token earlier in long thoughts does not matter."""


def find_gold(
    token_ids: list[int],
    text: str,
    *,
    answer: str,
    cfg: GoldConfig,
    renderer: Renderer,
    room_tokens: int,
) -> GoldAnswer:
    """Find the place of the reference answer in a completion, and its tokens.

    text: the decoded completion. room_tokens: longest thoughts and answer together.
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
        found = [*found, renderer.end_id]
    if place + len(found) > room_tokens:
        return _none(TOO_LONG)
    return GoldAnswer(place, np.array(found, np.int32))


def _none(fault: str) -> GoldAnswer:
    return GoldAnswer(0, np.zeros(0, np.int32), fault)


def _place(token_ids: list[int], text: str, *, opening: str, renderer: Renderer) -> int | None:
    """Number of tokens up to the last opening; 0: no number of tokens ends there. None: no
    opening."""
    start = text.rfind(opening)
    if start < 0:
        return None
    behind = text[start + len(opening) :]
    # Each token left out makes the text of the suffix shorter.
    place = bisect_left(
        range(len(token_ids)),
        -len(behind),
        key=lambda place: -len(renderer.decode(token_ids[place:])),
    )
    return place if renderer.decode(token_ids[place:]) == behind else 0


def _answer_ids(thought_ids: list[int], text: str, renderer: Renderer) -> list[int] | None:
    """Tokens of a text behind thoughts; None: the tokens of the thoughts would change."""
    for length in range(min(_SHORTEST, len(thought_ids)), min(_LONGEST, len(thought_ids)) + 1):
        window = thought_ids[-length:]
        own_text = renderer.decode(window)
        if renderer.encode(own_text) != window:
            # The text begins inside a token.
            continue
        ids = renderer.encode(own_text + text)
        return ids[length:] if ids[:length] == window else None
    return None
