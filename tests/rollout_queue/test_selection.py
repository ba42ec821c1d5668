"""Which complete groups are trained on, and from what."""

from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.types import GoldAnswer, Score, ScoredRollout
from megatron_rl.rollout_queue.activity import Activity
from megatron_rl.rollout_queue.batches import minibatch_sequences
from megatron_rl.rollout_queue.circuit_breakers import CircuitBreaker
from megatron_rl.rollout_queue.drop_reasons import ZERO_VARIANCE
from megatron_rl.rollout_queue.evaluation_scheduler import EvaluationScheduler
from megatron_rl.rollout_queue.group_end import DropObservers, GroupEnd
from megatron_rl.rollout_queue.groups import Group, GroupBook
from megatron_rl.rollout_queue.leases import Leases
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.scoring import Scoring
from megatron_rl.rollout_queue.training_groups import TrainingGroups
from tests.rollout_queue.makers import make_group

GOLD = np.array([7, 8], np.int32)


@pytest.fixture
def observers(tmp_path: Path) -> DropObservers:
    config = Config()
    activity = Activity(config, PromptSets([], [], [], 0))
    breaker = CircuitBreaker(config.queue, config.reward, prompts=1)
    return DropObservers(Recorder(tmp_path), activity, breaker)


def select(observers: DropObservers, group: Group, **algorithm: object) -> tuple[str, GroupBook]:
    config = Config.model_validate({"algorithm": algorithm, "eval": {"prompts": 0}})
    prompts = PromptSets([], [], [], 0)
    recorder = observers.recorder
    with closing(JsonlWriter(recorder.run_dir / "evaluations.jsonl", "queue")) as metrics:
        evaluations = EvaluationScheduler(
            config, prompts, recorder=recorder, metrics=metrics, only=""
        )
    training = TrainingGroups(prompts, config)
    leases, scoring = Leases(config.queue), Scoring(config.queue, config.reward)
    ends = GroupEnd(training, leases, scoring, evaluations=evaluations, observers=observers)
    return ends.find_reason_to_drop(group), training.book


def with_gold(group: Group, faults: dict[int, str] | None = None) -> Group:
    """Every completion has a place for the reference answer behind one token, but for faults."""
    for index, scored in group.scored.items():
        fault = (faults or {}).get(index, "")
        gold = GoldAnswer(0, GOLD[:0], fault) if fault else GoldAnswer(1, GOLD)
        rollout = msgspec.structs.replace(scored.rollout, gold=gold)
        group.scored[index] = ScoredRollout(rollout, scored.score)
    return group


def test_a_flat_group_is_dropped(observers: DropObservers) -> None:
    assert select(observers, make_group(0, [0.1, 0.1]))[0] == ZERO_VARIANCE
    assert select(observers, make_group(0, [0.1, 0.1]), zero_variance_groups="keep")[0] == ""


def test_in_mixed_mode_a_group_without_a_right_completion_learns_the_reference_answer(
    observers: DropObservers,
) -> None:
    wrong, solved = with_gold(make_group(0, [0.1, 0.1])), with_gold(make_group(1, [1.0, 1.0]))
    mixed = with_gold(make_group(2, [1.0, 0.1]))
    found = [select(observers, g, preset="jepo_mixed")[0] for g in (wrong, solved, mixed)]
    assert found == ["", ZERO_VARIANCE, ""]
    assert [group.learns_gold for group in (wrong, solved, mixed)] == [True, False, False]


def test_a_completion_without_a_place_is_left_out_recorded_and_counted(
    observers: DropObservers, tmp_path: Path
) -> None:
    group = with_gold(make_group(0, [0.1, 0.1, 0.1]), {1: "gold_retokenized"})
    reason, book = select(observers, group, preset="jepo")
    assert (reason, sorted(group.scored), group.lost) == ("", [0, 2], {1: "gold_retokenized"})
    assert group.is_complete
    row = observers.activity.take_row(now=10.0, in_flight=0, records=None)
    assert row is not None and row["activity/completions_dropped/gold_retokenized"] == 1
    book.open(make_group(5, [1.0, 0.0]))
    assert book.take([5], 0)[1].completions == {"gold_retokenized": 1}
    (line,) = (tmp_path / "rollouts" / "dropped_000000.jsonl").read_text().splitlines()
    assert msgspec.json.decode(line)["dropped"] == "gold_retokenized"


def test_format_failure_completions_stay_as_they_were_sampled(observers: DropObservers) -> None:
    group = with_gold(make_group(0, [0.1, 0.1, 0.0]), {2: "gold_no_place"})
    rollout = group.scored[2].rollout
    group.scored[2] = ScoredRollout(rollout, Score(0.0, {"format": 0.0}, "no_boxed"))
    assert select(observers, group, preset="jepo")[0] == ""
    cfg = AlgorithmConfig(preset="jepo")
    first, second, third = minibatch_sequences([group], find_advantage_functions(cfg))
    for sequence in (first, second):
        assert sequence.token_ids[sequence.prompt_length :].tolist() == [100, 7, 8]
        assert sequence.gold_tokens == 2
        assert sequence.token_versions.tolist() == [0, -1, -1]
        assert len(sequence.generator_logprobs) == 3
    assert third.token_ids[third.prompt_length :].tolist() == [100, 101, 102]
    assert third.gold_tokens == 0
    assert [s.rollout for s in (first, second, third)] == [(0, 0), (0, 1), (0, 2)]
    # Well-formed against ill-formed, normalised: 1/3 and -2/3 over sqrt(2)/3.
    assert first.advantage == pytest.approx(2**-0.5)
    assert third.advantage == pytest.approx(-(2**0.5))
