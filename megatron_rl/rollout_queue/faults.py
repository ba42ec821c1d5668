"""What is wrong with a rollout that an engine returned. Pure, except `limits_of`.

Used by the rollout queue. The completion of a faulty rollout is leased again.
"""

import dataclasses
import json

import numpy as np

from megatron_rl.config.hf_config import text_values
from megatron_rl.config.tree import Config
from megatron_rl.protocol.limits import INT32_MAX, find_bad_ids
from megatron_rl.protocol.rollout import ROUNDING_NATS, Rollout, find_bad_spans, given_ranges
from megatron_rl.protocol.wire import WireError

_FINISH_REASONS = ("stop", "length")
_CHOICE_DTYPES = (np.uint8, np.int16, np.int32)


class FaultyRollout(WireError):
    """A rollout was taken as a failure of its engine."""


@dataclasses.dataclass
class RolloutLimits:
    """What holds for all rollouts now."""

    last_id: int = INT32_MAX
    """The largest token id of the model."""
    tokens: int = INT32_MAX
    """Maximum length of prompt and completion together."""
    newest_version: int = INT32_MAX
    """The newest policy version that a generator can hold."""

    def note_version(self, version: int) -> None:
        """The trainer can make this version from now on."""
        # A trainer that went back to a checkpoint does not take versions back from generators.
        self.newest_version = max(self.newest_version, version)

    def check_version(self, version: int) -> None:
        """Raise WireError for a version that nobody can have made."""
        if version > self.newest_version:
            raise WireError(f"version {version} is held, and {self.newest_version} is the newest")


def limits_of(config: Config) -> RolloutLimits:
    """Return the limits at the start of a run; without a model folder, token ids have none."""
    path = config.model.path / "config.json"
    values = text_values(json.loads(path.read_text())) if path.exists() else {}
    return RolloutLimits(
        last_id=values.get("vocab_size", INT32_MAX + 1) - 1,
        tokens=config.generator.context_tokens,
        newest_version=0,
    )


def find_fault(rollout: Rollout, limits: RolloutLimits, *, most_tokens: int | None = None) -> str:
    """Why a rollout is inconsistent or cannot be trained on; empty if it can.

    most_tokens: of its completion, as its lease says.
    """
    prompt, tokens = len(rollout.prompt_ids), len(rollout.token_ids)
    if not tokens or not prompt:
        return f"{prompt} prompt tokens and {tokens} completion tokens"
    if most_tokens is not None and tokens > most_tokens:
        return f"{tokens} completion tokens, allowed are {most_tokens}"
    if prompt + tokens > limits.tokens:
        return f"{prompt} + {tokens} tokens, allowed are {limits.tokens}"
    if len(rollout.logprobs) != tokens:
        return f"{len(rollout.logprobs)} logprobs for {tokens} tokens"
    if rollout.finish_reason not in _FINISH_REASONS:
        return f"finish_reason {rollout.finish_reason!r:.80}, expected one of {_FINISH_REASONS}"
    return (
        _find_bad_spans(rollout, limits.newest_version)
        or _find_bad_turns(rollout)
        or find_bad_ids("prompt ids", rollout.prompt_ids, most=limits.last_id)
        or find_bad_ids("token ids", rollout.token_ids, most=limits.last_id)
        or _find_bad_logprob(rollout.logprobs)
        or _find_bad_gold(rollout, limits)
        or _find_bad_choices(rollout)
    )


def _find_bad_spans(rollout: Rollout, newest_version: int) -> str:
    if fault := find_bad_spans(rollout.spans, len(rollout.token_ids)):
        return fault
    edges = [len(rollout.prompt_ids), *rollout.row_starts]
    given = given_ranges(rollout.spans)
    are_given = all(
        any(start <= row - edges[0] < end for start, end in given) for row in rollout.row_starts
    )
    if edges != sorted(set(edges)) or not are_given:
        return f"row starts {rollout.row_starts!r:.300} that are not given tokens in order"
    if rollout.oldest_version < 0:
        return f"version {rollout.oldest_version}, that of weights which nobody synced"
    if rollout.newest_version > newest_version:
        return f"version {rollout.newest_version}, and {newest_version} is the newest"
    return ""


def _find_bad_turns(rollout: Rollout) -> str:
    turns, sampled = rollout.conversation, rollout.sampled_tokens
    told = [edge for one in turns for edge in (one.start, one.end)]
    if told != sorted(told) or (told and told[-1] > len(rollout.token_ids)):
        return f"turns of tokens {told!r:.300} in a completion of {len(rollout.token_ids)}"
    asked = [one.asked_before for one in turns]
    if max(asked, default=-1) >= 0:
        if sorted(asked) != list(range(len(asked))):
            return f"turns that were asked for in the order {asked!r:.300}"
        if (said := sum(one.end - one.start for one in turns)) != sampled:
            return f"turns of {said} tokens, and {sampled} were sampled"
    returned = sum(one.tokens for one in rollout.turn_returns)
    if rollout.turn_returns and returned != sampled:
        return f"returns of {returned} tokens, and {sampled} were sampled"
    return ""


def _find_bad_logprob(logprobs: np.ndarray) -> str:
    if logprobs.dtype != np.float32:
        return f"logprobs are {logprobs.dtype}, expected float32"
    # A NaN is minimum and maximum, and fails both comparisons.
    if logprobs.min() > -np.inf and logprobs.max() <= ROUNDING_NATS:
        return ""
    position = int(np.argmin(np.isfinite(logprobs) & (logprobs <= ROUNDING_NATS)))
    return f"logprob {logprobs[position]} of token {position}"


def _find_bad_gold(rollout: Rollout, limits: RolloutLimits) -> str:
    gold = rollout.gold
    if gold is None:
        return ""
    if gold.thought_tokens > len(rollout.token_ids):
        return f"{gold.thought_tokens} tokens of thought, of {len(rollout.token_ids)}"
    if len(rollout.prompt_ids) + gold.thought_tokens + len(gold.token_ids) > limits.tokens:
        return f"a reference answer of {len(gold.token_ids)} tokens, for which there is no room"
    return find_bad_ids("reference ids", gold.token_ids, most=limits.last_id)


def _find_bad_choices(rollout: Rollout) -> str:
    choices, inputs = rollout.expert_choices, len(rollout.prompt_ids) + len(rollout.token_ids) - 1
    if choices.dtype not in _CHOICE_DTYPES:
        return f"expert choices are {choices.dtype}, expected whole numbers"
    if len(choices) % inputs:
        return f"{len(choices)} expert choices of {inputs} tokens"
    return ""
