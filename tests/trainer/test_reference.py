"""The reference policy's logprobs are those of its weights, and the policy keeps its own."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import MinibatchShare
from megatron_rl.trainer.checkpoint.background_save import BackgroundSave, SavePlans
from megatron_rl.trainer.checkpoint.trainer_state import restore, sharded_state
from megatron_rl.trainer.loss_inputs import Prepared
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.reference import SwappedReference, Teacher, open_reference
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.folders.load import unwrap
from megatron_rl.weights.layout.local_names import named_tensors
from tests.distributed import run_ranks
from tests.tiny_batches import VOCAB, make_sequences, my_share
from tests.tiny_models import CORRECTION, GLM4_MOE, GPT_OSS, PLAIN, write_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy's, and a teacher's of the same sizes."""
    found = []
    for spread in (0.02, 0.05):
        folder = tmp_path_factory.mktemp("llama")
        write_model(folder, vocab_size=VOCAB, initializer_range=spread)
        found.append(folder)
    return found[0], found[1]


def load(folder: Path, reference: str, *overrides: str) -> Config:
    given = ["algorithm.preset=agro", f"algorithm.reference.policy={reference}"]
    steep = ["optimizer.warmup_steps=0", "optimizer.lr=0.01", "model.dtype=float32"]
    return load_config(None, [*PLAIN, f"model.path={folder}", *given, *steep, *overrides])


def reference_after_two_updates(cfg: Config) -> dict[str, object]:
    """Logprobs of the reference and of the policy around two updates, one microbatch each."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 2)
        share = my_share(1000)
        found: dict[str, object] = {"start": trainer.logprobs(share), "after": []}
        weights = []
        for _ in range(2):
            prepared = prepare_watched(trainer, share, found)
            found["reference"] = [k.reference_logprobs for k in prepared]
            trainer.update(share, version=0, prepared=prepared)
            trainer.gather()
            weights.append([p.detach().clone() for p in policy.chunks[0].parameters()])
        prepared = trainer.prepare([share])[0]
        found["last"] = [k.reference_logprobs for k in prepared]
        kept = list(policy.chunks[0].parameters())
        found["is_kept"] = all(map(torch.equal, kept, weights[-1]))
        found["moved"] = trainer.logprobs(share)
        assert trainer.reference is not None
        found["weights"] = (weights, trainer.reference._weights)
        return found


def prepare_watched(
    trainer: Trainer, share: MinibatchShare, found: dict[str, object]
) -> list[Prepared]:
    """Notes how often the parameters were written before `before_swap`, and by the end."""
    parameters = list(trainer.policy.chunks[0].parameters())

    def writes() -> int:
        return sum(parameter._version for parameter in parameters)

    started, at_swap = writes(), []
    prepared = trainer.prepare([share], before_swap=lambda: at_swap.append(writes()))[0]
    found["writes before swaps"] = [each - started for each in at_swap]
    found["writes"] = (writes() - started) / len(parameters)
    return prepared


def logprobs_of(model: torch.nn.Module, vocab: int) -> list[torch.Tensor]:
    """Of each sequence; vocab: ids that count."""
    found = []
    for s in make_sequences():
        ids = torch.tensor(s.token_ids, dtype=torch.int64).clamp_max(vocab - 1)
        rows = torch.log_softmax(model(ids[None]).logits[0, :, :vocab].detach(), -1)
        places = s.targets
        found.append(torch.stack([rows[i - 1, ids[i]] for i in places]))
    return found


def sorted_by_length(logprobs: torch.Tensor) -> list[float]:
    """All values, in an order that no packing changes."""
    return sorted(logprobs.tolist())


@pytest.mark.parametrize("split", ["data=1", "tensor=2", "pipeline=2"])
def test_the_start_and_a_folder_have_the_logprobs_of_transformers(
    folders: tuple[Path, Path], split: str
) -> None:
    policy, teacher = folders
    for reference, folder in (("start", policy), (str(teacher), teacher)):
        cfg = load(policy, reference, f"parallel.{split}")
        found = run_ranks(reference_after_two_updates, cfg.parallel.world_size, cfg)[-1]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        expected = sorted_by_length(torch.cat(logprobs_of(model, VOCAB)))
        for logprobs in (found["reference"], found["last"]):
            assert sorted_by_length(torch.cat(logprobs)) == pytest.approx(expected, abs=2e-5)
        assert found["is_kept"]
        # Weights that still travel are whole up to the swap: it writes each parameter twice.
        assert found["writes before swaps"] == [0] and found["writes"] == 2
        distance = (torch.cat(found["moved"]) - torch.cat(found["start"])).abs().max()
        assert distance > 1e-3


def test_a_moving_average_follows_the_weights(folders: tuple[Path, Path]) -> None:
    cfg = load(folders[0], "ema", "algorithm.reference.decay=0.75")
    found = run_ranks(reference_after_two_updates, 1, cfg)[0]
    (first, second), average = found["weights"]
    with_start = run_ranks(first_weights, 1, cfg)[0]
    for zero, one, two, mean in zip(with_start, first, second, average, strict=True):
        expected = 0.75 * (0.75 * zero + 0.25 * one) + 0.25 * two
        torch.testing.assert_close(mean, expected, rtol=1e-6, atol=1e-7)


def corrections_around_a_reference(cfg: Config) -> list[list[torch.Tensor]]:
    """Corrections of the policy's routers before, in and after the pass of the reference."""
    with open_policy(cfg) as policy:
        held = [t for n, t in named_tensors(policy.chunks).items() if n.endswith(".expert_bias")]
        found = [[each.clone() for each in held]]
        reference = open_reference(policy, find_objective(cfg.algorithm), cfg.train)
        with reference.in_place():
            found.append([each.clone() for each in held])
        return [*found, held]


def test_a_folder_of_a_reference_keeps_its_corrections_of_routers_to_itself(
    tmp_path: Path,
) -> None:
    expected = []
    for name, added in (("policy", 0.0), ("reference", 0.25)):
        write_model(tmp_path / name, family="Glm4Moe", vocab_size=VOCAB, **GLM4_MOE)
        tensors = load_file(tmp_path / name / "model.safetensors")
        names = [f"model.layers.{number}.mlp{CORRECTION}" for number in (1, 2, 3)]
        for each in names:
            tensors[each] += added
        save_file(tensors, tmp_path / name / "model.safetensors")
        expected.append([tensors[each] for each in names])
    cfg = load(tmp_path / "policy", str(tmp_path / "reference"))
    [(before, inside, after)] = run_ranks(corrections_around_a_reference, 1, cfg)
    for found, values in ((before, expected[0]), (inside, expected[1]), (after, expected[0])):
        torch.testing.assert_close(found, values, rtol=0, atol=0)


def save(trainer: Trainer, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    saving = BackgroundSave(sharded_state(trainer, 1), folder, SavePlans())
    assert saving.wait(time.monotonic() + 100)
    saving.finalize()


def gradients_of_second_step(cfg: Config, folder: Path, way: str) -> dict[str, torch.Tensor]:
    """Of each parameter on this rank. way: whether the run saves before it, or resumes there."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 5)
        if way == "resumes":
            restore(trainer, folder)
        else:
            share = my_share(30)
            trainer.update(share, version=0, prepared=trainer.prepare([share])[0])
        if way == "saves":
            save(trainer, folder)
        share = my_share(30, seed=12)
        trainer.accumulate(share, version=1, prepared=trainer.prepare([share])[0])
        return {
            name: parameter.main_grad.to("cpu", copy=True)
            for number, chunk in enumerate(policy.chunks)
            for name, parameter in chunk.named_parameters(prefix=f"{number}")
        }


def average_config(model: Path, *overrides: str) -> Config:
    """In bfloat16, where the average has another dtype than the policy."""
    given = ["model.dtype=bfloat16", "train.deterministic=true", "algorithm.reference.decay=0.5"]
    given += [f"algorithm.kl.{each}" for each in ("placement=loss", "coefficient=0.5")]
    return load(model, "ema", *given, *overrides)


def check_second_step(cfg: Config, folder: Path) -> None:
    """Its gradients are those of a run that neither saved nor resumed."""
    expected, *others = (
        run_ranks(gradients_of_second_step, cfg.parallel.world_size, cfg, folder, way)
        for way in ("does neither", "saves", "resumes")
    )
    assert all(gradient.any() for rank in expected for gradient in rank.values())
    for found in others:
        for rank, rank_expected in zip(found, expected, strict=True):
            assert rank.keys() == rank_expected.keys()
            differing = [n for n in rank if not torch.equal(rank[n], rank_expected[n])]
            assert not differing


SHARDED = "parallel.data=2 parallel.distributed_optimizer=true parallel.overlap_gradients=true"


@pytest.mark.parametrize(
    ("split", "family", "options"),
    [
        ("parallel.data=1", "GptOss", GPT_OSS),
        # A router's correction is a buffer; each expert gets tokens.
        ("parallel.data=1", "Glm4Moe", {**GLM4_MOE, "num_experts_per_tok": 8}),
        (SHARDED, "Qwen2", {"is_tied": True}),
        ("parallel.pipeline=2 parallel.virtual_stages=2", "Llama", {"is_tied": True}),
    ],
)
def test_a_step_after_a_checkpoint_of_the_average_has_all_gradients(
    tmp_path: Path, split: str, family: str, options: dict[str, Any]
) -> None:
    write_model(tmp_path / "m", family=family, vocab_size=VOCAB, **options)
    cfg = average_config(tmp_path / "m", *split.split())
    check_second_step(cfg, tmp_path / "c")


def first_weights(cfg: Config) -> list[torch.Tensor]:
    with open_policy(cfg) as policy:
        return SwappedReference(policy)._weights


def open_of_other_tokens(cfg: Config) -> str:
    with open_policy(cfg) as policy:
        try:
            open_reference(policy, find_objective(cfg.algorithm), cfg.train)
        except InputError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("vocab", "overrides", "words"),
    [
        (2 * VOCAB, [], "take a reference with the policy's tokenizer"),
        (VOCAB + 1, ["placement=loss", "estimator=exact"], "compares all tokens"),
    ],
)
def test_a_folder_with_other_tokens_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, vocab: int, overrides: list[str], words: str
) -> None:
    write_model(tmp_path, vocab_size=vocab, num_hidden_layers=1)
    given = [f"algorithm.kl.{each}" for each in overrides]
    message = run_ranks(open_of_other_tokens, 1, load(folders[0], str(tmp_path), *given))[0]
    assert str(tmp_path) in message and words in message


OTHER_SIZES = {
    "hidden_size": 96, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 6,
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("split", "family"),
    [
        ("data=2", "Llama"),
        ("tensor=2", "Qwen2"),
        ("pipeline=2", "Llama"),
        ("context=2", "Qwen2"),
        ("tensor=2 sequence=true", "Llama"),
    ],
)
def test_a_teacher_of_another_size_has_the_logprobs_of_transformers(
    folders: tuple[Path, Path], tmp_path: Path, split: str, family: str
) -> None:
    # More ids than the policy's, as larger models of a family have: these do not count.
    model = write_model(tmp_path, family=family, vocab_size=VOCAB + 3, is_tied=True, **OTHER_SIZES)
    overrides = [f"parallel.{part}" for part in split.split()]
    cfg = load(folders[0], str(tmp_path), *overrides)
    reports = run_ranks(reference_after_two_updates_of_a_teacher, 2, cfg)
    expected = sorted_by_length(torch.cat(logprobs_of(model, VOCAB)))
    found = [torch.cat(report) for report in reports if report]
    if split == "data=2":
        found = [torch.cat(found)]
    for logprobs in found:
        assert sorted_by_length(logprobs) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("split", ["context=2", "pipeline=2"])
def test_what_a_teacher_cannot_know_has_the_generators_logprobs(
    folders: tuple[Path, Path], tmp_path: Path, split: str
) -> None:
    vocab, sequences = VOCAB - 8, make_sequences()
    model = write_model(tmp_path, vocab_size=vocab, **OTHER_SIZES)
    knows = torch.tensor(
        [bool(max(s.token_ids[: p + 1]) < vocab) for s in sequences for p in s.targets]
    )
    assert knows.any() and not knows.all()
    sampled = torch.cat([torch.tensor(s.generator_logprobs) for s in sequences])
    expected = sorted_by_length(torch.cat(logprobs_of(model, vocab)).where(knows, sampled))
    cfg = load(folders[0], str(tmp_path), f"parallel.{split}")
    for report in filter(None, run_ranks(reference_after_two_updates_of_a_teacher, 2, cfg)):
        assert sorted_by_length(torch.cat(report)) == pytest.approx(expected, abs=2e-5)


def reference_after_two_updates_of_a_teacher(cfg: Config) -> list[torch.Tensor]:
    """Its logprobs once the policy has moved."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 2)
        assert isinstance(trainer.reference, Teacher)
        share = my_share(1000)
        for _ in range(2):
            prepared = trainer.prepare([share])[0]
            trainer.update(share, version=0, prepared=prepared)
            trainer.gather()
        found = [k.reference_logprobs for k in trainer.prepare([share])[0]]
        return [logprobs for logprobs in found if logprobs is not None]


def codes_left_by_a_teacher(cfg: Config) -> tuple[int, int]:
    """How many copies in FP8 a layer of the teacher, and one of the policy, has after a pass."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 2)
        assert isinstance(trainer.reference, Teacher)
        chunks = (trainer.reference._passes.policy.chunks[0], policy.chunks[0])
        layers = [unwrap(chunk).decoder.layers[0].mlp.linear_fc1 for chunk in chunks]
        for layer in layers:
            # Where TransformerEngine keeps them.
            layer._fp8_workspaces = {"weight": torch.empty(1)}
        trainer.prepare([my_share(1000)])
        of_teacher, of_policy = (len(layer._fp8_workspaces) for layer in layers)
        return of_teacher, of_policy


def test_a_teacher_leaves_no_codes_of_its_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """What TransformerEngine itself does: tests/gpu/test_backend_cuda.py."""
    write_model(tmp_path, vocab_size=VOCAB, **OTHER_SIZES)
    cfg = load(folders[0], str(tmp_path))
    assert run_ranks(codes_left_by_a_teacher, 1, cfg) == [(0, 1)]


TEMPERATURE = 0.8


def reference_kl_of_update(cfg: Config) -> list[tuple[float, float]]:
    """Value and count of `train/reference_kl`, of two updates of one batch."""
    with open_policy(cfg) as policy:
        trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 2)
        shares = [my_share(25, temperature=TEMPERATURE)] * 2
        found = []
        for share, prepared in zip(shares, trainer.prepare(shares), strict=True):
            metrics = {m.name: m for m in trainer.update(share, version=0, prepared=prepared)}
            metric = metrics["train/reference_kl"]
            found.append((metric.value, metric.count))
            trainer.gather()
        return found


def transformers_kl(folders: tuple[Path, Path]) -> float:
    """Mean over completion tokens, in float64."""
    own, other = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float64) for f in folders)
    found = []
    for s in make_sequences():
        ids = torch.tensor(s.token_ids, dtype=torch.int64)[None]
        rows = [
            torch.log_softmax(model(ids).logits[0].detach() / TEMPERATURE, -1)
            for model in (own, other)
        ]
        each = (rows[0].exp() * (rows[0] - rows[1])).sum(-1)
        found.append(each[s.targets - 1])
    return float(torch.cat(found).mean())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("sizes", [{}, OTHER_SIZES], ids=["as large", "another size"])
@pytest.mark.parametrize("split", ["tensor=2", "pipeline=2", "context=2", "data=2"])
def test_the_kl_of_positions_is_that_of_transformers(
    tmp_path: Path, split: str, is_tied: bool, sizes: dict[str, int]
) -> None:
    folders = tmp_path / "policy", tmp_path / "teacher"
    for folder, spread, mine in zip(folders, (0.1, 0.2), ({}, sizes), strict=True):
        write_model(folder, vocab_size=VOCAB, initializer_range=spread, is_tied=is_tied, **mine)
    # Of the positions alone: nobody sampled these tokens, so they say nothing of what follows.
    given = ["placement=loss", "estimator=exact", "horizon=token", "coefficient=10"]
    overrides = [f"algorithm.kl.{each}" for each in given]
    overrides += ["algorithm.preset=magistral", "optimizer.lr=1e-3", f"parallel.{split}"]
    cfg = load(folders[0], str(folders[1]), *overrides)
    expected = transformers_kl(folders)
    assert expected > 0.1
    for (first, count), (second, _) in run_ranks(reference_kl_of_update, 2, cfg):
        assert count == sum(len(s.generator_logprobs) for s in make_sequences())
        assert first / count == pytest.approx(expected, rel=1e-4)
        # Towards the reference that was kept, though the policy's weights have moved.
        assert second < first - 1.0
