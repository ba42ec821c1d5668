"""Finds rows that repeat the question of an earlier row. Pure."""

import msgspec
import xxhash

from megatron_rl.protocol.types import Prompt

REPEATED = "repeated"
OTHER_ANSWER = "repeated_with_other_answer"
"""One of the two answers is wrong."""


def answer_of(prompt: Prompt) -> tuple[str, ...]:
    """What a prompt's completions are compared with; white space makes no difference."""
    return (*(" ".join(text.split()) for text in prompt.answers), prompt.entry)


class Repeats:
    """The questions seen so far, with their answers, as digests."""

    def __init__(self) -> None:
        self._answer_of: dict[bytes, bytes] = {}
        self._rate_of: dict[bytes, float] = {}
        """First pass rate of the later rows that repeat a question with its answer."""

    def find(self, prompt: Prompt) -> str:
        """REPEATED or OTHER_ANSWER; empty for a question that is new to its split."""
        # A question in both splits is told apart, because training must not see it.
        key = _digest(prompt.split, prompt.normalized_question)
        answer = _digest(*answer_of(prompt))
        known = self._answer_of.setdefault(key, answer)
        if known is answer:
            return ""
        if known != answer:
            return OTHER_ANSWER
        if prompt.pass_rate is not None:
            self._rate_of.setdefault(key, prompt.pass_rate)
        return REPEATED

    def with_rates(self, prompts: list[Prompt]) -> list[Prompt]:
        """The first rows of each question; one without a pass rate gets that of a later row."""
        return [self._with_rate(prompt) for prompt in prompts] if self._rate_of else prompts

    def _with_rate(self, prompt: Prompt) -> Prompt:
        if prompt.pass_rate is not None:
            return prompt
        rate = self._rate_of.get(_digest(prompt.split, prompt.normalized_question))
        return msgspec.structs.replace(prompt, pass_rate=rate)


def _digest(*texts: str) -> bytes:
    return xxhash.xxh3_128_digest("\0".join(texts).encode("utf-8", "surrogatepass"))
