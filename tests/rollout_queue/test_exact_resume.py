"""A queue whose peers and itself die at random: exact batches in deterministic runs, whole epochs.

Whole runs of the system: tests/end_to_end/test_exact_resume.py.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import RankBatch
from tests.rollout_queue.played_fleet import PlayedFleet, make_config

STEPS, PROMPTS = 12, 20
EXACT = {"queue": {"max_staleness": 0}, "generator": {"deterministic": True, "replicas": 4}}
EVALUATED = {"eval": {"prompts": 5, "every_steps": 3, "samples": 2}}
CURRICULUM = {"curriculum": {"retire_after": 1}}


def starts(
    config: Config, seed: int, *, deaths: int, held_out: int = 0
) -> Iterator[tuple[PlayedFleet, QueueState | None]]:
    """The fleets of a run that is killed some times, and the state that each began with."""
    chance = random.Random(seed)
    state: QueueState | None = None
    for number in range(deaths + 1):
        fleet = PlayedFleet(
            config,
            chance,
            state=state,
            generators=chance.randint(1, 4),
            train=PROMPTS,
            held_out=held_out,
        )
        first = state.step if state else 0
        fleet.play(STEPS if number == deaths else chance.randint(first, STEPS - 1))
        yield fleet, state
        state = fleet.saved or state


def batches_of(config: Config, seed: int, **known: int) -> dict[int, RankBatch]:
    """The batches that count after the last start."""
    batches: dict[int, RankBatch] = {}
    for fleet, state in starts(config, seed, **known):
        first = state.step if state else 0
        batches = {step: batch for step, batch in batches.items() if step < first} | fleet.batches
    return batches


def content(batch: RankBatch) -> list[Any]:
    """All that the trainer computes with, and the figures of the batch."""
    sequences = [
        (s.token_ids.tolist(), s.generator_logprobs.tolist(), s.token_versions.tolist(),
         s.advantage, s.weight, s.reward, s.group, s.member)
        for share in batch.minibatches for microbatch in share.microbatches for s in microbatch
    ]  # fmt: skip
    return [sequences, batch.metrics]


@pytest.mark.parametrize("more", [{}, EVALUATED, CURRICULUM], ids=["plain", "eval", "curriculum"])
def test_batches_of_a_deterministic_run_do_not_depend_on_time_or_deaths(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    train = {"train": {"steps": STEPS, "deterministic": True}}
    held_out = 5 if more is EVALUATED else 0
    expected: dict[int, list[Any]] = {}
    for seed in range(12):
        config = make_config(tmp_path / str(seed), **EXACT, **train, **more)
        found = batches_of(config, seed, deaths=0 if seed < 3 else seed % 4, held_out=held_out)
        contents = {step: content(batch) for step, batch in found.items()}
        expected = expected or contents
        assert sorted(contents) == list(range(STEPS))
        for step in range(STEPS):
            assert contents[step] == expected[step], (seed, step)


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_each_prompt_is_used_once_an_epoch_whatever_happens(
    tmp_path: Path, max_staleness: int
) -> None:
    for seed in range(12):
        config = make_config(
            tmp_path / str(seed),
            queue={"max_staleness": max_staleness},
            train={"steps": STEPS},
        )
        *_, (fleet, _) = starts(config, seed, deaths=seed % 4)
        records = used(config.run.dir)
        assert len(records) == len({number for number, _ in records})
        of_prompt = Counter(prompt for _, prompt in records)
        draws = fleet.coordinator._training.state(STEPS, groups_opened=0).cursor.draws
        assert draws > 1.5 * PROMPTS and len(records) == draws
        assert set(of_prompt.values()) <= {draws // PROMPTS, -(-draws // PROMPTS)}


def used(run_dir: Path) -> list[tuple[int, str]]:
    """(number, prompt) of each group that was trained on, dropped, or not needed at the end."""
    files = [*(run_dir / "rollouts").glob("step_*.jsonl"),
             *(run_dir / "rollouts").glob("dropped_??????.jsonl")]  # fmt: skip
    return sorted({(r["group"], r["prompt_id"]) for path in files for r in read_jsonl(path)})
