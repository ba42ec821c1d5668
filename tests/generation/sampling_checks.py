"""What an engine must do with strings that end a completion, and with truncated sampling."""

import math

import torch
from transformers import LlamaForCausalLM

from generation.engine import Completion
from megatron_rl.protocol.types import Sampling
from tests.generation.engine_driver import Driver
from tests.generation.precision import IS_EXACT, assert_near
from tests.generation.tiny_model import CHARACTERS, EOS_ID, SPECIAL

NEVER = "=" * 9
ENDS = (EOS_ID, 2)
"""The run's end tokens; the model's folder names only the first."""


def check_ends(driver: Driver, prompt: list[int]) -> list[Completion]:
    """The first end token ends a completion, which then counts as finished; returns 32."""
    found: list[Completion] = driver.run(driver.collect(prompt, Sampling(60, 1.0), list(range(32))))
    for completion in found:
        ended = completion.token_ids[-1] in ENDS
        assert completion.finish_reason == ("stop" if ended else "length")
        assert not set(ENDS) & set(completion.token_ids[:-1])
    assert {completion.token_ids[-1] for completion in found} >= set(ENDS)
    return found


def check_stop(driver: Driver, prompt: list[int]) -> None:
    """What a greedy completion says from its tenth token on ends the next one."""
    (free,) = driver.run(driver.collect(prompt, Sampling(40, 0.0), [0]))
    text = "".join(
        CHARACTERS[i - len(SPECIAL)] if i >= len(SPECIAL) else "#" for i in free.token_ids
    )
    stop = text[10:13]
    tokens = text.index(stop) + 3
    assert tokens < len(text) and NEVER not in text
    wanted = Sampling(40, 0.0, stop=(NEVER, stop))
    for completion in driver.run(driver.collect(prompt, wanted, [0, 1, 2])):
        assert completion.token_ids == free.token_ids[:tokens]
        assert completion.finish_reason == "stop"
        assert len(completion.logprobs) == completion.spans[-1].end == tokens
        assert_near(completion.logprobs, torch.tensor(free.logprobs[:tokens]))
    (same,) = driver.run(driver.collect(prompt, Sampling(40, 0.0, stop=(NEVER,)), [0]))
    assert (same.token_ids, same.finish_reason) == (free.token_ids, free.finish_reason)


def check_truncation(driver: Driver, model: LlamaForCausalLM, prompt: list[int]) -> None:
    """Only the allowed tokens are sampled; logprobs are of the whole softmax."""
    likely = driver.run(driver.collect(prompt, Sampling(24, 1.0, top_k=2), list(range(8))))
    near = driver.run(driver.collect(prompt, Sampling(24, 1.0, min_p=0.5), list(range(8))))
    # On a GPU engine and reference round otherwise, so that near ties may change places.
    slack = 1e-4 if IS_EXACT else 0.2
    for number, completion in enumerate([*likely, *near]):
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            table = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].double(), -1)
        sampled = table.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        second, most = table.topk(2).values[:, 1], table.amax(1)
        bound = second if number < len(likely) else most + math.log(0.5)
        assert (sampled >= bound - slack).all()
        assert_near(completion.logprobs, sampled.float())
