"""What the queue was sent is in its files, with arrays, times and origin."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.rollout_files import (
    RecordedRollout,
    read_records,
    read_rollouts,
    rollout_files,
)
from megatron_rl.protocol.trained_tokens import (
    TrainedTokens,
    trained_files,
    trained_path,
    write_trained,
)
from megatron_rl.protocol.types import (
    UNGRADABLE,
    Lease,
    Rollout,
    Score,
    VersionSpan,
    WeightsSynced,
)  # fmt: skip
from megatron_rl.rollout_queue.drop_reasons import ATTEMPTS_EXHAUSTED, NOT_NEEDED, ZERO_VARIANCE
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.makers import RIGHT, WRONG, make_group, make_rollout
from tests.rollout_queue.played_queue import PlayedQueue

ONES = TrainedTokens(*np.ones((3, 8), np.float32))


class SendingQueue(PlayedQueue):
    """Its generator sends different tokens each time, and remembers them."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.chance = np.random.default_rng(0)
        self.sent: dict[bytes, Rollout] = {}
        """By the bytes of the token ids, which never come twice."""
        # Its completions are ahead of the trainer's batches.
        self.coordinator._leases.limits.note_version(1)

    def _rollout(self, lease: Lease, index: int) -> Rollout:
        plain = super()._rollout(lease, index)
        tokens = int(self.chance.integers(4, 30))
        spans = [VersionSpan(0, 0, 3), VersionSpan(1, 3, tokens)]
        if lease.prompt.split == "held_out":
            spans = [VersionSpan(0, 0, tokens)]
        rollout = msgspec.structs.replace(
            plain,
            # The same for all completions of a prompt.
            prompt_ids=np.array([ord(letter) for letter in lease.prompt.id], np.int32),
            token_ids=self.chance.integers(0, 2**31 - 1, tokens).astype(np.int32),
            logprobs=-self.chance.random(tokens).astype(np.float32),
            spans=spans,
            first_token_s=0.25,
        )
        self.sent[rollout.token_ids.tobytes()] = rollout
        return rollout


def judge(prompt: str, index: int) -> Score | str:
    """Of five train prompts one has different rewards, and one a completion without any."""
    number = int(prompt[1:])
    if number % 5 == 1 and index == 1:
        return UNGRADABLE
    return RIGHT if number % 5 == 0 and index else WRONG


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[SendingQueue, Path]:
    folder = tmp_path_factory.mktemp("run")
    queue = SendingQueue(
        folder,
        judge,
        classify=lambda request: [0] * len(request.texts),
        held_out=4,
        eval={"prompts": 4, "samples": 2},
        queue={"max_attempts": 1},
    )
    queue.start()
    queue.play(14)
    queue.sync(1)
    queue.play(14)
    assert len(queue.batches) == 2
    queue.coordinator.handle("batches", "t", WeightsSynced(2, is_final=True), queue.now)
    return queue, folder


def test_arrays_are_what_the_queue_was_sent_bit_for_bit(played: tuple[SendingQueue, Path]) -> None:
    queue, folder = played
    found = list(read_rollouts(folder))
    kinds = {(rollout.dropped, bool(rollout.source.label)) for rollout in found}
    assert kinds == {
        ("", False), (ZERO_VARIANCE, False), (NOT_NEEDED, False), (UNGRADABLE, False),
        ("", True), (UNGRADABLE, True),
    }  # fmt: skip
    for rollout in found:
        sent = queue.sent[rollout.token_ids.tobytes()]
        assert (rollout.text, rollout.index) == (sent.text, sent.index)
        assert rollout.prompt_ids.tobytes() == sent.prompt_ids.tobytes()
        assert rollout.logprobs.tobytes() == sent.logprobs.tobytes()
        assert (rollout.token_ids.dtype, rollout.logprobs.dtype) == (np.int32, np.float32)
        assert [VersionSpan(*span) for span in rollout.spans] == sent.spans
        assert rollout.generator == "g" and rollout.times.first_token_s == 0.25
    recorded = [rollout.token_ids.tobytes() for rollout in found]
    assert len(set(recorded)) == len(recorded) and set(recorded) == set(queue.sent)


def test_rewards_parts_and_reasons_are_those_of_the_verifier(
    played: tuple[SendingQueue, Path],
) -> None:
    for rollout in read_rollouts(played[1]):
        verdict = judge(rollout.prompt_id, rollout.index)
        if isinstance(verdict, str):
            assert (rollout.reward, rollout.reason, rollout.parts) == (None, UNGRADABLE, {})
        else:
            told = (rollout.reward, rollout.parts, rollout.reason)
            assert told == (verdict.reward, verdict.parts, verdict.reason)


def test_prompt_of_a_group_is_stored_once(played: tuple[SendingQueue, Path]) -> None:
    path = played[1] / "rollouts" / "step_000000.jsonl"
    records = list(read_records(path))
    assert len(records) == 8
    prompts = {record.prompt_id for record in records}
    words = sum(map(len, prompts)) + 2 * sum(record.tokens for record in records)
    assert path.with_suffix(".int32").stat().st_size == 4 * words


def test_times_are_in_order_and_by_the_queues_clock(tmp_path: Path) -> None:
    queue = SendingQueue(tmp_path, lambda prompt, index: RIGHT if index else WRONG)
    queue.start()
    queue.play(12, is_slow=True)
    rollouts = [rollout for rollout in read_rollouts(tmp_path) if not rollout.dropped]
    # Two groups of four fill the generator in the first second; one completion comes a second.
    assert [rollout.times.leased for rollout in rollouts] == [1001.0] * 8
    assert [rollout.times.done for rollout in rollouts] == [1001.0 + n for n in range(8)]
    assert [rollout.times.scored for rollout in rollouts] == [1001.0 + n for n in range(8)]
    # The last score comes when all that can be sent in its second is sent.
    assert {rollout.times.trained for rollout in rollouts} == {1009.0}


def test_times_are_unix_seconds(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, to_unix_s=lambda at: at + 100.0)
    recorder.write_step(0, [make_group(0, [0.1, 1.0])], now=4.0)
    recorder.write_dropped(make_group(1, [0.1]), ZERO_VARIANCE)
    trained, _, dropped = read_rollouts(tmp_path)
    times = trained.times
    assert (times.leased, times.done, times.scored, times.trained) == (101, 102, 103, 104)
    assert dropped.times.trained is None and times.first_token_s == -1.0


def test_arrays_can_be_switched_off(tmp_path: Path) -> None:
    queue = SendingQueue(tmp_path, judge, queue={"record_tokens": False})
    queue.start()
    queue.play(14)
    assert list((tmp_path / "rollouts").glob("*.int32")) == []
    records = [record for file in rollout_files(tmp_path) for record in read_records(file.path)]
    assert len(records) > 8 and all(record.words is None for record in records)
    assert all(record.spans and record.times for record in records)
    with pytest.raises(InputError, match=r"dropped_000000.jsonl:1 has .*queue.record_tokens"):
        next(read_rollouts(tmp_path))


def numbers_of(rollouts: list[RecordedRollout]) -> list[tuple[int | None, int, int]]:
    """(step, group, tokens) of each."""
    return [(rollout.source.step, rollout.group, len(rollout.token_ids)) for rollout in rollouts]


def test_steps_that_are_taken_again_replace_lines_and_arrays_together(tmp_path: Path) -> None:
    first = Recorder(tmp_path)
    for step in (0, 1, 2):
        first.write_dropped(make_group(10 * step, [0.1], tokens=[9]), ZERO_VARIANCE)
        first.write_step(step, [make_group(10 * step + 1, [0.1], tokens=[8])], now=4.0)
        write_trained(
            trained_path(tmp_path, step, 0), np.array([[10 * step + 1, 0]]), np.array([8]), ONES
        )
    again = Recorder(tmp_path)
    again.resume_at(1)
    before = [(0, 0, 9), (0, 1, 8)]
    assert [step for step, _ in trained_files(tmp_path)] == [0]
    assert numbers_of(read_rollouts(tmp_path)) == before
    aside = tmp_path / "rollouts" / "superseded_1"
    assert len(list(aside.iterdir())) == 10 and len(read_jsonl(aside / "step_000002.jsonl")) == 1
    again.write_step(1, [make_group(56, [0.1], tokens=[3])], now=4.0)
    again.write_dropped(make_group(57, [0.1], tokens=[4]), ZERO_VARIANCE)
    assert numbers_of(read_rollouts(tmp_path)) == [*before, (1, 56, 3), (2, 57, 4)]
    third = Recorder(tmp_path)
    third.resume_at(1)
    third.write_step(1, [make_group(66, [0.1], tokens=[5])], now=4.0)
    assert numbers_of(read_rollouts(tmp_path)) == [*before, (1, 66, 5)]
    assert (tmp_path / "rollouts" / "superseded_2" / "dropped_000002.int32").exists()


def test_what_a_program_printed_is_recorded_with_its_verdict(tmp_path: Path) -> None:
    group = make_group(0, [0.1, 1.0])
    said = "test 2: input '1', expected '1', printed '2'"
    wrong = group.scored[0]
    failed = msgspec.structs.replace(WRONG, detail=said)
    group.scored[0] = msgspec.structs.replace(wrong, score=failed)
    group.prompt = msgspec.structs.replace(group.prompt, other_answers=["3.5"])
    Recorder(tmp_path).write_step(0, [group], now=4.0)
    assert [rollout.detail for rollout in read_rollouts(tmp_path)] == [said, ""]
    assert [rollout.other_answers for rollout in read_rollouts(tmp_path)] == [["3.5"]] * 2


def test_evaluation_that_is_made_again_replaces_lines_and_arrays_together(tmp_path: Path) -> None:
    for tokens in (9, 4):
        group = make_group(0, [0.1, 1.0], tokens=[tokens, tokens])
        Recorder(tmp_path).write_evaluation("before", [group])
    assert numbers_of(read_rollouts(tmp_path)) == [(None, 0, 4), (None, 0, 4)]


def test_rollouts_of_a_group_that_an_evaluation_lost_are_recorded(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    group = make_group(0, [0.1, 1.0])
    group.evaluation = "before"
    recorder.write_dropped(group, ATTEMPTS_EXHAUSTED)
    recorder.write_evaluation("before", [])
    lost = list(read_rollouts(tmp_path))
    assert [rollout.source.path.stem for rollout in lost] == ["dropped_eval_before"] * 2
    assert {(rollout.source.label, rollout.dropped) for rollout in lost} == {
        ("before", ATTEMPTS_EXHAUSTED)
    }


def test_groups_that_are_left_at_the_end_are_recorded(tmp_path: Path) -> None:
    queue = SendingQueue(tmp_path, lambda prompt, index: RIGHT if index else WRONG)
    queue.start()
    queue.play(4)
    assert len(queue.batches) == 1
    queue.coordinator.handle("batches", "t", WeightsSynced(1, is_final=True), queue.now)
    left = [rollout for rollout in read_rollouts(tmp_path) if rollout.source.step == 1]
    assert left and {rollout.dropped for rollout in left} == {NOT_NEEDED}
    assert all(rollout.token_ids.tobytes() in queue.sent for rollout in left)


def test_prompts_that_differ_are_each_stored(tmp_path: Path) -> None:
    group = make_group(0, [0.1, 1.0])
    other = make_rollout(1, prompt_tokens=5)
    group.scored[1] = msgspec.structs.replace(group.scored[1], rollout=other)
    Recorder(tmp_path).write_step(0, [group], now=4.0)
    assert [rollout.prompt_ids.tolist() for rollout in read_rollouts(tmp_path)] == [
        [0, 1], [0, 1, 2, 3, 4],
    ]  # fmt: skip
