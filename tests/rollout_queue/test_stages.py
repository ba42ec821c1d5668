"""Every rollout is sampled, judged and batched by the rules of its stage: records audited."""

import collections
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_rl.config.stages import StageConfig
from megatron_rl.config.staging import resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import Lease, RankBatch, ScoreRequest
from megatron_rl.rollout_queue.training_groups import TrainingGroups
from tests.rollout_queue.staged_run import SLOTS, StagedRun, staged_config

STEPS = 12
# Worked out from staged_config: of each stage, steps, (groups, size, minibatches), (limit, margin,
# largest penalty), staleness.
STAGES = [
    (range(0, 4), (8, 4, 2), (20, 10, 0.1), 2),
    (range(4, 7), (3, 6, 1), (40, 20, 0.2), 2),
    (range(7, 12), (5, 3, 1), (60, 20, 0.2), 1),
]


def stage_of(step: int) -> int:
    return next(number for number, (steps, *_) in enumerate(STAGES) if step in steps)


def penalty(tokens: int, limit: int, margin: int, largest: float) -> float:
    """As the paper has it, equation 1."""
    if tokens <= limit - margin:
        return 0.0
    return -largest * (tokens - (limit - margin)) / margin if tokens <= limit else -largest


def records(folder: Path, pattern: str) -> dict[int, list[dict[str, Any]]]:
    files = sorted((folder / "rollouts").glob(pattern))
    return {int(path.stem.split("_")[1]): read_jsonl(path) for path in files}


def audit_lengths(folder: Path) -> collections.Counter[int]:
    """Rollouts by stage, after each was held against the length rule of its stage."""
    seen: collections.Counter[int] = collections.Counter()
    for of_file in records(folder, "*.jsonl").values():
        for record in of_file:
            stage = record.get("stage", 0)
            rule = STAGES[stage][2]
            assert record["tokens"] <= rule[0]
            assert (record["finish_reason"] == "length") == (record["tokens"] == rule[0])
            assert math.isclose(record["parts"]["length"], penalty(record["tokens"], *rule))
            seen[stage] += 1
    return seen


def audit_batches(folder: Path, *, is_strict: bool) -> None:
    """Each batch is of its stage alone, and as large as this says."""
    batches = records(folder, "step_*.jsonl")
    assert list(batches) == list(range(STEPS))
    for step, of_batch in batches.items():
        _, (groups, size, _), _, staleness = STAGES[stage_of(step)]
        sizes = collections.Counter(record["group"] for record in of_batch)
        assert len(sizes) == groups and set(sizes.values()) == {size}
        assert {record.get("stage", 0) for record in of_batch} == {stage_of(step)}
        oldest = min(min(record["versions"]) for record in of_batch)
        assert step - oldest <= staleness or not is_strict


@pytest.mark.parametrize("is_strict", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_every_rollout_matches_its_stage(tmp_path: Path, seed: int, is_strict: bool) -> None:
    config = staged_config(tmp_path, queue={"strict_staleness": is_strict})
    run = StagedRun(config, seed=seed)
    run.run(STEPS)
    audit_batches(tmp_path, is_strict=is_strict)
    seen = audit_lengths(tmp_path)
    for stage, (steps, (groups, size, minibatches), rule, _) in enumerate(STAGES):
        assert seen[stage] >= len(steps) * groups * size
        for step in steps:
            batch = run.batches[step]
            assert (batch.step, len(batch.minibatches)) == (step, minibatches)
            assert batch.metrics["queue/stage"][0] == stage
        # What verifiers were told is what the completions were sampled by.
        rules = [r.length_rule for of, r in run.requests if of.sampling.max_new_tokens == rule[0]]
        told = {(told.max_tokens, told.margin_tokens, told.largest) for told in rules}
        assert told == {rule}
    # The first groups of a stage are older than its first batch: slots did not wait for it.
    first = records(tmp_path, "step_*.jsonl")[4]
    assert min(min(record["versions"]) for record in first) < 4


@pytest.mark.parametrize("killed_at", [3, 5, 8])
def test_a_resumed_run_goes_on_in_its_stage(tmp_path: Path, killed_at: int) -> None:
    config = staged_config(tmp_path, queue={"strict_staleness": True})
    before = StagedRun(config, seed=7)
    before.run(killed_at)
    state = before.save()
    assert state.stages.first_steps == [0, 4, 7]
    # Groups of the stage, and of the next one where its first batch is within the staleness.
    stages = {group.stage for group in state.unfinished}
    assert stages <= {stage_of(killed_at), stage_of(min(killed_at + 2, 11))} and stages
    after = StagedRun(config, seed=8, state=state)
    after.run(STEPS)
    assert [batch.step for batch in after.batches] == list(range(killed_at, STEPS))
    assert after.batches[0].metrics["queue/stage"][0] == stage_of(killed_at)
    audit_batches(tmp_path, is_strict=True)
    audit_lengths(tmp_path)
    stage_of_group = {group.number: group.stage for group in state.unfinished}
    again = [r for of_file in records(tmp_path, "*.jsonl").values() for r in of_file
             if r["group"] in stage_of_group]  # fmt: skip
    assert again and all(r.get("stage", 0) >= stage_of_group[r["group"]] for r in again)
    trained = [r for of_file in records(tmp_path, "step_*.jsonl").values() for r in of_file]
    groups = collections.Counter((r["group"], r["prompt_id"]) for r in trained)
    assert len(groups) == sum(len(steps) * sizes[0] for steps, sizes, *_ in STAGES)


def test_a_plateau_ends_a_stage_at_a_batch_boundary_and_strands_nothing(tmp_path: Path) -> None:
    plateau = {"metric": "rollout/correct", "window": 2, "min_gain": 0.9}
    stages = [{"plateau": plateau, "sampling": {"max_new_tokens": 60},
               "train": {"prompts_per_batch": 2}}]  # fmt: skip
    config = staged_config(tmp_path, stages=stages, queue={"strict_staleness": True})
    run = StagedRun(config, seed=1)
    run.run(STEPS)
    # No gain is 0.9: the batch of step 3 is the last of the second window. What is open then has
    # its batches first, at most those that max_staleness allows.
    stages = [int(batch.metrics["queue/stage"][0]) for batch in run.batches]
    first = stages.index(1)
    assert stages == [0] * first + [1] * (STEPS - first) and 4 <= first <= 4 + 3
    for step, of_batch in records(tmp_path, "step_*.jsonl").items():
        assert {record.get("stage", 0) for record in of_batch} == {stages[step]}
        assert len({record["group"] for record in of_batch}) == (2 if stages[step] else 8)


def test_the_bound_of_untrained_groups_holds_at_every_change(tmp_path: Path) -> None:
    """Groups in no batch and in training, at most the batches that they may be trained in."""
    run = StagedRun(staged_config(tmp_path), seed=3)
    book, most = run.coordinator._groups, collections.Counter()

    finish_some = run._finish_some

    def watch() -> None:
        for stage, (steps, (groups, *_), _, staleness) in enumerate(STAGES):
            window = range(run.step, run.step + staleness + 1)
            room = groups * sum(step in steps or step >= 12 for step in window)
            untrained = book.untrained_of(stage)
            # Of a stage that is over, the batch in training may be left.
            assert untrained <= max(room, groups if run.step - 1 in steps else 0)
            most[stage] = max(most[stage], untrained)
        assert len(run.in_flight) <= SLOTS
        finish_some()

    run._finish_some = watch
    run.run(STEPS)
    # The bound is reached where slots allow it: stage 2 may have 2 batches of 5.
    assert most[2] > 5


class Sent(NamedTuple):
    """What the queue sends of one stage, and what it draws and opens groups by."""

    lease: Lease
    request: ScoreRequest
    batch: RankBatch
    room: int
    """Groups that may be untrained at once."""
    weights: list[float]

    @property
    def groups(self) -> int:
        return sum(minibatch.groups for minibatch in self.batch.minibatches)


READERS: dict[str, tuple[str, Callable[[Sent], Any], tuple[Any, Any]]] = {
    "sampling.max_new_tokens": (
        "generators; verifiers' length rule; no trainer",
        lambda s: (s.lease.sampling.max_new_tokens, s.request.length_rule.max_tokens),
        ((20, 20), (40, 40)),
    ),
    "sampling.temperature": (
        "generators; trainer: logits of every pass",
        lambda s: (s.lease.sampling.temperature, {m.temperature for m in s.batch.minibatches}),
        ((1.0, {1.0}), (0.7, {0.7})),
    ),
    "sampling.top_p": (
        "generators; no trainer: its logprobs are of the whole vocabulary",
        lambda s: s.lease.sampling.top_p,
        (1.0, 0.9),
    ),
    "reward.length": ("verifiers", lambda s: s.request.length_rule.largest, (0.1, 0.2)),
    "reward.length_margin_tokens": (
        "verifiers",
        lambda s: s.request.length_rule.margin_tokens,
        (10, 30),
    ),
    "train.prompts_per_batch": ("queue", lambda s: s.groups, (8, 3)),
    "train.group_size": (
        "queue; trainer: places of a group in sums over groups",
        lambda s: {m.members for m in s.batch.minibatches},
        ({4}, {6}),
    ),
    "train.minibatches": (
        "queue; trainer: optimizer steps, and by them the learning rate",
        lambda s: len(s.batch.minibatches),
        (2, 1),
    ),
    "queue.max_staleness": ("queue", lambda s: s.room, (3 * 8, 2 * 3)),
    "weights": ("queue", lambda s: s.weights, ([1.0], [3.0])),
}
"""Of each key of a stage: who reads it; where that is seen; what is there in stages 0 and 1."""


def keys_of_a_stage() -> set[str]:
    """All that a stage may change."""
    found = set()
    for name, field in StageConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if name not in ("name", "at_step", "plateau"):
            found |= {name} if inner is None else {f"{name}.{key}" for key in inner}
    return found


def room_of(config: Config, prompts: PromptSets, stage: int, step: int) -> int:
    """Groups of a stage that may be opened while none is trained on."""
    training = TrainingGroups(prompts, config)
    book = training.book
    while training.due_stage(step, step) == stage:
        book.open(training.open(book.untaken, step, stage))
    return book.untaken


def test_every_key_of_a_stage_reaches_all_that_read_it(tmp_path: Path) -> None:
    assert READERS.keys() == keys_of_a_stage()
    stage = {
        "at_step": 4,
        "sampling": {"max_new_tokens": 40, "temperature": 0.7, "top_p": 0.9},
        "reward": {"length": 0.2, "length_margin_tokens": 30},
        "train": {"prompts_per_batch": 3, "group_size": 6, "minibatches": 1},
        "queue": {"max_staleness": 1},
        "weights": {"0": 3.0},
    }
    source = {"kind": "reasoning_gym", "name": "chain_sum"}
    config = staged_config(tmp_path, stages=[stage], prompts=[source])
    run = StagedRun(config, seed=0)
    run.run(8)
    for number, step in enumerate((1, 6)):
        resolved = resolve_stages(config)[number]
        limit = resolved.sampling.max_new_tokens
        sent = next(found for found in run.requests if found[0].sampling.max_new_tokens == limit)
        weights = run.prompt_sets.weights_of(resolved)
        seen = Sent(
            *sent, run.batches[step], room_of(config, run.prompt_sets, number, step), weights
        )
        for key, (_, found, expected) in READERS.items():
            assert found(seen) == expected[number], key
