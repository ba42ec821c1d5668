"""The queue as a process that is killed after a checkpoint, and started again from it."""

import collections
import signal
from pathlib import Path

import msgspec

from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, QUEUE_STATE, seal
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import NextBatch, RankBatch, SaveState, Stop, WeightsSynced
from tests.rollout_queue.scripted_peers import ScriptedPeers, start_queue, write_config

SAVED_AT, KILLED_AT, STEPS = 3, 5, 8
GROUPS, PROMPTS = 4, 200


class SavingPeers(ScriptedPeers):
    """Trainers that save their state after batch number `save_at`."""

    def __init__(self, config: Config, *, save_at: int = -1, first_step: int = 0) -> None:
        super().__init__(config, hold=9)
        self.save_at, self.saved = save_at, None
        self.step = first_step

    def _sync(self, version: int) -> None:
        if version != self.save_at or self.saved is not None:
            super()._sync(version)
            return
        self.version = version
        self._announce()
        self.trainers[0].send(WeightsSynced(version, version == self.config.train.steps))
        self.trainers[0].send(SaveState(version))

    def _on_trainer(self, rank: int, message: RankBatch | QueueState | Stop) -> None:
        if not isinstance(message, QueueState):
            super()._on_trainer(rank, message)
            return
        self.saved = message
        self.trainers[0].send(NextBatch(self.step, 0, 1))


def make_config(folder: Path, **sections: object) -> Config:
    train = {"steps": STEPS, "prompts_per_batch": GROUPS, "group_size": 4}
    return write_config(
        folder, PROMPTS, 10, train=train, eval={"prompts": 4, "every_steps": SAVED_AT}, **sections
    )


def run_until_killed(config: Config) -> QueueState:
    queue = start_queue(config)
    peers = SavingPeers(config, save_at=SAVED_AT)
    peers.on_step = lambda step: queue.kill() if step == KILLED_AT else None
    peers.play(queue, exit_code=-signal.SIGKILL)
    assert peers.saved is not None
    return peers.saved


def save(config: Config, state: QueueState) -> None:
    partial = config.run.dir / CHECKPOINTS / "step.partial"
    partial.mkdir(parents=True)
    (partial / QUEUE_STATE).write_bytes(msgspec.json.encode(state))
    seal(partial, state.step, {})


def test_no_prompt_vanishes_and_none_is_trained_twice(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    state = run_until_killed(config)
    assert (state.step, state.cursor.draws) == (SAVED_AT, sum(state.cursor.taken))
    # Evaluations of the version that was saved may have been under way.
    assert set(state.evaluated) <= {"before", "step_3"} and "before" in state.evaluated
    before = [trained_groups(tmp_path, step) for step in range(SAVED_AT)]
    save(config, state)
    queue = start_queue(config)
    peers = SavingPeers(config, first_step=SAVED_AT)
    peers.play(queue)
    assert [batch[0].step for batch in peers.batches] == list(range(SAVED_AT, STEPS))
    groups = [trained_groups(tmp_path, step) for step in range(STEPS)]
    assert groups[:SAVED_AT] == before
    trained = collections.Counter(group for of_step in groups for group in of_step)
    assert len(trained) == STEPS * GROUPS and set(trained.values()) == {1}
    prompts = [prompt for _, prompt in trained]
    assert len(set(prompts)) == len(prompts)
    leased = {lease.prompt.id for _, lease in peers.leases if lease.prompt.split == "train"}
    unfinished = [group.prompt_id for group in state.unfinished]
    assert unfinished and set(unfinished) <= leased
    done_before = {prompt for of_step in before for _, prompt in of_step}
    assert not done_before & leased
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    labels = [row["label"] for row in rows if "eval/accuracy" in row]
    # The one of the saved version itself was made between the checkpoint and the kill.
    assert labels == ["before", "step_3", "step_6", "after"]


STAGES = [
    {"at_step": 1, "train": {"prompts_per_batch": 3}, "sampling": {"max_new_tokens": 1100}},
    {"at_step": 2, "train": {"group_size": 6}, "sampling": {"max_new_tokens": 1200}},
]


def test_a_queue_killed_in_stage_2_resumes_in_stage_2(tmp_path: Path) -> None:
    config = make_config(tmp_path, stages=STAGES, curriculum={"retire_after": 3})
    state = run_until_killed(config)
    assert state.stages.first_steps == [0, 1, 2] and state.curriculum is not None
    assert {group.stage for group in state.unfinished} == {2}
    save(config, state)
    queue = start_queue(config)
    peers = SavingPeers(config, first_step=SAVED_AT)
    assert "resumed in stage 2" in peers.play(queue)
    training = [lease for _, lease in peers.leases if lease.prompt.split == "train"]
    assert {lease.sampling.max_new_tokens for lease in training} == {1200}
    sizes = [(4, 4), (3, 4), *[(3, 6)] * (STEPS - 2)]
    for step, (groups, size) in enumerate(sizes):
        records = read_jsonl(tmp_path / "rollouts" / f"step_{step:06d}.jsonl")
        assert {record.get("stage", 0) for record in records} == {min(step, 2)}
        of_group = collections.Counter(record["group"] for record in records)
        assert len(of_group) == groups and set(of_group.values()) == {size}


def trained_groups(folder: Path, step: int) -> list[tuple[int, str]]:
    """(group, prompt) of the groups of a batch."""
    records = read_jsonl(folder / "rollouts" / f"step_{step:06d}.jsonl")
    return sorted({(record["group"], record["prompt_id"]) for record in records})


def test_queue_and_trainer_must_begin_at_the_same_step(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    queue = start_queue(config)
    peers = SavingPeers(config, first_step=SAVED_AT)
    message = peers.play(queue, exit_code=1)
    assert "the trainer begins with version 3, the queue with 0" in message
    assert "checkpoint.resume" in message
