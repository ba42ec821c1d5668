"""Finds rows that repeat the question of an earlier row. Pure."""

import xxhash

from megatron_rl.protocol.types import Prompt

REPEATED = "repeated"
OTHER_ANSWER = "repeated_with_other_answer"
"""One of the two answers is wrong."""


class Repeats:
    """The questions seen so far, with their answers, as digests."""

    def __init__(self) -> None:
        self._answer_of: dict[bytes, bytes] = {}

    def find(self, prompt: Prompt) -> str:
        """REPEATED or OTHER_ANSWER; empty for a question that is new to its split."""
        # A question in both splits is told apart, because training must not see it.
        key = _digest(prompt.split, prompt.normalized_question)
        answer = _digest(*(" ".join(text.split()) for text in prompt.answers), prompt.entry)
        known = self._answer_of.setdefault(key, answer)
        if known is answer:
            return ""
        return REPEATED if known == answer else OTHER_ANSWER


def _digest(*texts: str) -> bytes:
    return xxhash.xxh3_128_digest("\0".join(texts).encode("utf-8", "surrogatepass"))
