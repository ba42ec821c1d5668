"""The rows of a conversation tree: ids are the engine's, every sampled token is learnt once."""

import random

import numpy as np
import pytest

from generation.conversation import ConversationTree, OutOfTokens, Turn
from generation.engine import Completion, EngineError
from megatron_rl.protocol.rollout import Rollout, given_ranges
from megatron_rl.protocol.types import VersionSpan
from megatron_rl.rollout_queue.faults import RolloutLimits, find_fault


def reply_of(token_ids: list[int], version: int = 0, finish_reason: str = "stop") -> Completion:
    spans = [VersionSpan(version, 0, len(token_ids))]
    return Completion(0, token_ids, [-0.5] * len(token_ids), spans, finish_reason)


def say(
    tree: ConversationTree,
    parent: Turn | None,
    given: list[int],
    reply: list[int],
    version: int = 0,
) -> Turn:
    turn = tree.open(parent, given, None)
    tree.close(turn, reply_of(reply, version))
    return turn


def test_a_linear_conversation_is_one_row_with_holes() -> None:
    tree = ConversationTree(completion_tokens=100, context_tokens=100)
    first = say(tree, None, [1, 2, 3], [10, 11], version=4)
    assert first.prompt == [1, 2, 3] and first.ids == [1, 2, 3, 10, 11]
    second = say(tree, first, [5, 6], [12], version=5)
    assert second.prompt == [1, 2, 3, 10, 11, 5, 6]
    rows = tree.rows()
    assert rows.prompt_ids == [1, 2, 3] and rows.token_ids == [10, 11, 5, 6, 12]
    assert rows.logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert rows.spans == [VersionSpan(4, 0, 2), VersionSpan(5, 4, 5)]
    assert (rows.row_starts, rows.finish_reason) == ([], "stop")


def test_a_branch_is_another_row_that_learns_only_its_own_tokens() -> None:
    tree = ConversationTree(completion_tokens=100, context_tokens=100)
    first = say(tree, None, [1, 2], [10])
    say(tree, first, [3], [11, 12])
    say(tree, first, [4], [13])
    rows = tree.rows()
    # Row 1: 1 2 | 10 3 11 12, row 2: 1 2 10 4 13, of which only 13 is learnt.
    assert rows.token_ids == [10, 3, 11, 12, 1, 2, 10, 4, 13] and rows.row_starts == [6]
    assert given_ranges(rows.spans) == [(1, 2), (4, 8)]


def test_a_turn_that_nobody_waits_for_any_more_leaves_no_trace() -> None:
    tree = ConversationTree(completion_tokens=20, context_tokens=100)
    first = say(tree, None, [1, 2], [10])
    room = tree.room_behind(first)
    tree.discard(tree.open(first, [3], None))
    assert tree.room_behind(first) == room and tree.rows().token_ids == [10]


def test_a_second_conversation_is_another_row() -> None:
    tree = ConversationTree(completion_tokens=100, context_tokens=100)
    say(tree, None, [1, 2], [10])
    say(tree, None, [7, 8], [11])
    rows = tree.rows()
    assert rows.token_ids == [10, 7, 8, 11] and rows.row_starts == [3]
    assert given_ranges(rows.spans) == [(1, 3)]


def test_replies_get_the_room_that_is_left() -> None:
    tree = ConversationTree(completion_tokens=10, context_tokens=12)
    first = tree.open(None, [1, 2, 3], None)
    assert first.most_tokens == 9  # of the context
    tree.close(first, reply_of([10, 11]))
    assert tree.room_behind(first) == 7
    second = tree.open(first, [4, 5], 3)
    assert second.most_tokens == 3
    # A branch repeats the prompt and the first reply, and the second turn keeps its room.
    assert tree.room_behind(first) == 12 - (3 + 2) - (2 + 3) - 5
    # 10 tokens of the first row, 5 that the branch repeats, and 1 that is given.
    with pytest.raises(OutOfTokens, match="16 tokens together: generator.context_tokens is 12;"):
        tree.open(first, [6], None)
    with pytest.raises(OutOfTokens, match="behind 12 tokens: generator.context_tokens is 12;"):
        tree.open(second, [6, 7], None)
    tree.close(second, reply_of([12], finish_reason="length"))
    assert not tree.is_cut  # its environment kept it short
    tree.close(tree.open(second, [7], None), reply_of([13], finish_reason="length"))
    assert tree.is_cut


def test_rows_share_the_completion_and_fit_a_rollout_together() -> None:
    tree = ConversationTree(completion_tokens=10, context_tokens=20)
    first = say(tree, None, [1, 2, 3], [10, 11])
    assert tree.open(first, [4, 5], 3).most_tokens == 3
    # 7 tokens behind the prompt, 5 that the branch repeats, and 1 that is given.
    with pytest.raises(OutOfTokens, match="13 tokens behind .* sampling.max_new_tokens is 10;"):
        tree.open(first, [6], None)
    tree = ConversationTree(completion_tokens=400, context_tokens=512)
    say(tree, None, [7] * 200, [10] * 150)
    # Each row has room for more, and so have 400 completion tokens.
    assert tree.room_behind(None) == 512 - 350
    second = tree.open(None, [7] * 100, None)
    tree.close(second, reply_of([11] * second.most_tokens))
    rows, limits = tree.rows(), RolloutLimits(tokens=512)
    rollout = Rollout(
        0, 0, np.array(rows.prompt_ids, np.int32), np.array(rows.token_ids, np.int32),
        np.array(rows.logprobs, np.float32), rows.spans, rows.finish_reason, "",
        row_starts=rows.row_starts,
    )  # fmt: skip
    assert second.most_tokens == 62 and not find_fault(rollout, limits, most_tokens=400)


def test_a_reply_that_the_environment_keeps_short_is_not_cut() -> None:
    tree = ConversationTree(completion_tokens=10, context_tokens=20)
    tree.close(tree.open(None, [1], 2), reply_of([10, 11], finish_reason="length"))
    assert tree.rows().finish_reason == "stop"


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_learns_each_sampled_token_once_and_keeps_to_its_limit(seed: int) -> None:
    rng = random.Random(seed)
    most = rng.randint(40, 200)
    tree = ConversationTree(completion_tokens=most, context_tokens=100)
    closed: list[Turn] = []
    token = 1000
    for _ in range(30):
        parent = rng.choice([None, *closed]) if closed else None
        try:
            turn = tree.open(parent, [rng.randint(1, 99)] * rng.randint(1, 4), rng.randint(1, 6))
        except OutOfTokens:
            continue
        ids = list(range(token, token + turn.most_tokens))
        token += turn.most_tokens
        tree.close(turn, reply_of(ids))
        closed.append(turn)
    rows = tree.rows()
    learnt = [t for span in rows.spans for t in rows.token_ids[span.start : span.end]]
    assert sorted(learnt) == list(range(1000, token))
    assert len(rows.token_ids) == len(rows.logprobs) <= most
    edges = [0, *rows.row_starts, len(rows.prompt_ids) + len(rows.token_ids)]
    whole = rows.prompt_ids + rows.token_ids
    found = [whole[start:end] for start, end in zip(edges, edges[1:], strict=False)]
    leaves = [turn.ids for turn in closed if not any(other.parent is turn for other in closed)]
    assert sorted(found) == sorted(leaves) and rows.prompt_ids == closed[0].given
    assert max(map(len, found)) <= len(whole) <= 100


def with_choices(tree: ConversationTree, parent: Turn | None, given: list[int], n: int) -> Turn:
    """A turn whose reply has n tokens; two layers choose the experts t and 100 + t of token t.

    As SGLang does, the choices begin with the token `choices_from`, and leave out the last one.
    """
    turn = tree.open(parent, given, None)
    ids = [*turn.prompt, *range(20, 20 + n)]
    chosen = [[token, 100 + token] for token in ids[turn.choices_from : -1]]
    reply = Completion(
        0, ids[-n:], [-0.5] * n, [VersionSpan(0, 0, n)], "stop",
        np.array(chosen, np.int32).tobytes(),
    )  # fmt: skip
    tree.close(turn, reply)
    return turn


def test_expert_choices_of_turns_join_to_those_of_each_token() -> None:
    tree = ConversationTree(completion_tokens=100, context_tokens=100)
    first = with_choices(tree, None, [1, 2, 3], 2)
    second = with_choices(tree, first, [4], 3)
    with_choices(tree, second, [5, 6], 1)
    with_choices(tree, first, [7], 2)
    with_choices(tree, None, [8], 1)
    rows = tree.rows()
    tokens = [*rows.prompt_ids, *rows.token_ids]
    lasts = {start - 1 for start in rows.row_starts}
    assert len(lasts) == 2
    expected = [
        [-1, -1] if place in lasts else [token, 100 + token]
        for place, token in enumerate(tokens[:-1])
    ]
    assert rows.expert_choices.reshape(-1, 2).tolist() == expected


def test_choices_of_a_single_reply_are_missing_or_cut() -> None:
    tree = ConversationTree(completion_tokens=100, context_tokens=100)
    first = with_choices(tree, None, [1, 2, 3], 2)
    say(tree, first, [5], [6])
    assert len(tree.rows().expert_choices) == 0
    tree = ConversationTree(completion_tokens=100, context_tokens=100)
    turn = tree.open(None, [1, 2, 3], None)
    cut = np.arange(7, dtype=np.int32).tobytes()
    tree.close(turn, Completion(0, [9, 9], [0.0, 0.0], [VersionSpan(0, 0, 2)], "stop", cut))
    with pytest.raises(EngineError, match="7 expert choices of 4 tokens"):
        tree.rows()
