"""Replay: what files hold, which groups a step draws, and what a batch makes of them."""

import itertools
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.rollout import TurnReturn, no_rollout
from megatron_rl.protocol.rollout_files import write_thinned
from megatron_rl.protocol.types import RankBatch, ScoredRollout, TrainSequence
from megatron_rl.rollout_queue.batches import minibatch_sequences
from megatron_rl.rollout_queue.drop_reasons import (
    ENVIRONMENT_FAILED,
    ZERO_VARIANCE,
    ScoreFailure,
)
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.replay import (
    BufferReplay,
    Drawn,
    StoredGroups,
    StoredReplay,
    open_replay,
)
from tests.rollout_queue.makers import form_batch, make_group, make_prompt, make_score
from tests.rollout_queue.played_queue import PlayedQueue

MIXED = [1.0, 0.0, 0.25, 0.0]


def record_run(folder: Path, groups: int) -> Path:
    """A run with two steps, and a zero-variance, an ungradable and an overlong group."""
    recorder = Recorder(folder)
    half = groups // 2
    recorder.write_step(0, [make_group(n, MIXED, versions=(0, 1)) for n in range(half)], 5.0)
    recorder.write_dropped(make_group(100, [0.0, 0.0]), ZERO_VARIANCE)
    recorder.write_dropped(make_group(101, [0.0, 1.0]), "ungradable")
    with_loss = make_group(half, MIXED)
    recorder.write_left_out(with_loss, with_loss.scored.pop(2), "no_place")
    late = [make_group(n, MIXED) for n in range(half + 1, groups)]
    recorder.write_step(1, [with_loss, *late, make_group(102, MIXED, tokens=[9, 90, 9, 9])], 6.0)
    return folder


def config_of(folder: Path, *, share: float = 0.5, groups: int = 4, **replay: object) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": folder, "seed": 3},
            "train": {"prompts_per_batch": groups, "steps": 8},
            "generator": {"context_tokens": 64},
            "sampling": {"max_new_tokens": 32},
            "reward": {"length_margin_tokens": 8},
            "replay": {"share": share, **replay},
        }
    )


def numbers(replay: StoredReplay | BufferReplay | None, step: int) -> list[int]:
    assert replay is not None
    return [group.number for group in replay.draw(step, []).load()]


def test_the_index_holds_what_can_be_trained_on_and_counts_the_rest(tmp_path: Path) -> None:
    record_run(tmp_path, 6)
    stored = StoredGroups()
    stored.add_run(tmp_path, context_tokens=64, drops_zero_variance=True, held_out=frozenset())
    assert [group.members[0].group for group in stored.groups] == list(range(6))
    # The completion without a place is of group 3, which is there.
    assert stored.left_out == {"zero_variance": 1, "ungradable": 1, "too_long": 1}
    keeping = StoredGroups()
    held_out = frozenset({"question p2"})
    keeping.add_run(tmp_path, context_tokens=100, drops_zero_variance=False, held_out=held_out)
    expected = {0, 1, 3, 4, 5, 100, 102}
    assert {group.members[0].group for group in keeping.groups} == expected
    assert keeping.left_out == {"ungradable": 1, "held_out": 1}


@pytest.mark.parametrize("is_thinned", [False, True])
def test_conversations_that_failed_are_left_out_of_their_groups(
    tmp_path: Path, is_thinned: bool
) -> None:
    recorder = Recorder(tmp_path)
    trained, not_needed, dead = (make_group(number, MIXED) for number in (0, 1, 2))
    for group in (trained, not_needed, dead):
        # Nothing is left of a conversation whose environment failed, not even tokens.
        for index in range(4) if group is dead else (3,):
            nothing = no_rollout(1, index)
            recorder.write_ungraded(ScoreFailure(group, nothing, ENVIRONMENT_FAILED, "x"))
            del group.scored[index]
    # Of group 1 grading failed too, which leaves tokens.
    ungraded = not_needed.scored.pop(2).rollout
    recorder.write_ungraded(ScoreFailure(not_needed, ungraded, "ungradable", "x"))
    recorder.write_step(0, [trained], 5.0)
    recorder.write_dropped(not_needed, "not_needed")
    recorder.write_dropped(dead, ENVIRONMENT_FAILED)
    if is_thinned:
        write_thinned(tmp_path / "rollouts", 2)
        for words in (tmp_path / "rollouts").glob("dropped_*.int32"):
            words.unlink()
    stored = StoredGroups()
    stored.add_run(tmp_path, context_tokens=64, drops_zero_variance=True, held_out=frozenset())
    [group] = stored.groups
    assert [record.index for record in group.members] == [0, 1, 2]
    assert group.load(keeps_versions=False).rewards == MIXED[:3]
    assert stored.left_out == {
        "tokens_thinned" if is_thinned else "not_needed": 1, "environment_failed": 1
    }  # fmt: skip


def test_tokens_that_were_not_recorded_cannot_be_replayed(tmp_path: Path) -> None:
    Recorder(tmp_path, keeps_tokens=False).write_step(0, [make_group(0, MIXED)], 5.0)
    stored = StoredGroups()
    with pytest.raises(InputError, match=r"step_000000.jsonl:1 .* queue.record_tokens = false"):
        stored.add_run(tmp_path, context_tokens=64, drops_zero_variance=True, held_out=frozenset())


def test_recorded_groups_have_zero_variance_by_the_returns_of_their_replies(
    tmp_path: Path,
) -> None:
    # Equal rewards and other returns, then other rewards and equal returns.
    groups = [make_group(0, [1.0, 1.0]), make_group(1, [1.0, 0.0])]
    for group, values in zip(groups, [(1.0, 0.0), (0.5, 0.5)], strict=True):
        for index, value in enumerate(values):
            rollout, score = group.scored[index].rollout, group.scored[index].score
            rollout = msgspec.structs.replace(rollout, turn_returns=[TurnReturn(0, 3, value)])
            group.scored[index] = ScoredRollout(rollout, score)
    Recorder(tmp_path).write_step(0, groups, 5.0)
    stored = StoredGroups()
    stored.add_run(tmp_path, context_tokens=64, drops_zero_variance=True, held_out=frozenset())
    assert [group.members[0].group for group in stored.groups] == [0]
    assert stored.left_out == {"zero_variance": 1}


def test_a_stored_group_is_trained_on_as_it_was_but_for_its_versions(tmp_path: Path) -> None:
    record_run(tmp_path, 2)
    stored = StoredGroups()
    stored.add_run(tmp_path, context_tokens=64, drops_zero_variance=True, held_out=frozenset())
    advantage_functions = find_advantage_functions(Config().algorithm)
    was = minibatch_sequences([make_group(0, MIXED, versions=(0, 1))], advantage_functions)
    for keeps_versions in (True, False):
        (found, *_) = (group.load(keeps_versions=keeps_versions) for group in stored.groups)
        for mine, theirs in zip(
            minibatch_sequences([found], advantage_functions), was, strict=True
        ):
            for field in TrainSequence.__struct_fields__:
                expected = getattr(theirs, field)
                if field == "version_runs" and not keeps_versions:
                    expected = [(-1, count) for _, count in expected]
                if field == "rollout" and not keeps_versions:
                    # No line of this run is of it.
                    expected = (-1, 0)
                assert np.array_equal(getattr(mine, field), expected), field
    # The completion that its group was trained without is not back.
    assert [len(group.members) for group in stored.groups] == [4, 3]


def test_each_group_is_drawn_once_before_any_twice_and_after_a_resume_the_same(
    tmp_path: Path,
) -> None:
    run = record_run(tmp_path / "old", 10)
    config = config_of(tmp_path / "new", runs=[run])
    drawn = [numbers(open_replay(config, []), step) for step in range(10)]
    replay = open_replay(config, [])
    assert [numbers(replay, step) for step in range(10)] == drawn
    flat = list(itertools.chain(*drawn))
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:] and flat[:10] != list(range(10))
    metrics = {metric.name: metric.value for metric in replay.draw(10, []).metrics(10)}
    assert metrics == {
        "queue/replay_groups": 10, "queue/replay_left_out_zero_variance": 1,
        "queue/replay_left_out_ungradable": 1, "queue/replay_left_out_too_long": 1,
        "queue/replayed_groups": 2,
        "queue/replayed_rollouts": sum(3 if n == 5 else 4 for n in numbers(replay, 10)),
        "queue/replayed_reward": sum(1.0 if n == 5 else 1.25 for n in numbers(replay, 10)),
        "queue/replayed_age_versions_mean": 0,
    }  # fmt: skip


def test_a_file_without_words_or_that_was_cut_is_named(tmp_path: Path) -> None:
    run = record_run(tmp_path / "old", 4)
    config = config_of(tmp_path / "new", runs=[run])
    replay = open_replay(config, [])
    words = run / "rollouts" / "step_000001.int32"
    whole = words.read_bytes()
    words.write_bytes(whole[:8])
    with pytest.raises(InputError, match="was cut or replaced"):
        for step in range(2):
            replay.draw(step, []).load()
    words.unlink()
    with pytest.raises(InputError, match="step_000001.int32, which does not exist"):
        open_replay(config, [])


def test_nothing_to_draw_is_bad_input_that_says_what_was_left_out(tmp_path: Path) -> None:
    Recorder(tmp_path / "old").write_dropped(make_group(0, [0.0, 0.0]), ZERO_VARIANCE)
    with pytest.raises(InputError, match=r"\{'zero_variance': 1\}.*zero_variance_groups='keep'"):
        open_replay(config_of(tmp_path / "new", runs=[tmp_path / "old"]), [])


def sampled(step: int) -> list[Group]:
    """Two groups of the version of the step, of which the second is one older."""
    return [
        make_group(2 * step, MIXED, versions=(step,)),
        make_group(2 * step + 1, MIXED, versions=(max(step - 1, 0), step)),
    ]


def test_a_buffer_draws_of_the_latest_groups_none_that_is_too_old(tmp_path: Path) -> None:
    config = config_of(tmp_path, buffer_groups=8, max_age=3)
    replay = open_replay(config, [])
    seen: Counter[int] = Counter()
    for step in range(60):
        drawn = replay.draw(step, sampled(step))
        ages = {group.number: step - group.number // 2 for group in drawn.groups}
        # Of step 0 there is nothing, of step 1 what step 0 had.
        assert len(ages) == (2 if step else 0)
        # An even group is as old as its step says, an odd one a version older.
        assert all(1 <= age <= (2 if number % 2 else 3) for number, age in ages.items())
        seen.update(age for age in ages.values())
        metrics = {metric.name: metric for metric in drawn.metrics(step)}
        assert metrics["queue/replay_groups"].value == min(2 * step, 8)
        if step:
            versions = [max(number // 2 - number % 2, 0) for number in ages]
            assert metrics["queue/replayed_age_versions_max"].value == step - min(versions)
    assert set(seen) == {1, 2, 3}


def test_a_resumed_buffer_draws_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    config = config_of(tmp_path, buffer_groups=6, max_age=3)
    whole = open_replay(config, [])
    # As in the new folder of a run that begins at the checkpoint of another one.
    whole.resume_at(5)
    assert not whole.draw(0, []).groups
    recorder = Recorder(tmp_path)
    for step in range(5):
        whole.draw(step, sampled(step))
        recorder.write_step(step, sampled(step), now=1.0)
        recorder.write_dropped(make_group(1000 + step, [0.0, 0.0]), ZERO_VARIANCE)
    resumed = open_replay(config, [])
    resumed.resume_at(5)
    for step in range(5, 9):
        one, other = (replay.draw(step, sampled(step)).groups for replay in (whole, resumed))
        assert [group.number for group in one] == [group.number for group in other]
        for mine, theirs in zip(one, other, strict=True):
            for a, b in zip(mine.ordered, theirs.ordered, strict=True):
                assert a.rollout.spans == b.rollout.spans
                assert np.array_equal(a.rollout.token_ids, b.rollout.token_ids)


def groups_of(batch: RankBatch) -> list[list[TrainSequence]]:
    """Sequences of a batch of one minibatch, group by group."""
    (minibatch,) = batch.minibatches
    sequences = itertools.chain(*minibatch.microbatches)
    return [
        list(group)
        for _, group in itertools.groupby(
            sorted(sequences, key=lambda s: s.group), lambda s: s.group
        )
    ]


@pytest.mark.parametrize(("share", "fresh"), [(0.5, 2), (1.0, 0)])
def test_replayed_groups_take_their_share_of_each_batch(
    tmp_path: Path, share: float, fresh: int
) -> None:
    record_run(tmp_path / "old", 10)
    queue = PlayedQueue(
        tmp_path / "new",
        lambda prompt, index: make_score(MIXED[index]),
        train={"prompts_per_batch": 4, "group_size": 4, "steps": 3},
        replay={"share": share, "runs": [tmp_path / "old"]},
        queue={"max_staleness": 0},
    )
    queue.start()
    for version in (1, 2, 3):
        queue.play(6)
        queue.sync(version)
    assert len(queue.batches) == 3
    for batch in queue.batches:
        groups = groups_of(batch)
        is_old = [all((s.token_versions == -1).all() for s in group) for group in groups]
        assert is_old == [False] * fresh + [True] * (4 - fresh)
        assert batch.metrics["queue/replayed_groups"][0] == 4 - fresh
        assert batch.metrics["queue/groups_trained"][0] == fresh
        assert batch.metrics["queue/rollouts_trained"][0] == 4 * fresh
        # Weights are of the whole batch: a group weighs as much as any other.
        for group in groups:
            weight = sum(s.weight * len(s.generator_logprobs) for s in group)
            assert weight == pytest.approx(1 / 4)
    # With max_staleness 0 nothing is sampled ahead.
    assert len({prompt for prompt, _ in queue.leased}) == 3 * fresh


def test_held_out_questions_are_not_replayed(tmp_path: Path) -> None:
    record_run(tmp_path / "old", 4)
    config = config_of(tmp_path / "new", runs=[tmp_path / "old"])
    replay = open_replay(config, [make_prompt("P3"), make_prompt("p1")])
    assert {n for step in range(4) for n in numbers(replay, step)} == {0, 2}
    left_out = {metric.name: metric.value for metric in replay.draw(0, []).of_source}
    assert left_out["queue/replay_left_out_held_out"] == 2


def test_a_replayed_group_keeps_its_logprobs_in_a_batch_of_another_temperature() -> None:
    stage = Config.model_validate(
        {"sampling": {"temperature": 0.5}, "train": {"prompts_per_batch": 2}}
    )
    old, new = make_group(0, MIXED, versions=(0,)), make_group(1, MIXED, versions=(3,))
    [share] = form_batch(3, [new], stage, replayed=Drawn((old,)))
    (minibatch,) = share.minibatches
    # One policy is trained; whoever sampled, the recorded probability is what ratios divide by.
    assert minibatch.temperature == 0.5
    for sequence in itertools.chain(*minibatch.microbatches):
        assert sequence.generator_logprobs.tolist() == [-0.5] * len(sequence.generator_logprobs)
