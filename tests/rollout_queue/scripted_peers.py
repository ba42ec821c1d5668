"""A generator, a verifier and trainer leaders that follow a script, in one thread."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.types import (
    GeneratorReady,
    Lease,
    NextBatch,
    RankBatch,
    Rollout,
    RolloutDone,
    RolloutFailed,
    RolloutsTaken,
    Score,
    ScoreDone,
    ScoreRequest,
    Stop,
    VerifierReady,
    VersionSpan,
    WeightsSynced,
)  # fmt: skip
from megatron_rl.protocol.wire import Dealer

RUN_S = 200.0
"""Limit of a run."""


def write_config(folder: Path, train_prompts: int, held_out: int, **sections: dict) -> Config:
    """A run folder with prompts and config.toml."""
    lines = []
    for number in range(train_prompts + held_out):
        lines.append(json.dumps({
            "task": "math", "messages": [{"role": "user", "content": f"question {number}"}],
            "answer": str(number), "split": "train" if number < train_prompts else "held_out",
        }))  # fmt: skip
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    config = Config.model_validate({
        "run": {"dir": folder}, "prompts": [{"path": folder / "prompts.jsonl"}], **sections,
    })  # fmt: skip
    config = resolve_ports(config)
    (folder / "config.toml").write_text(dump_toml(config))
    return config


def await_sum(folder: Path, metric: str, wanted: int, timeout_s: float = 100.0) -> None:
    """Wait until a queue has counted so much: what others sent may reach it after its run."""
    deadline, found = time.monotonic() + timeout_s, 0
    while found < wanted:
        assert time.monotonic() < deadline, f"{metric} is {found}, and not {wanted}"
        time.sleep(0.05)
        path = folder / "metrics.jsonl"
        rows = read_jsonl(path) if path.exists() else []
        found = sum(row.get(metric, 0) for row in rows)


def start_queue(config: Config, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            sys.executable, "-m", "megatron_rl.rollout_queue.server", "--config",
            str(config.run.dir / "config.toml"), *arguments,
        ],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


class ScriptedPeers:
    """Answers leases at once, in random order; half of the training completions are right."""

    def __init__(
        self,
        config: Config,
        *,
        dp_size: int = 1,
        hold: int = 0,
        trains: bool = True,
        sync_s: float = 0.0,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """hold: completions kept back until others follow, so that they straddle a weight sync.

        sync_s: how long a weight sync takes. on_step is called after each batch.
        """
        self.sync_s = sync_s
        self.syncing: tuple[float, int] | None = None
        """(when it ends, version)"""
        self.early_steps: list[int] = []
        """Steps whose batch came during the weight sync before them."""
        self.on_step = on_step
        self.config, self.dp_size, self.trains = config, dp_size, trains
        host = config.ports.host
        self.generator: Dealer | None = Dealer(
            f"{host}:{config.ports.prompts}", "generator-0", label=config.ports.label
        )
        self.verifier = Dealer(
            f"{host}:{config.ports.verify}", "verifier-0", label=config.ports.label
        )
        self.trainers = [
            Dealer(f"{host}:{config.ports.batches}", f"trainer-{rank}", label=config.ports.label)
            for rank in range(dp_size)
        ]
        self.version = -1 if trains else 0
        self.step = 0
        self.hold = hold
        self.held: list[tuple[Lease, int, int]] = []
        self.chance = random.Random(0)
        self.batches: list[list[RankBatch]] = []
        self.shares: dict[int, RankBatch] = {}
        self.leases: list[tuple[int, Lease]] = []
        """(version at the lease, lease)"""
        self.stopped: set[str] = set()
        self.ready_at = 0.0
        self.session = 1
        self.alive_at = self.joined_at = 0.0
        """A dead generator starts at alive_at, and holds the synced weights from joined_at."""
        self.lost: list[tuple[int, int]] = []
        """(lease id, index) of the completions that dead generators held."""
        self.confirmed: list[tuple[int, int]] = []
        """(lease id, index) of the completions that the queue confirmed."""
        self.death: tuple[float, float] | None = None
        self.poller = zmq.Poller()

    def play(self, queue: subprocess.Popen, *, exit_code: int = 0) -> str:
        """Serve until the queue exits with this code; what it wrote to stderr."""
        try:
            found = self.run(queue)
        finally:
            queue.kill()
            self.close()
        errors = queue.stderr.read()
        assert found == exit_code, errors
        return errors

    def run(self, queue: subprocess.Popen) -> int:
        """Serve until the queue exits; its exit code."""
        for dealer in (self.generator, self.verifier, *self.trainers):
            self.poller.register(dealer.socket, zmq.POLLIN)
        deadline = time.monotonic() + RUN_S
        if self.trains:
            self._sync(self.step)
        while queue.poll() is None and time.monotonic() < deadline:
            if self.generator is None and time.monotonic() > self.alive_at:
                self._revive_generator()
            if time.monotonic() > self.ready_at:
                self._announce()
            if not self.poller.poll(50):
                self._release(0)
            while self.generator and (message := self.generator.receive(0)) is not None:
                self._on_generator(message)
            while (message := self.verifier.receive(0)) is not None:
                self._on_verifier(message)
            for rank, trainer in enumerate(self.trainers):
                while (message := trainer.receive(0)) is not None:
                    self._on_trainer(rank, message)
            self._advance()
        return queue.wait(timeout=60)

    def close(self) -> None:
        for dealer in filter(None, (self.generator, self.verifier, *self.trainers)):
            dealer.close()

    def kill_generator(self, *, dead_s: float, joins_s: float) -> None:
        """Let the generator die with its next lease in hand.

        Another starts after dead_s, and holds the synced weights joins_s later.
        """
        self.death = (dead_s, joins_s)

    def _die(self, dead_s: float, joins_s: float) -> None:
        self.death = None
        self.lost += [(lease.lease_id, index) for lease, index, _ in self.held]
        self.held.clear()
        self.poller.unregister(self.generator.socket)
        self.generator.socket.close(linger=0)
        self.generator.close()
        self.alive_at = time.monotonic() + dead_s
        self.joined_at = self.alive_at + joins_s
        self.session += 1
        self.generator = None

    def _revive_generator(self) -> None:
        address = f"{self.config.ports.host}:{self.config.ports.prompts}"
        self.generator = Dealer(address, "generator-0", label=self.config.ports.label)
        self.poller.register(self.generator.socket, zmq.POLLIN)
        self._announce()

    def _announce(self) -> None:
        if self.generator is not None:
            version = self.version if time.monotonic() >= self.joined_at else -1
            capacity = self.config.generator.max_running
            self.generator.send(GeneratorReady(capacity, version, self.session))
        self.verifier.send(VerifierReady({"answers": 1024, "code": 256, "custom": 256}, 1))
        self.ready_at = time.monotonic() + 0.5

    def _sync(self, version: int) -> None:
        self.syncing = (time.monotonic() + self.sync_s, version)
        if version < self.config.train.steps:
            self._ask(version)

    def _ask(self, version: int) -> None:
        for rank in reversed(range(self.dp_size)):
            self.trainers[rank].send(NextBatch(version, rank, self.dp_size))

    def _advance(self) -> None:
        """End a weight sync when it is time, and train on a batch that is complete."""
        if self.syncing is not None and time.monotonic() >= self.syncing[0]:
            (_, self.version), self.syncing = self.syncing, None
            self._announce()
            is_final = self.version == self.config.train.steps
            self.trainers[0].send(WeightsSynced(self.version, is_final))
            if is_final:
                self._ask(self.version)
        if len(self.shares) < self.dp_size:
            return
        if self.syncing is not None:
            if self.step not in self.early_steps:
                self.early_steps.append(self.step)
            return
        self.batches.append([self.shares[rank] for rank in range(self.dp_size)])
        self.shares = {}
        self.step += 1
        self.on_step(self.step)
        self._sync(self.step)

    def _on_generator(self, message: Lease | RolloutsTaken | Stop) -> None:
        if isinstance(message, RolloutsTaken):
            self.confirmed += message.completions
            return
        if isinstance(message, Stop):
            self.stopped.add("generator")
            return
        if time.monotonic() < self.joined_at:
            # Sent to the one that died; the queue that went on so would run out of attempts.
            for index in message.indices:
                reason = "it has no weights of the trainer yet"
                self.generator.send(RolloutFailed(message.lease_id, index, reason))
            return
        self.leases.append((self.version, message))
        self.held += [(message, index, self.version) for index in message.indices]
        self.chance.shuffle(self.held)
        if self.death is not None:
            self._die(*self.death)
        else:
            self._release(self.hold)

    def _release(self, keep: int) -> None:
        while len(self.held) > keep:
            lease, index, began_at = self.held.pop()
            self.generator.send(RolloutDone(self._rollout(lease, index, began_at)))

    def _rollout(self, lease: Lease, index: int, began_at: int) -> Rollout:
        tokens = self.chance.randint(2, 12)
        spans = [VersionSpan(began_at, 0, tokens)]
        if began_at != self.version:
            spans = [VersionSpan(began_at, 0, 1), VersionSpan(self.version, 1, tokens)]
        is_right = lease.sampling.temperature == 0 or self.chance.random() < 0.5
        return Rollout(
            lease.lease_id,
            index,
            np.arange(5, dtype=np.int32),
            np.arange(tokens, dtype=np.int32),
            np.zeros(tokens, np.float32),
            spans,
            "stop",
            lease.prompt.answer if is_right else "no",
        )

    def _on_verifier(self, message: ScoreRequest | Stop) -> None:
        if isinstance(message, Stop):
            self.stopped.add("verifier")
            return
        is_right = message.text == message.answer
        score = (
            Score(1.0, {"format": 0.1, "correct": 0.9}, "correct")
            if is_right
            else Score(0.1, {"format": 0.1}, "wrong_answer")
        )
        self.verifier.send(ScoreDone(message.request_id, score))

    def _on_trainer(self, rank: int, message: RankBatch | Stop) -> None:
        if isinstance(message, Stop):
            self.stopped.add(f"trainer-{rank}")
            return
        assert (message.step, message.dp_rank) == (self.step, rank)
        self.shares[rank] = message
