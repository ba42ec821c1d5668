"""What is wrong with a rollout is found before anything is made of it."""

import json
import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.config.tree import Config
from megatron_rl.protocol.rollout import ConversationTurn
from megatron_rl.protocol.types import GoldAnswer, Rollout, VersionSpan
from megatron_rl.protocol.wire import WireError
from megatron_rl.rollout_queue.faults import RolloutLimits, find_fault, limits_of
from tests.rollout_queue.makers import make_rollout

LIMITS = RolloutLimits(last_id=999, tokens=64, newest_version=4)
IDS = np.array([7, 8], np.int32)


def fault_of(rollout: Rollout) -> str:
    return find_fault(rollout, LIMITS)


def test_limits_are_those_of_the_model_and_the_run(tmp_path: Path) -> None:
    values = {"model": {"path": tmp_path}, "generator": {"context_tokens": 2000}}
    config = Config.model_validate({"run": {"dir": tmp_path}, **values})
    assert limits_of(config).last_id == 2**31 - 1
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    assert limits_of(config) == RolloutLimits(511, 2000, 0)


def test_a_version_is_new_until_the_trainer_can_have_made_it() -> None:
    limits = RolloutLimits(newest_version=0)
    limits.check_version(0)
    with pytest.raises(WireError, match="version 1 is held, and 0 is the newest"):
        limits.check_version(1)
    limits.note_version(3)
    limits.note_version(2)
    limits.check_version(3)


def test_rollout_that_contradicts_itself_is_found() -> None:
    good = make_rollout(tokens=4, versions=(0, 2))
    assert fault_of(good) == ""
    replace = msgspec.structs.replace
    assert "3 logprobs for 4" in fault_of(replace(good, logprobs=good.logprobs[:3]))
    for spans in ([(0, 3)], [], [(1, 4)], [(0, 3), (2, 4)], [(0, 2), (2, 2), (2, 4)]):
        found = [VersionSpan(0, start, end) for start, end in spans]
        assert "do not fit 4 completion tokens" in fault_of(replace(good, spans=found)), spans
    turns = [VersionSpan(0, 0, 1), VersionSpan(0, 3, 4)]  # tokens 1 and 2 were given
    conversation = replace(good, spans=turns)
    assert fault_of(conversation) == ""
    first = len(good.prompt_ids) + 1
    assert fault_of(replace(conversation, row_starts=[first])) == ""
    for starts in ([first - 1], [first + 2], [first + 1, first], [first, first]):
        found = fault_of(replace(conversation, row_starts=starts))
        assert "are not given tokens in order" in found, starts
    said = [ConversationTurn(at, at + 1, -1, [], "", 0.0, 0.0, 2) for at in (0, 3)]
    for asked, is_sound in (((-1, -1), 1), ((1, 0), 1), ((0, 0), 0), ((1, 2), 0), ((0, -1), 0)):
        order = [replace(turn, asked_before=n) for turn, n in zip(said, asked, strict=True)]
        found = fault_of(replace(conversation, conversation=order))
        assert found == "" if is_sound else "asked for in the order" in found, asked
    found = fault_of(replace(conversation, conversation=[replace(said[0], asked_before=0)]))
    assert "turns of 1 tokens, and 2 were sampled" in found
    assert "0 completion tokens" in fault_of(replace(good, token_ids=good.token_ids[:0]))
    assert fault_of(replace(good, gold=GoldAnswer(4, IDS))) == ""
    choices = np.zeros(10, np.uint8)
    assert find_fault(replace(good, expert_choices=choices), RolloutLimits()) == ""
    assert "9 expert choices of 5 tokens" in find_fault(
        replace(good, expert_choices=choices[:9]), RolloutLimits()
    )
    # It fills the context of 64 tokens.
    assert fault_of(make_rollout(tokens=4, prompt_tokens=60)) == ""
    assert find_fault(good, LIMITS, most_tokens=4) == ""
    assert find_fault(good, LIMITS, most_tokens=3) == "4 completion tokens, allowed are 3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [-0.5, math.nan, -0.5, -0.5]}, "logprob nan of token 1"),
        ({"logprobs": [-0.5, -0.5, -math.inf, -0.5]}, "logprob -inf of token 2"),
        ({"logprobs": [math.inf, -0.5, -0.5, -0.5]}, "logprob inf of token 0"),
        ({"logprobs": [-0.5, -0.5, -0.5, 0.01]}, "logprob 0.0.* of token 3"),
        ({"spans": [VersionSpan(-1, 0, 1), VersionSpan(2, 1, 4)]}, "version -1"),
        ({"token_ids": [5, 6, -7, 8]}, "token ids from -7 to 8, expected 0 to 999"),
        ({"token_ids": [5, 6, 1000, 8]}, "token ids from 5 to 1000, expected 0 to 999"),
        ({"prompt_ids": [5, -1]}, "prompt ids from -1 to 5"),
        ({"prompt_ids": [5] * 61}, "61 [+] 4 tokens, allowed are 64"),
        ({"spans": [VersionSpan(0, 0, 2), VersionSpan(5, 2, 4)]}, "version 5, and 4 is the newest"),
        (
            {"spans": [VersionSpan(0, 0, 6), VersionSpan(1, 6, 2), VersionSpan(2, 2, 4)]},
            "version s",
        ),
        ({"spans": [VersionSpan(0, 0, 4), VersionSpan(1, 4, 4)]}, "version spans"),
        ({"expert_choices": np.zeros(10, np.float32)}, "expert choices are float32"),
        ({"token_ids": np.ones(4, np.float32)}, "token ids are float32, expected int32"),
        ({"prompt_ids": np.ones(4, np.uint8)}, "prompt ids are uint8, expected int32"),
        ({"logprobs": np.full(4, -1, np.int32)}, "logprobs are int32, expected float32"),
        ({"gold": GoldAnswer(5, IDS)}, "5 tokens of thought, of 4"),
        ({"gold": GoldAnswer(4, np.full(3, 1000, np.int32))}, "reference ids from 1000 to 1000"),
        ({"gold": GoldAnswer(4, np.zeros(59, np.int32))}, "a reference answer of 59 tokens"),
        ({"finish_reason": "abort"}, "finish_reason 'abort'"),
        ({"finish_reason": ""}, "finish_reason ''"),
    ],
)
def test_rollout_that_cannot_be_trained_on_is_found(change: dict, message: str) -> None:
    kinds = {"logprobs": np.float32, "token_ids": np.int32, "prompt_ids": np.int32}
    typed = {
        key: np.array(v, kinds[key]) if isinstance(v, list) and key in kinds else v
        for key, v in change.items()
    }
    good = make_rollout(tokens=4, versions=(0, 2))
    assert re.match(message, fault_of(msgspec.structs.replace(good, **typed)))


def test_certain_tokens_and_both_ends_of_a_completion_are_sound() -> None:
    # A logprob of 0 is certainty; float32 softmax may round it up a little.
    certain = np.array([0.0, 1e-6, -40.0], np.float32)
    for finish_reason in ("stop", "length"):
        rollout = make_rollout(tokens=3, finish_reason=finish_reason)
        assert fault_of(msgspec.structs.replace(rollout, logprobs=certain)) == ""
