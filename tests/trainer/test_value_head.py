"""The value of a prompt: the state it is read from, and that a checkpoint keeps what it learnt."""

import copy

import numpy as np
import torch

from megatron_rl.protocol.types import TrainSequence
from megatron_rl.trainer.model.collate import collate
from megatron_rl.trainer.value_head import ValueHead, first_tokens, prompt_features


def make_head() -> ValueHead:
    return ValueHead(3, 1e-2, torch.device("cpu"), add_up=lambda sums: None)


def make_sequence(prompt: int, completion: int) -> TrainSequence:
    ids = np.arange(prompt + completion, dtype=np.int32)
    logprobs = np.zeros(completion, np.float32)
    return TrainSequence(ids, prompt, logprobs, [(0, completion)], 0.0, 1.0)


def test_features_are_of_the_state_that_predicts_the_first_completion_token() -> None:
    batch = collate([make_sequence(2, 3), make_sequence(4, 1), make_sequence(1, 2)])
    assert first_tokens(batch.target_ends).tolist() == [0, 3, 4]
    # The states of all positions hold their own number.
    states = torch.arange(13.0)[:, None] + torch.tensor([0.0, 0.5])
    found = prompt_features(states[batch.loss_positions], batch)
    # Prompts end at positions 1, 5 + 3 and 10 + 0.
    expected = torch.tensor([[1.0, 1.5], [8.0, 8.5], [10.0, 10.5]])
    expected = expected / expected.norm(dim=1, keepdim=True)
    torch.testing.assert_close(found, torch.cat([expected, torch.ones(3, 1)], 1))


def test_a_head_learns_a_linear_value() -> None:
    torch.manual_seed(0)
    features = torch.cat(
        [torch.nn.functional.normalize(torch.randn(64, 3), dim=1), torch.ones(64, 1)], 1
    )
    targets = features @ torch.tensor([0.5, -0.25, 0.1, 0.4])
    head = make_head()
    for _ in range(300):
        head.add(features, targets - head.values(features), torch.ones(len(targets)).bool())
        head.step()
    assert (head.values(features) - targets).abs().max() < 2e-3


def test_a_head_begins_with_the_mean_reward_once() -> None:
    head, features = make_head(), torch.randn(5, 4)
    features[:, 3] = 1
    head.begin(torch.tensor([1.0, 0.0, 0.5]))
    assert head.values(features).tolist() == [0.5] * 5
    head.begin(torch.tensor([9.0]))
    assert head.values(features).tolist() == [0.5] * 5
    ended = make_head()
    ended.restore(head.state())
    ended.begin(torch.tensor([9.0]))
    assert ended.values(features).tolist() == [0.5] * 5


def test_a_restored_head_goes_on_as_it_would_have() -> None:
    torch.manual_seed(1)
    features, targets = torch.randn(8, 4), torch.randn(8)
    whole, resumed = make_head(), make_head()
    state = {}
    for step in range(6):
        if step == 3:
            resumed.restore(state)
        for head in (whole, resumed) if step >= 3 else (whole,):
            head.add(features, targets - head.values(features), torch.ones(len(targets)).bool())
            head.step()
        if step == 2:
            state = copy.deepcopy(whole.state())
    assert torch.equal(whole.values(features), resumed.values(features))
    fresh = make_head()
    fresh.restore(make_head().state())
    assert not fresh.values(features).any()
