"""Updates that are skipped: what they leave alone, and when and how the run ends."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import Metric, read_jsonl
from megatron_rl.protocol.process import TrainingStopped
from megatron_rl.protocol.types import (
    MinibatchShare,
    NextBatch,
    RankBatch,
    TrainSequence,
    WeightsSynced,
)
from megatron_rl.protocol.wire import Router, WireError
from megatron_rl.rollout_queue.trainer_requests import BatchRequests
from megatron_rl.trainer.batch_client import BatchClient
from megatron_rl.trainer.checkpoint.checkpoints import Checkpoints
from megatron_rl.trainer.guard import read_skipped
from megatron_rl.trainer.leader import Leader
from megatron_rl.trainer.metrics import StepMetrics
from megatron_rl.trainer.model.policy import Policy, open_policy
from megatron_rl.trainer.reference import EmaReference
from megatron_rl.trainer.step import Trainer
from megatron_rl.trainer.train import train
from megatron_rl.weights.sync.control import Control
from tests.distributed import run_ranks
from tests.ports import free_port
from tests.tiny_models import PLAIN, write_model

VOCAB = 200


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, is_tied=True, vocab_size=VOCAB, num_hidden_layers=2)
    return folder


def make_share(seed: int, advantage: float = 1.0) -> MinibatchShare:
    """Two microbatches of a sequence each; an advantage that is nan poisons the gradient."""
    rng = np.random.default_rng(seed)
    sequences = [
        TrainSequence(
            token_ids=rng.integers(0, VOCAB, 12).astype(np.int32),
            prompt_length=4,
            generator_logprobs=np.full(8, -5, np.float32),
            version_runs=[(0, 8)],
            advantage=advantage,
            weight=1 / 16,
        )
        for _ in range(2)
    ]
    return MinibatchShare([[sequence] for sequence in sequences])


def make_trainer(policy: Policy, cfg: Config) -> Trainer:
    objective = find_objective(cfg.algorithm)
    return Trainer(policy, objective, cfg.optimizer, 10, train=cfg.train, run_dir=cfg.run.dir)


def load(folder: Path, run_dir: Path, *overrides: str) -> Config:
    common = [*PLAIN, f"model.path={folder}", f"run.dir={run_dir}", "model.dtype=float32"]
    return load_config(None, [*common, "optimizer.warmup_steps=0", "optimizer.lr=0.01", *overrides])


def values(metrics: list[Metric]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics}


def updates(cfg: Config, advantages: list[float]) -> tuple[list[dict], list[bool], str]:
    """Metrics of the updates, whether each changed weights, and the error that ended them."""
    with open_policy(cfg) as policy:
        trainer = make_trainer(policy, cfg)
        found, changes = [], []
        for version, advantage in enumerate(advantages):
            before = [p.clone() for p in policy.chunks[0].parameters()]
            share = make_share(10 * version + dist.get_rank(), advantage)
            try:
                found.append(values(trainer.update(share, version=version)))
            except TrainingStopped as error:
                return found, changes, str(error)
            after = policy.chunks[0].parameters()
            changes.append(not all(map(torch.equal, before, after)))
        return found, changes, ""


def test_an_exploding_gradient_skips_the_step_and_is_counted(
    model_folder: Path, tmp_path: Path
) -> None:
    measured, changes, error = run_ranks(updates, 1, load(model_folder, tmp_path), [1.0])[0]
    assert not error and changes == [True]
    norm = measured[0]["train/grad_norm"]
    for limit, is_skipped in ((norm * 0.99, True), (norm * 1.01, False)):
        cfg = load(model_folder, tmp_path, f"expert.optimizer.skip_grad_norm={limit}")
        found, changes, error = run_ranks(updates, 1, cfg, [1.0])[0]
        assert not error and changes == [not is_skipped]
        assert found[0]["train/skipped_steps"] == found[0]["train/exploded_steps"] == is_skipped


def moves_of_average(cfg: Config, advantages: list[float]) -> list[bool]:
    """Whether each update moved the average that the reference is."""
    found = []
    with open_policy(cfg) as policy:
        trainer = make_trainer(policy, cfg)
        assert isinstance(trainer.reference, EmaReference)
        for version, advantage in enumerate(advantages):
            before = [weight.clone() for weight in trainer.reference._weights]
            share = make_share(10 * version, advantage)
            trainer.update(share, version=version, prepared=trainer.prepare([share])[0])
            trainer.gather()
            found.append(not all(map(torch.equal, before, trainer.reference._weights)))
    return found


def test_a_skipped_step_does_not_move_the_average_of_the_reference(
    model_folder: Path, tmp_path: Path
) -> None:
    given = ["algorithm.reference.policy=ema", "algorithm.reference.decay=0.5"]
    cfg = load(model_folder, tmp_path, *given)
    assert run_ranks(moves_of_average, 1, cfg, [1.0, float("nan"), 1.0])[0] == [True, False, True]


@pytest.mark.parametrize("parallel", ["data", "pipeline"])
def test_skips_in_a_row_end_the_run_and_leave_the_minibatch(
    model_folder: Path, tmp_path: Path, parallel: str
) -> None:
    cfg = load(
        model_folder, tmp_path, f"parallel.{parallel}=2", "expert.train.max_skipped_updates=2"
    )
    # One good update in between: the count starts anew.
    advantages = [np.nan, 1.0, np.nan, np.nan, 1.0]
    results = run_ranks(updates, 2, cfg, advantages)
    for found, changes, error in results:
        assert [row["train/skipped_steps"] for row in found] == [1, 0, 1]
        assert [row["train/exploded_steps"] for row in found] == [0, 0, 0]
        assert changes == [False, True, False]
        assert "2 updates in a row were skipped" in error and "not finite" in error
    dp_ranks = [0, 1] if parallel == "data" else [0]
    files = sorted((tmp_path / "skipped").iterdir())
    assert [file.name for file in files] == [f"version-000003.dp-{r}.msgpack" for r in dp_ranks]
    for dp_rank, file in zip(dp_ranks, files, strict=True):
        skipped = read_skipped(file)
        assert (skipped.version, skipped.dp_rank) == (3, dp_rank)
        assert np.isnan(skipped.grad_norm) and "not finite" in skipped.reason
        expected = make_share(30 + dp_rank, np.nan)
        for read, written in zip(
            skipped.minibatch.microbatches, expected.microbatches, strict=True
        ):
            for name, value in msgspec.structs.asdict(written[0]).items():
                np.testing.assert_array_equal(getattr(read[0], name), value, err_msg=name)


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "skipped.msgpack"
    path.write_bytes(b"\x81\xa1a\x01")
    with pytest.raises(WireError):
        read_skipped(path)


def test_a_mismatch_above_the_limit_ends_the_run_before_the_update(
    model_folder: Path, tmp_path: Path
) -> None:
    measured, _, _ = run_ranks(updates, 1, load(model_folder, tmp_path), [1.0])[0]
    mean = measured[0]["train/logprob_gap"] / measured[0]["train/logprob_gap_tokens"]
    for limit, is_stopped in ((mean * 0.99, True), (mean * 1.01, False)):
        cfg = load(model_folder, tmp_path, f"expert.train.max_mismatch={limit}")
        # The tokens are of version 0: at version 1 there is nothing to measure.
        found, changes, error = run_ranks(updates, 1, cfg, [1.0, 1.0])[0]
        assert ("expert.train.max_mismatch" in error) == is_stopped
        assert len(found) == len(changes) == (0 if is_stopped else 2)


class WeightSyncLog:
    """Stands for the generators: notes which versions they would have got."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.metrics: list[Metric] = []

    def sync(self, version: int) -> None:
        self.versions.append(version)

    overlaps = False

    def admit(self) -> None:
        """No generator comes."""

    def join(self) -> None:
        """Nothing is under way."""

    def release(self) -> None:
        """Engines keep their memory."""


def serve_batches(router: Router, advantages: list[float], heard: list) -> None:
    """The queue on the trainer's socket: one batch of one minibatch a step."""
    requests, batch = BatchRequests(len(advantages)), list[RankBatch]()
    while not requests.is_dismissed:
        received = router.receive(60)
        assert received is not None
        peer, message = received
        heard.append(message)
        if isinstance(message, NextBatch):
            requests.ask(peer, message)
            if (due := requests.next_to_build()) is not None:
                share = make_share(due[0], advantages[due[0]])
                requests.begin(due[0])
                batch = [RankBatch(due[0], 0, [share], {})]
            for to, answer in requests.answers(batch):
                router.send(to, answer)


class TurnsLog(WeightSyncLog):
    """Engines that give their memory back: notes whose turn it is."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.parameters: Callable[[], list[Tensor]] = list
        self._before: list[Tensor] = []

    def sync(self, version: int) -> None:
        super().sync(version)
        pairs = zip(self._before, self.parameters(), strict=bool(self._before))
        changed = self._before and not all(torch.equal(old, new) for old, new in pairs)
        self.events += ["trained"] if changed else []
        self.events.append("sync")

    def admit(self) -> None:
        self.events += ["admit"] if self.events[-1] != "admit" else []

    def release(self) -> None:
        self._before = [each.clone() for each in self.parameters()]
        self.events.append("release")


class OverlapLog(WeightSyncLog):
    """Weight syncs that are started: notes whether the parameters are the same at the join."""

    overlaps = True

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []
        self.parameters: Callable[[], list[Tensor]] = list
        self._at_start: list[Tensor] | None = None
        self._aside: threading.Thread | None = None

    def sync(self, version: int) -> None:
        self.join()
        self.events.append(("sync", version))
        super().sync(version)

    def start(self, version: int, then: Callable[[], None]) -> None:
        assert self._at_start is None
        self.events.append(("start", version))
        self.versions.append(version)
        self._at_start = [each.clone() for each in self.parameters()]
        self._aside = threading.Thread(target=then)
        self._aside.start()

    def join(self) -> None:
        if self._at_start is None or self._aside is None:
            return
        pairs = zip(self._at_start, self.parameters(), strict=True)
        same = all(torch.equal(before, now) for before, now in pairs)
        self.events.append(("same" if same else "changed", self.versions[-1]))
        self._aside.join(20)
        self._at_start = None


def run_loop(
    cfg: Config, advantages: list[float], log: WeightSyncLog | None = None
) -> tuple[list, list[int]]:
    """The trainer's loop against the queue; what that heard, and what was synced."""
    heard: list = []
    log = log or WeightSyncLog()
    port = free_port()
    with Router("127.0.0.1", port) as router, open_policy(cfg) as policy:
        if isinstance(log, OverlapLog | TurnsLog):
            log.parameters = lambda: [p for chunk in policy.chunks for p in chunk.parameters()]
        queue = threading.Thread(target=serve_batches, args=(router, advantages, heard))
        queue.start()
        baseline = Control(policy.backend.host_group(20))
        with BatchClient(
            f"127.0.0.1:{port}",
            dp_rank=0,
            dp_size=1,
            leader=Leader(parallel_state.get_model_parallel_group(), baseline),
            timeout_s=20,
        ) as batches:
            metrics = StepMetrics(cfg.run.dir / "metrics.jsonl", "trainer")
            checkpoints = Checkpoints(
                cfg.checkpoint,
                cfg.run.dir,
                baseline,
                companion=lambda step: None,
                last_step=len(advantages),
            )
            steps = range(len(advantages))
            train(make_trainer(policy, cfg), batches, log, checkpoints, metrics, steps)
        queue.join(60)
    return heard, log.versions


def test_a_skipped_update_keeps_its_place_among_the_versions(
    model_folder: Path, tmp_path: Path
) -> None:
    advantages = [1.0, np.nan, 1.0]
    heard, synced = run_ranks(run_loop, 1, load(model_folder, tmp_path), advantages)[0]
    assert synced == [0, 1, 2, 3]
    asked = [message.step for message in heard if isinstance(message, NextBatch)]
    assert asked == [0, 1, 2, 3]
    announced = [message for message in heard if isinstance(message, WeightsSynced)]
    assert announced == [WeightsSynced(v, is_final=v == 3) for v in range(4)]
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in row]
    assert [(row["step"], row["train/skipped_steps"]) for row in rows] == [(1, 0), (2, 1), (3, 0)]


def test_a_profile_holds_the_chosen_steps(model_folder: Path, tmp_path: Path) -> None:
    cfg = load(model_folder, tmp_path, "train.profile_steps=[2, 3]")
    run_ranks(run_loop, 1, cfg, [1.0, 1.0, -1.0, 1.0])
    [example] = (tmp_path / "profile").iterdir()
    assert example.name == "stage_0.json"
    events = json.loads(example.read_text())["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert [spans.count(name) for name in ("prepare", "update", "optimizer")] == [2, 2, 2]
    # In the middle of the window, and after the last step of it.
    assert spans.count("wait for batch") == 1 + 1
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "train/loss" in row]
    for row in rows:
        assert row["train/tokens_per_s_per_gpu"] == row["train/tokens_per_s"] > 0
        # Nobody knows the peak of a CPU.
        assert "train/mfu" not in row


def run_overlapped(cfg: Config, advantages: list[float]) -> tuple[list, list[tuple[str, int]]]:
    log = OverlapLog()
    heard, _ = run_loop(cfg, advantages, log)
    return heard, log.events


def test_parameters_stay_those_of_the_version_until_its_weight_sync_is_joined(
    model_folder: Path, tmp_path: Path
) -> None:
    cfg = load(model_folder, tmp_path)
    heard, events = run_ranks(run_overlapped, 1, cfg, [1.0, 1.0, -1.0, 1.0])[0]
    # Forward and backward passes lie between; the last version is waited for.
    assert events == [
        ("sync", 0), ("start", 1), ("same", 1), ("start", 2), ("same", 2), ("start", 3),
        ("same", 3), ("sync", 4),
    ]  # fmt: skip
    announced = [message for message in heard if isinstance(message, WeightsSynced)]
    assert announced == [WeightsSynced(v, is_final=v == 4) for v in range(5)]


def run_in_turns(cfg: Config, advantages: list[float]) -> list[str]:
    log = TurnsLog()
    run_loop(cfg, advantages, log)
    return log.events


def test_engines_are_without_memory_from_the_batch_to_the_weight_sync_and_nobody_is_admitted(
    model_folder: Path, tmp_path: Path
) -> None:
    cfg = load(model_folder, tmp_path)
    events = run_ranks(run_in_turns, 1, cfg, [1.0, 1.0, -1.0])[0]
    turns = " ".join(event for event in events if event != "admit")
    assert turns == "sync" + 3 * " release trained sync"
    # Also where the trainer looked for late generators as it waited for a batch.
    assert all(
        before == "sync" for before, now in zip(events, events[1:], strict=False) if now == "admit"
    )
