"""A coordinator among peers that a seed of chance delays, kills and starts again; no sockets."""

import hashlib
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.types import (
    Cancel,
    GeneratorReady,
    Lease,
    NextBatch,
    RankBatch,
    RolloutDone,
    SaveState,
    Score,
    ScoreDone,
    ScoreRequest,
    VerifierReady,
    WeightsSynced,
)
from megatron_rl.rollout_queue.coordinator import BATCHES, PROMPTS, VERIFY, Coordinator
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.makers import make_prompt, make_rollout

SLOTS, ROOM = 6, {"answers": 40}


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    train = {"steps": 12, "prompts_per_batch": 3, "group_size": 3} | sections.pop("train", {})
    values = {"run": {"dir": folder}, "train": train, "eval": {"prompts": 0}} | sections
    return Config.model_validate(values)


class PlayedFleet:
    """Generators, a verifier and a trainer of one queue, until the trainer is done or killed."""

    def __init__(
        self,
        config: Config,
        chance: random.Random,
        *,
        state: QueueState | None = None,
        generators: int = 2,
        train: int = 20,
        held_out: int = 0,
    ) -> None:
        self.config, self.chance = config, chance
        self.now = 1000.0
        self.sessions = {f"g{n}": n for n in range(generators)}
        self.verifier_session = 0
        self.version = state.step if state else 0
        self.open: dict[str, dict[tuple[int, int], Lease]] = {name: {} for name in self.sessions}
        """(lease, index) of the completions of each generator."""
        self.requests: list[ScoreRequest] = []
        self.batches: dict[int, RankBatch] = {}
        self.saved: QueueState | None = None
        self.deaths = 0
        prompts = [make_prompt(f"p{n}") for n in range(train)]
        held = [make_prompt(f"h{n}", split="held_out") for n in range(held_out)]
        folder = config.run.dir
        self.coordinator = Coordinator(
            config,
            PromptSets([prompts], [1.0], held, 0),
            recorder=Recorder(folder),
            metrics=JsonlWriter(folder / "metrics.jsonl", "queue"),
            now=self.now,
        )
        if state is not None:
            self.coordinator.resume(state)

    def play(self, until_step: int, *, saves: float = 0.4, kills: float = 0.03) -> None:
        """Train up to a step. saves, kills: chances, at each step and at each second."""
        self._beat()
        self._tell(BATCHES, "t0", WeightsSynced(self.version))
        self._tell(BATCHES, "t0", NextBatch(self.version, 0, 1))
        while self.version < until_step:
            self._play_second(kills)
            if self.version in self.batches:
                self._end_step(saves, kills)

    def _play_second(self, kills: float) -> None:
        self.now += 1.0
        assert self.now < 4000.0, self.coordinator.describe(self.now)
        self._receive()
        self._sample()
        self._grade()
        if self.chance.random() < kills:
            self._kill()
        self._beat()
        self.coordinator.tick(self.now)

    def _tell(self, endpoint: str, peer: str, message: Any) -> None:
        self.coordinator.handle(endpoint, peer, message, self.now)

    def _beat(self) -> None:
        for name, session in self.sessions.items():
            self._tell(PROMPTS, name, GeneratorReady(SLOTS, self.version, session))
        self._tell(VERIFY, "v", VerifierReady(ROOM, self.verifier_session))

    def _receive(self) -> None:
        for _, peer, message in list(self.coordinator.outgoing(self.now)):
            match message:
                case Lease():
                    added = {(message.lease_id, index): message for index in message.indices}
                    self.open[peer] |= added
                case Cancel(lease_id):
                    for key in [key for key in self.open[peer] if key[0] == lease_id]:
                        del self.open[peer][key]
                case ScoreRequest():
                    self.requests.append(message)
                case RankBatch():
                    self.batches[message.step] = message
                case QueueState():
                    self.saved = message

    def _end_step(self, saves: float, kills: float) -> None:
        """The trainer has trained on its batch, syncs the next version, and may save its state."""
        self.version += 1
        is_final = self.version == self.config.train.steps
        self._beat()
        self._tell(BATCHES, "t0", WeightsSynced(self.version, is_final))
        if self.chance.random() < saves and not is_final:
            # Meanwhile groups of the new version are opened, and some of them dropped.
            for _ in range(self.chance.randrange(8)):
                self._play_second(kills)
            self._tell(BATCHES, "t0", SaveState(self.version))
        self._tell(BATCHES, "t0", NextBatch(self.version, 0, 1, self.version, is_final))

    def _sample(self) -> None:
        for name, waiting in self.open.items():
            ended = [key for key in waiting if self.chance.random() < 0.3]
            self.chance.shuffle(ended)
            for key in ended:
                lease = waiting.pop(key)
                self._tell(PROMPTS, name, RolloutDone(self._rollout(lease, key[1])))

    def _rollout(self, lease: Lease, index: int) -> Any:
        """Its tokens depend on the seed, if it has one, the prompt and the version alone."""
        seeds = dict(zip(lease.indices, lease.sampling.draw_seeds, strict=False))
        drawn = seeds[index] if seeds else self.chance.random()
        text = f"{lease.prompt.id}/{drawn}/{self.version}"
        token_ids = np.frombuffer(hashlib.sha256(text.encode()).digest()[:6], np.uint8)
        rollout = make_rollout(
            index, lease_id=lease.lease_id, tokens=6, text=text, versions=(self.version,)
        )
        return msgspec.structs.replace(rollout, token_ids=token_ids.astype(np.int32))

    def _grade(self) -> None:
        """Some requests are answered, in any order."""
        self.chance.shuffle(self.requests)
        count = self.chance.randrange(len(self.requests) + 1)
        asked, self.requests = self.requests[:count], self.requests[count:]
        for request in asked:
            digest = hashlib.sha256(request.text.encode()).digest()
            # Sums over groups depend on their order: each prompt has its own lowest reward.
            lowest = int(request.text[1:].partition("/")[0]) / 97
            # So a third of the groups of three are zero-variance groups.
            is_correct = digest[0] % 3 > 0
            reward = lowest + 0.1 * is_correct
            score = Score(reward, {"correct": reward}, "correct" if is_correct else "wrong")
            self._tell(VERIFY, "v", ScoreDone(request.request_id, score))

    def _kill(self) -> None:
        """A process dies and comes back at once, without what it had."""
        self.deaths += 1
        if self.chance.random() < 0.3:
            self.verifier_session += 1
            self.requests.clear()
            return
        name = self.chance.choice(sorted(self.sessions))
        self.sessions[name] += 100
        self.open[name].clear()
