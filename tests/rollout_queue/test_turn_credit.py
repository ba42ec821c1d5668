"""Advantages of conversations whose replies are rewarded one by one, against numbers by hand."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.algorithms.advantage_estimators import GroupView
from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.protocol.rollout import ConversationTurn, TurnReturn, VersionSpan
from megatron_rl.protocol.rollout_files import rollout_files
from megatron_rl.protocol.types import Score, ScoredRollout
from megatron_rl.rollout_queue.batches import minibatch_sequences
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.replay import read_groups
from tests.rollout_queue.makers import make_group, make_rollout


def make(rewards: list[list[float]], *, tokens: int = 2) -> Group:
    """A group whose member i has a reply of `tokens` tokens for each of rewards[i]."""
    group = make_group(0, [])
    group.size, group.scored = len(rewards), {}
    for index, mine in enumerate(rewards):
        returns = np.cumsum(mine[::-1])[::-1]
        rollout = msgspec.structs.replace(
            make_rollout(index, tokens=tokens * len(mine)),
            turn_returns=[TurnReturn(n, tokens, float(v)) for n, v in enumerate(returns)],
        )
        group.add(ScoredRollout(rollout, Score(sum(mine), {}, "x", is_outcome=True)), 0.0)
    return group


def advantages(
    groups: list[Group], normalization: str = "none", estimator: str = "group_mean"
) -> list[list[float]]:
    cfg = AlgorithmConfig.model_validate(
        {"advantage_estimator": {"name": estimator}, "normalization": {"name": normalization}}
    )
    found = minibatch_sequences(groups, find_advantage_functions(cfg))
    assert all(sequence.find_fault() == "" for sequence in found)
    return [sequence.turn_advantages.tolist() for sequence in found]


def test_a_reply_is_compared_with_those_of_the_members_that_got_so_far() -> None:
    # Returns: 3 2 | 1 1 | 2, so that turn 0 has the mean 2, and turn 1 the mean 1.5 of two.
    found = advantages([make([[1.0, 2.0], [0.0, 1.0], [2.0]])])
    assert found == [[1.0, 1.0, 0.5, 0.5], [-1.0, -1.0, -0.5, -0.5], [0.0, 0.0]]


def test_a_reply_that_only_one_member_reached_teaches_nothing() -> None:
    found = advantages([make([[0.0, 0.0, 5.0], [1.0]])])
    assert found == [[2.0, 2.0, 0.0, 0.0, 0.0, 0.0], [-2.0, -2.0]]
    # Whatever the estimator says of a reward alone.
    found = advantages([make([[0.0, 0.0, 5.0], [1.0]])], estimator="reward")
    assert found == [[5.0, 5.0, 0.0, 0.0, 0.0, 0.0], [1.0, 1.0]]


def length_of_each(group: GroupView, cfg: AlgorithmConfig) -> np.ndarray:
    return group.lengths.astype(np.float64)


def test_an_estimator_sees_the_length_of_the_reply_that_it_rates() -> None:
    # Replies of two tokens: a member has two of them, the other one.
    found = advantages([make([[0.0, 1.0], [1.0]])], estimator=f"{__name__}:length_of_each")
    assert found == [[2.0, 2.0, 0.0, 0.0], [2.0, 2.0]]


def test_a_vote_on_replies_is_of_the_members_that_got_so_far() -> None:
    group = make([[0.0], [0.0, 1.0], [0.0, 0.0]])
    for index, reason in enumerate(["correct", "correct", "wrong_answer"]):
        scored = group.scored[index]
        group.scored[index] = ScoredRollout(scored.rollout, Score(0.0, {}, reason))
    group.classes = {0: 0, 1: 0, 2: 3}
    cfg = AlgorithmConfig.model_validate({"preset": "majority", "advantage_estimator": {"k": 2}})
    found = minibatch_sequences([group], find_advantage_functions(cfg))
    # First replies, pairs of three: f is 1 for both right ones, 1/2 for a tie. Second replies: one
    # pair, a tie, where either alone has f = 1 and f = 0.
    sixth = 1 / 6
    expected = [
        [sixth] * 2,
        [sixth, sixth, 0.5, 0.5],
        [-2 * sixth, -2 * sixth, -0.5, -0.5],
    ]
    for mine, numbers in zip(found, expected, strict=True):
        assert mine.turn_advantages == pytest.approx(numbers, rel=1e-6)


def test_replies_are_normalized_together_and_not_by_their_number() -> None:
    groups = [make([[4.0, 0.0], [0.0, 0.0]]), make([[1.0], [0.0]])]
    plain = advantages(groups)
    assert plain == [[2.0, 2.0, 0.0, 0.0], [-2.0, -2.0, 0.0, 0.0], [0.5, 0.5], [-0.5, -0.5]]
    scaled = advantages(groups, "minibatch")
    # Six replies: 2, -2, 0, 0, 0.5, -0.5.
    deviation = np.std([2.0, -2.0, 0.0, 0.0, 0.5, -0.5])
    for mine, other in zip(scaled, plain, strict=True):
        assert mine == pytest.approx(np.array(other) / deviation, rel=1e-5)


def test_a_group_is_normalized_over_all_its_replies() -> None:
    # 2, -2, 0, 0 of the first group and 0.5, -0.5 of the second one.
    scaled = advantages([make([[4.0, 0.0], [0.0, 0.0]]), make([[1.0], [0.0]])], "group")
    root = 2**0.5
    expected = [[root, root, 0.0, 0.0], [-root, -root, 0.0, 0.0], [1.0, 1.0], [-1.0, -1.0]]
    assert [pytest.approx(one, rel=1e-4) for one in expected] == scaled


def without_returns(group: Group, index: int, spans: list[tuple[int, int]]) -> None:
    """Take the rewards of replies from a member. spans: its replies, in tokens."""
    scored = group.scored[index]
    rollout = msgspec.structs.replace(
        scored.rollout, turn_returns=[], spans=[VersionSpan(0, *span) for span in spans]
    )
    group.scored[index] = ScoredRollout(rollout, scored.score)


def test_a_member_that_a_limit_ended_earned_its_reward_at_its_end() -> None:
    group = make([[1.0, 2.0], [0.0, 1.0], [0.0, 0.5]], tokens=2)
    # A given token between its replies of two and one tokens.
    without_returns(group, 2, [(0, 2), (3, 4)])
    # Returns: 3 2 | 1 1 | 0.5 0.5, with the means 1.5 and 7/6.
    found = advantages([group])
    assert found[0] == pytest.approx([1.5, 1.5, 5 / 6, 5 / 6], rel=1e-6)
    assert found[1] == pytest.approx([-0.5, -0.5, -1 / 6, -1 / 6], rel=1e-6)
    assert found[2] == pytest.approx([-1.0, -1.0, -2 / 3], rel=1e-6)
    assert group.turn_returns[2] == [TurnReturn(0, 2, 0.5), TurnReturn(1, 1, 0.5)]


def two_chats(group: Group, index: int, order: tuple[int, ...]) -> None:
    """Let a member hold two chats of two replies of a token each; order: numbers of asking."""
    scored = group.scored[index]
    starts = (0, 2, 4, 6)
    turns = [
        ConversationTurn(start, start + 1, -1, [], "", 0.0, 0.0, 1, asked_before=number)
        for start, number in zip(starts, order, strict=True)
    ]
    rollout = msgspec.structs.replace(
        make_rollout(index, tokens=7),
        spans=[VersionSpan(0, start, start + 1) for start in starts],
        conversation=turns,
    )
    group.scored[index] = ScoredRollout(rollout, scored.score)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        # Asked for: a chat's first reply, the other's, then both second ones. The first chat earned
        # 0.9 elsewhere, the second one 0.1; this member earned 0.5. Means: 2.3 / 3 and 0.7 / 3.
        ((0, 2, 1, 3), [-0.8 / 3, -0.8 / 3, 0.8 / 3, 0.8 / 3]),
        # Recorded by an earlier release, without numbers: in the order of tokens.
        ((-1, -1, -1, -1), [-0.8 / 3, 0.8 / 3, -0.8 / 3, 0.8 / 3]),
    ],
)
def test_replies_of_a_member_that_a_limit_ended_are_numbered_by_asking(
    tmp_path: Path, order: tuple[int, ...], expected: list[float]
) -> None:
    group = make_group(0, [0.5, 0.5, 0.5])
    for index in range(3):
        two_chats(group, index, order)
    for index in range(2):
        scored = group.scored[index]
        returns = [TurnReturn(n, 1, value) for n, value in ((0, 0.9), (2, 0.9), (1, 0.1), (3, 0.1))]
        rollout = msgspec.structs.replace(scored.rollout, turn_returns=returns)
        group.scored[index] = ScoredRollout(rollout, scored.score)
    assert advantages([group])[2] == pytest.approx(expected, rel=1e-6)
    # A recorded group has the same ones.
    Recorder(tmp_path).write_step(0, [group], 5.0)
    [stored] = read_groups(rollout_files(tmp_path)[0])
    assert advantages([stored.load(keeps_versions=False)])[2] == pytest.approx(expected, rel=1e-6)


def test_replies_and_whole_completions_have_one_scale() -> None:
    by_turn, whole = make([[4.0, 0.0], [0.0, 0.0]]), make([[1.0], [0.0]])
    for index in range(2):
        without_returns(whole, index, [(0, 2)])
    cfg = AlgorithmConfig.model_validate({"normalization": {"name": "minibatch"}})
    found = minibatch_sequences([by_turn, whole], find_advantage_functions(cfg))
    deviation = np.std([2.0, -2.0, 0.0, 0.0, 0.5, -0.5])
    assert found[0].turn_advantages[0] == pytest.approx(2.0 / deviation, rel=1e-5)
    assert [one.advantage for one in found[2:]] == pytest.approx(
        [0.5 / deviation, -0.5 / deviation]
    )


def test_equal_rewards_with_different_replies_are_no_zero_variance_group() -> None:
    assert not make([[1.0, 0.0], [0.0, 1.0]]).has_zero_variance
    assert make([[1.0, 0.0], [1.0, 0.0]]).has_zero_variance


def test_a_group_without_rewards_of_replies_has_one_advantage_a_completion() -> None:
    group = make([[1.0], [0.0]])
    for index, scored in group.scored.items():
        rollout = msgspec.structs.replace(scored.rollout, turn_returns=[])
        group.scored[index] = ScoredRollout(rollout, scored.score)
    assert advantages([group]) == [[], []]


def lengthen(group: Group, index: int, tokens: int) -> None:
    """Give each reply of a member another number of tokens."""
    scored = group.scored[index]
    returns = [msgspec.structs.replace(one, tokens=tokens) for one in scored.rollout.turn_returns]
    longer = make_rollout(index, tokens=tokens * len(returns))
    rollout = msgspec.structs.replace(longer, turn_returns=returns)
    group.scored[index] = ScoredRollout(rollout, scored.score)


@pytest.mark.parametrize(
    ("rewards", "has_zero_variance"),
    [
        ([[0.0, 0.0], [0.0, 0.0]], True),
        # All failed, after two replies or after one: 0 0 | 0.
        ([[0.0, 0.0], [0.0]], True),
        # Nobody else got to the second reply. Returns: 1 1 | 1, so that both first ones are equal.
        ([[0.0, 1.0], [1.0]], True),
        # Returns: 1 1 | 1 0.
        ([[0.0, 1.0], [1.0, 0.0]], False),
        # Returns: 1.5 0.5 | 1 0.5.
        ([[1.0, 0.5], [0.5, 0.5]], False),
        # Two of three got to the second reply. Returns: 1 1 | 1 | 1 0.
        ([[0.0, 1.0], [1.0], [1.0, 0.0]], False),
    ],
)
def test_zero_variance_means_that_all_advantages_are_0(
    rewards: list[list[float]], has_zero_variance: bool
) -> None:
    group = make(rewards)
    # The length of replies is not compared.
    lengthen(group, 1, 5)
    assert group.has_zero_variance == has_zero_variance
    has_advantages = any(value for one in advantages([group]) for value in one)
    assert has_advantages != has_zero_variance


def test_the_reward_of_an_episode_is_not_compared_where_its_replies_earn_their_own() -> None:
    group = make([[0.5], [0.5]])
    scored = group.scored[1]
    group.scored[1] = ScoredRollout(scored.rollout, Score(0.0, {}, "x", is_outcome=True))
    assert group.rewards == [0.5, 0.0] and group.has_zero_variance
    assert advantages([group]) == [[0.0, 0.0], [0.0, 0.0]]
