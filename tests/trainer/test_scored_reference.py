"""A reference in an engine: its logprobs are those of transformers, its gradients those of a swap.

One scorer process with a real SGLang holds a teacher of another size, and with more token ids.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.ports import find_free
from megatron_rl.protocol.process import TrainingStopped
from megatron_rl.protocol.types import MinibatchShare, TrainSequence
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.trainer import scoring_client
from megatron_rl.trainer.leader import Leader
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.reference import ScoredReference, Teacher
from megatron_rl.trainer.scoring_client import ScoringClient, open_scorer
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.export import export_tensors
from megatron_rl.weights.sync.control import Control
from tests.distributed import run_ranks
from tests.tiny_batches import VOCAB, make_sequences, my_share
from tests.tiny_models import PLAIN, write_model

pytestmark = [pytest.mark.slow(40), pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parent.parent.parent
CONTEXT = 64
ROUNDING = 2e-5
"""Nats, of a logprob in float32; seen: 2e-6."""
START_S = 150.0
OTHER_SIZES = {
    "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 6,
}  # fmt: skip


@dataclass(frozen=True)
class Running:
    """A scorer process, and what its configuration and that of trainer ranks is made of."""

    process: subprocess.Popen[bytes]
    given: list[str]
    teacher: Path

    @property
    def config(self) -> Config:
        """Of the scorer."""
        return load_config(None, self.given)


def start(config: Config) -> subprocess.Popen[bytes]:
    """A scorer process that is ready."""
    ready = config.run.dir / "ready"
    ready.unlink(missing_ok=True)
    with (config.run.dir / "scorer.out").open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "generation.scorer", "--config", config.run.dir / "config.toml"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_RL_READY_FILE": str(ready)},
            stdout=out,
            stderr=out,
        )
    deadline = time.monotonic() + START_S
    while not ready.exists():
        said = (config.run.dir / "scorer.out").read_text()[-2000:]
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return process


def written(folder: Path) -> tuple[list[str], Path]:
    """Overrides of a run with a policy and a scorer, not started, and the teacher's folder."""
    policy, teacher, run_dir = (folder / name for name in ("policy", "teacher", "run"))
    for path in (policy, teacher, run_dir):
        path.mkdir()
    write_model(policy, vocab_size=VOCAB)
    # Ids beyond the policy's do not count; these are likely ones.
    write_model(teacher, vocab_size=VOCAB + 3, is_tied=True, **OTHER_SIZES)
    given = [
        f"model.path={policy}", f"run.dir={run_dir}", "model.dtype=float32",
        f"algorithm.reference.policy={teacher}", "algorithm.reference.source=engine",
        f"generator.context_tokens={CONTEXT}", "sampling.max_new_tokens=32",
        "reward.length_margin_tokens=0", "scorer.kv_tokens=2048", "expert.scorer.max_running=4",
        f"expert.ports.scorer={find_free('127.0.0.1', 3)}", "expert.ports.label=test",
        "optimizer.warmup_steps=0",
    ]  # fmt: skip
    (run_dir / "config.toml").write_text(dump_toml(load_config(None, given)))
    return given, teacher


@contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process does not outlive the block."""
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    given, teacher = written(tmp_path_factory.mktemp("scored"))
    process = start(config := load_config(None, given))
    with ending(process):
        yield Running(process, given, teacher)
        with client_of(config, "last") as client:
            client.stop()
            assert process.wait(60) == 0


def client_of(config: Config, name: str, answer_within_s: float = 60.0) -> ScoringClient:
    return ScoringClient(
        f"127.0.0.1:{config.ports.scorer}", name, keys=None, label=config.ports.label,
        max_open=config.scorer.max_running, answer_within_s=answer_within_s,
    )  # fmt: skip


def sequence(token_ids: np.ndarray, prompt_length: int) -> TrainSequence:
    count = len(token_ids) - prompt_length
    return TrainSequence(
        token_ids=token_ids.astype(np.int32),
        prompt_length=prompt_length,
        generator_logprobs=np.zeros(count, np.float32),
        version_runs=[(0, count)],
        advantage=0.0,
        weight=1.0,
    )


def of_transformers(folder: Path, sequences: list[TrainSequence]) -> np.ndarray:
    """Logprobs of their completion tokens end to end, over the policy's ids, in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    for one in sequences:
        ids = torch.tensor(one.token_ids, dtype=torch.int64)
        logits = model(ids[None]).logits[0, :-1].detach()
        rows = logits - logits[:, :VOCAB].logsumexp(-1, keepdim=True)
        found.append(rows.gather(1, ids[1:, None])[one.targets - 1, 0])
    return torch.cat(found).numpy()


def many_sequences() -> list[TrainSequence]:
    """Of all lengths up to the context, some with the same prompt, more than are open at once."""
    rng = np.random.default_rng(3)
    lengths = [2, 3, 7, 7, 20, 33, 50, CONTEXT, CONTEXT]
    found = [sequence(rng.integers(0, VOCAB, n), int(rng.integers(1, n))) for n in lengths]
    prompt = rng.integers(0, VOCAB, 9)
    # The engine's last id, which SGLang names 0 in its answers.
    found.append(sequence(np.array([5, 6, VOCAB + 2, 0, 8, VOCAB + 2]), 2))
    found += [sequence(np.r_[prompt, rng.integers(0, VOCAB, n)], 9) for n in (1, 5, 20)]
    return found


def test_logprobs_of_given_tokens_are_those_of_transformers(scorer: Running) -> None:
    sequences = many_sequences()
    with client_of(scorer.config, "one") as client:
        client.begin(sequences)
        found = client.take(60.0)
    expected = of_transformers(scorer.teacher, sequences)
    assert found is not None and len(found) == len(expected)
    assert np.abs(found - expected).max() < ROUNDING


def test_a_sequence_that_cannot_be_scored_ends_the_run_and_not_the_scorer(scorer: Running) -> None:
    for number, (token_ids, words) in enumerate(
        [
            (np.zeros(CONTEXT + 20, np.int64), "tokens"),
            (np.array([1, VOCAB + 3, 2, 3, 4, 5]), "token id 203, and the reference has 203 ids"),
        ]
    ):
        with client_of(scorer.config, f"two-{number}") as client:
            client.begin([sequence(token_ids, 4)])
            with pytest.raises(TrainingStopped, match=f"refuses a sequence .* {words}"):
                client.take(60.0)
    assert scorer.process.poll() is None


def test_a_scorer_that_is_not_there_is_given_up_in_time(scorer: Running) -> None:
    ports = scorer.config.ports.model_copy(update={"scorer": find_free("127.0.0.1")})
    nowhere = scorer.config.model_copy(update={"ports": ports})
    with client_of(nowhere, "three", answer_within_s=1.0) as client:
        client.begin(many_sequences())
        started = time.monotonic()
        with pytest.raises(DeadlineExceeded, match="13 of 13 sequences have no logprobs.*scorer-0"):
            client.take(600.0)
        assert 1.0 <= time.monotonic() - started < 60.0


def gradients(cfg: Config, budget_tokens: int) -> dict[str, torch.Tensor]:
    """Of the second of two minibatches, in Hugging Face layout (rank 0)."""
    with ExitStack() as stack:
        policy = stack.enter_context(open_policy(cfg))
        baseline = Control(policy.backend.host_group(60))
        leader = Leader(policy.backend.replica_group(cfg.parallel, 60), baseline)
        opened = stack.enter_context(open_scorer(cfg, leader, cfg.ports.host))
        objective = find_objective(cfg.algorithm)
        trainer = Trainer(policy, objective, cfg.optimizer, 1, scorer=opened)
        wanted = ScoredReference if cfg.algorithm.needs_scorer else Teacher
        assert isinstance(trainer.reference, wanted)
        if opened is not None and opened.client is not None:
            # The scorer serves the next test, too.
            opened.client.stop = lambda: None
        share = my_share(budget_tokens)
        minibatches = [share, MinibatchShare([*share.microbatches, []], groups=3, members=3)]
        prepared = trainer.prepare(minibatches)
        for minibatch, each in zip(minibatches, prepared, strict=True):
            trainer.accumulate(minibatch, version=0, prepared=each)
        with torch.no_grad():
            for chunk in policy.chunks:
                for parameter in chunk.parameters():
                    parameter.copy_(parameter.main_grad)
        tensors = export_tensors(policy.chunks, policy.shape)
        return {name: tensor.clone() for name, tensor in tensors}


DISTILL = [
    "algorithm.preset=distill", "algorithm.kl.placement=reward", "algorithm.kl.estimator=k1",
]  # fmt: skip
PENALTY = ["algorithm.preset=grpo", "algorithm.kl.coefficient=0.5"]
REGRESSION = ["algorithm.preset=agro", "expert.algorithm.shaping.temperature=0.5"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("given", "split"),
    [
        (DISTILL, "data=1"),
        (DISTILL, "data=2"),
        (DISTILL, "tensor=2"),
        (PENALTY, "pipeline=2"),
        (PENALTY, "context=2"),
        (REGRESSION, "data=2"),
        (REGRESSION, "tensor=2 sequence=true"),
    ],
)
def test_gradients_are_those_of_a_teacher_in_the_trainers_place(
    scorer: Running, given: list[str], split: str
) -> None:
    base = [*scorer.given, *given]
    base += [f"parallel.{part}" for part in split.split()]
    found = []
    for source in ("engine", "trainer"):
        cfg = load_config(None, [*PLAIN, *base, f"algorithm.reference.source={source}"])
        found.append(run_ranks(gradients, cfg.parallel.world_size, cfg, 25)[0])
    by_engine, by_swap = found
    whole = torch.cat([gradient.flatten() for gradient in by_swap.values()])
    assert whole.norm() > 1e-3
    for name, gradient in by_swap.items():
        assert (by_engine[name] - gradient).norm() < ROUNDING * whole.norm(), name


@pytest.mark.exhaustive
def test_what_a_dead_scorer_was_asked_is_asked_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_client, "ASK_AGAIN_S", 0.5)
    given, teacher = written(tmp_path)
    config, sequences = load_config(None, given), make_sequences()
    with client_of(config, "four", answer_within_s=START_S) as client:
        with ending(start(config)) as first:
            client.begin(sequences[:1])
            assert client.take(60.0) is not None
            # Its engine goes with it.
            first.kill()
            first.wait(60)
        client.begin(sequences)
        assert client.take(1.0) is None
        with ending(start(config)):
            found = client.take(60.0)
        assert client.asked_again >= 1
    expected = of_transformers(teacher, sequences)
    assert found is not None and np.abs(found - expected).max() < ROUNDING
