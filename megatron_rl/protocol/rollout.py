"""A prompt's completion with its score: Sampling -> Rollout -> ScoredRollout.

Imported by every process; `types.py` exports all of it.
"""

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
import numpy as np

from megatron_rl.protocol.limits import INT32_MAX, Count, Finite, Id, Name, Seconds, Share, Version


class Sampling(msgspec.Struct, frozen=True):
    """How to sample completions."""

    max_new_tokens: Count
    temperature: Finite
    """0 means greedy."""
    top_p: Share = 1.0
    top_k: Count = 0
    """0: all tokens."""
    min_p: Share = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a completion; all its tokens are kept."""
    seed: int = 0
    """Seed of the group's grading, such as the draw of a program's test cases."""
    draw_seeds: tuple[Id, ...] = ()
    """In a lease under expert.generator.deterministic: seed of each index, to draw its tokens."""
    choices_from: Count = 0
    """First token whose expert choices are wanted (train.router_replay): an earlier reply of the
    conversation brought those before it."""
    is_turn: bool = False
    """A turn of a conversation: the next one continues its prompt and its reply."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Completion tokens [start, end) were sampled from policy `version`.

    Spans lie in order. Tokens in no span were given to the policy (tool results, the chat
    template's text between turns): they carry neither loss nor logprob.
    """

    version: Version
    start: Count
    end: Count


class TurnReturn(msgspec.Struct, frozen=True):
    """What a reply of a conversation earned: its own reward and those of later replies."""

    number: Count
    """Replies that were asked for before it."""
    tokens: Count
    """Its sampled tokens."""
    value: Finite


TOOLS = "tools"
"""Role in the record of the tools that a chat offers, as JSON."""


class GivenMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a conversation that the policy did not write."""

    role: str
    content: str
    name: str = ""
    """Of the tool whose result it is."""


class ConversationTurn(msgspec.Struct, frozen=True, omit_defaults=True):
    """A reply of a conversation, and what it answered: for people.

    Training reads the order of asking alone.
    """

    start: Count
    end: Count
    """Its sampled tokens are completion tokens [start, end)."""
    follows: Annotated[int, msgspec.Meta(ge=-1, le=INT32_MAX)]
    """Number of the turn whose reply came before; -1: the turn begins a chat."""
    given: list[GivenMessage]
    """Messages since that reply; of a chat's first turn all."""
    text: str
    """All that the policy wrote."""
    asked_s: Seconds
    replied_s: Seconds
    """Seconds since the conversation began, by the generator's clock."""
    before: Count
    """Tokens that the engine was given for the reply."""
    cached: Count = 0
    """Of these, tokens that it had in its cache."""
    asked_before: Annotated[int, msgspec.Meta(ge=-1, le=INT32_MAX)] = -1
    """Replies that were asked for before it; -1: unknown, as in records of earlier releases."""


class Range(Protocol):
    """A range [start, end) of completion tokens."""

    @property
    def start(self) -> int:
        """The first token."""

    @property
    def end(self) -> int:
        """One after the last token."""


def given_ranges(spans: Sequence[Range]) -> list[tuple[int, int]]:
    """[start, end) of the completion tokens that lie in no span."""
    edges = [0, *(span.end for span in spans)]
    starts = [span.start for span in spans]
    return [(end, start) for end, start in zip(edges, starts, strict=False) if end < start]


def find_bad_spans(spans: Sequence[Range], tokens: int) -> str:
    """Why spans do not describe a completion of `tokens` tokens; "" if they do."""
    edges = [0, *(span.end for span in spans)]
    are_whole = all(span.start < span.end for span in spans)
    are_ordered = all(end <= span.start for end, span in zip(edges, spans, strict=False))
    # A first given token would belong to the prompt, and a last one would predict nothing.
    if are_whole and are_ordered and edges[-1] == tokens and spans[0].start == 0:
        return ""
    return f"version spans {spans!r:.300} do not fit {tokens} completion tokens"


def no_choices() -> np.ndarray:
    """Expert choices of a rollout without any."""
    return np.zeros(0, np.uint8)


_NARROW = (np.uint8, np.int16)
"""For up to 256 experts, or 32,768 and -1."""


def narrow_choices(choices: np.ndarray) -> np.ndarray:
    """Expert choices in the first dtype of _NARROW that holds all, else unchanged (int32).

    A rollout has a number for each layer and chosen expert of every token: many times the bytes of
    all its other data.
    """
    least, most = (int(choices.min()), int(choices.max())) if choices.size else (0, 0)
    for dtype in _NARROW:
        if np.iinfo(dtype).min <= least and most <= np.iinfo(dtype).max:
            return choices.astype(dtype)
    return choices


ROUNDING_NATS = 1e-3
"""The logprob of a certain token may exceed 0 by this much, because engines round."""


class GoldAnswer(msgspec.Struct, frozen=True):
    """The reference answer that may replace the answer of a completion."""

    thought_tokens: Count
    """Completion tokens before the answer."""
    token_ids: np.ndarray
    """[answer tokens] int32; empty if the completion has no place for it."""
    fault: str = ""
    """Reason to count, if the completion has no place for it."""


_MOST_PARTS = 100


class Score(msgspec.Struct, frozen=True):
    """The verdict on one completion."""

    reward: Finite
    parts: Annotated[dict[Name, Finite], msgspec.Meta(max_length=_MOST_PARTS)]
    """Parts that sum to the reward: "format", "correct", "length", "language", extra rewards."""
    reason: Name
    """"correct", "wrong_answer", or why grading stopped: "no_think_start", "wrong_output", ..."""
    tests: tuple[Count, Count] = (0, 0)
    """(passed, all) tests of a program, if reward.code_credit counts them."""
    detail: str = ""
    """The first test that a program failed, and its output."""
    is_outcome: bool = False
    """An environment gave it, which checks no format."""

    @property
    def is_correct(self) -> bool:
        """Whether the answer passed."""
        return self.reason == "correct"

    @property
    def is_well_formed(self) -> bool:
        """Whether the format check passed."""
        return self.is_outcome or self.parts.get("format", 0.0) > 0.0


class Rollout(msgspec.Struct, frozen=True, weakref=True):
    """One finished completion of a leased group."""

    lease_id: Id
    index: Count
    """Position inside the group, 0 .. group size - 1."""
    prompt_ids: np.ndarray
    """[prompt tokens] int32."""
    token_ids: np.ndarray
    """[completion tokens] int32; the end-of-sequence token is included when it was sampled."""
    logprobs: np.ndarray
    """[completion tokens] float32 of each sampled token, under the version that sampled it; 0 for
    given tokens."""
    spans: list[VersionSpan]
    """The last one ends with the completion."""
    finish_reason: str
    """"stop" (end of sequence) or "length"."""
    text: str
    """Completion decoded without the end-of-sequence token."""
    expert_choices: np.ndarray = msgspec.field(default_factory=no_choices)
    """[all tokens - 1, layers, experts of a token] uint8 or wider; empty without router_replay."""
    prompt_tail: str = ""
    """The end of the rendered prompt, where some chat templates open the thoughts for the model."""
    first_token_s: Finite = -1.0
    """Seconds between lease and first token, by the generator's clock; -1: unknown."""
    gold: GoldAnswer | None = None
    """Only with algorithm.gold."""
    score: Score | None = None
    """The verdict of the environment that held the conversation; None: a verifier grades it."""
    to_grade: str | None = None
    """What the verifier grades of a conversation; None: the whole text."""
    row_starts: list[Count] = []
    """Indices in prompt + completion at which further rows begin, in order: branches of the
    conversation, which begin with given tokens and see only their own row."""
    turn_returns: list[TurnReturn] = []
    """Of each reply, in the order of its tokens, if the environment rewards replies."""
    environment_s: Seconds = 0.0
    """Seconds in which the conversation waited for its environment."""
    conversation: list[ConversationTurn] = []
    """Its turns, in the order of their tokens; [] without an environment."""

    @property
    def oldest_version(self) -> int:
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> int:
        return max(span.version for span in self.spans)

    @property
    def sampled_tokens(self) -> int:
        return sum(span.end - span.start for span in self.spans)

    @property
    def graded_text(self) -> str:
        """What the verifier grades."""
        return self.text if self.to_grade is None else self.to_grade

    @property
    def turns(self) -> int:
        """Number of replies: runs of sampled tokens between given ones."""
        return 1 + len(given_ranges(self.spans))


def no_rollout(lease_id: int, index: int) -> Rollout:
    """The record of a completion of which nothing is left."""
    ids, logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Rollout(lease_id, index, ids, ids, logprobs, [], "stop", "")


class ScoredRollout(msgspec.Struct, frozen=True):
    """A rollout with its score."""

    rollout: Rollout
    score: Score
