"""A staged run against a coordinator, with the verifier's own scoring and completions drawn by lot.

Half of the completions in flight end at a time, in any order, so that groups overtake each other.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import (
    GeneratorReady,
    Lease,
    NextBatch,
    Prompt,
    RankBatch,
    Rollout,
    RolloutDone,
    SaveState,
    ScoreDone,
    ScoreRequest,
    VerifierReady,
    VersionSpan,
    WeightsSynced,
)  # fmt: skip
from megatron_rl.rollout_queue.coordinator import BATCHES, PROMPTS, VERIFY, Coordinator
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.makers import make_prompt
from tests.rollout_queue.virtual import VERIFIER_ROOM
from verification.rules import RewardRules
from verification.score import score

SLOTS = 24
PROMPTS_OF_A_RUN = tuple(make_prompt(f"p{n}") for n in range(60))
PATIENCE = 2000
"""Turns without a batch after which the queue is stuck."""


class StagedRun:
    """One process of the queue, from its start or from a saved state."""

    def __init__(
        self,
        config: Config,
        *,
        seed: int,
        state: QueueState | None = None,
        solves: Callable[[Prompt], float] = lambda prompt: 0.5,
        prompts: Sequence[Prompt] = PROMPTS_OF_A_RUN,
    ) -> None:
        """solves: chance of a right completion."""
        self.config, self.solves = config, solves
        self.chance = random.Random(seed)
        self.rules = RewardRules.of(config)
        self.prompt_sets = sets = PromptSets([list(prompts)], [1.0], [], 0)
        self._metrics = JsonlWriter(config.run.dir / "metrics.jsonl", "queue")
        self.coordinator = Coordinator(
            config, sets, recorder=Recorder(config.run.dir), metrics=self._metrics, now=0.0
        )
        if state is not None:
            self.coordinator.resume(state)
        self.step = state.step if state is not None else 0
        self.in_flight: list[tuple[Lease, int]] = []
        self.requests: list[tuple[Lease, ScoreRequest]] = []
        self.batches: list[RankBatch] = []
        self.saved: QueueState | None = None
        self.most_open = 0
        """Completions in flight, and of groups in no batch, at most."""
        self._leases: dict[str, Lease] = {}

    def run(self, until: int) -> None:
        """Train until so many batches are done in all."""
        with closing(self._metrics):
            self.coordinator.handle(VERIFY, "v", VerifierReady(VERIFIER_ROOM, 1), 0.0)
            self._sync()
            idle = 0
            while self.step < until:
                had = len(self.batches)
                self._pump()
                self._finish_some()
                idle = 0 if len(self.batches) > had else idle + 1
                assert idle < PATIENCE, self.coordinator.describe(0.0)
                if len(self.batches) > had:
                    self.step += 1
                    self._sync()

    def save(self) -> QueueState:
        """The state after the batches so far; call after `run`."""
        self.coordinator.handle(BATCHES, "t", SaveState(self.step), 0.0)
        self._pump()
        assert self.saved is not None
        return self.saved

    def _sync(self) -> None:
        self.coordinator.handle(PROMPTS, "g", GeneratorReady(SLOTS, self.step, 1), 0.0)
        is_final = self.step == self.config.train.steps
        self.coordinator.handle(BATCHES, "t", WeightsSynced(self.step, is_final), 0.0)

    def _pump(self) -> None:
        wanted = NextBatch(self.step, 0, 1)
        if self.saved is None and self.step < self.config.train.steps:
            self.coordinator.handle(BATCHES, "t", wanted, 0.0)
        while sent := list(self.coordinator.outgoing(0.0)):
            for outgoing in sent:
                match outgoing.message:
                    case Lease() as lease:
                        self.in_flight += [(lease, index) for index in lease.indices]
                    case ScoreRequest() as asked:
                        self.requests.append((self._leases[asked.text], asked))
                        done = ScoreDone(asked.request_id, score(asked, self.rules))
                        self.coordinator.handle(VERIFY, "v", done, 0.0)
                    case RankBatch() as batch:
                        self.batches.append(batch)
                    case QueueState() as state:
                        self.saved = state

    def _finish_some(self) -> None:
        self.chance.shuffle(self.in_flight)
        for _ in range(len(self.in_flight) // 2 + 1):
            if self.in_flight:
                lease, index = self.in_flight.pop()
                rollout = self._rollout(lease, index)
                self.coordinator.handle(PROMPTS, "g", RolloutDone(rollout), 0.0)

    def _rollout(self, lease: Lease, index: int) -> Rollout:
        limit = lease.sampling.max_new_tokens
        tokens = self.chance.randint(1, limit)
        answer = 1 if self.chance.random() < self.solves(lease.prompt) else 2
        text = f"<think>{lease.lease_id}/{index}</think>\\boxed{{{answer}}}"
        self._leases[text] = lease
        return Rollout(
            lease.lease_id,
            index,
            np.arange(2, dtype=np.int32),
            np.arange(tokens, dtype=np.int32),
            np.zeros(tokens, np.float32),
            [VersionSpan(self.step, 0, tokens)],
            "length" if tokens == limit else "stop",
            text,
        )


def staged_config(folder: Path, **sections: dict) -> Config:
    """Three stages: longer completions, smaller batches, other groups, less staleness."""
    return Config.model_validate({
        "run": {"dir": folder},
        "eval": {"prompts": 0},
        "train": {"steps": 12, "prompts_per_batch": 8, "group_size": 4, "minibatches": 2},
        "sampling": {"max_new_tokens": 20},
        "reward": {"length_margin_tokens": 10},
        "queue": {"max_staleness": 2, **sections.pop("queue", {})},
        "stages": [
            {
                "name": "second", "at_step": 4, "sampling": {"max_new_tokens": 40},
                "reward": {"length_margin_tokens": 20, "length": 0.2},
                "train": {"prompts_per_batch": 3, "group_size": 6, "minibatches": 1},
            },
            {
                "name": "third", "at_step": 7, "sampling": {"max_new_tokens": 60},
                "train": {"prompts_per_batch": 5, "group_size": 3},
                "queue": {"max_staleness": 1},
            },
        ],
        **sections,
    })  # fmt: skip
