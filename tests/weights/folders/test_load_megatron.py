"""A Megatron checkpoint loads into every split what the Hugging Face folder loads, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, ModelConfig, ParallelConfig
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.train import open_control, open_syncer
from megatron_rl.weights.folders.conversion import Request, convert
from megatron_rl.weights.folders.load import check_untrained, load_megatron, unwrap
from megatron_rl.weights.folders.megatron_folder import MegatronFolder, model_blocks
from megatron_rl.weights.layout.shape import read_shape
from tests.distributed import RanksFailed, run_ranks
from tests.tiny_models import (
    CORRECTION,
    GLM4_MOE,
    GPT_OSS,
    LATENT,
    MIXED_WINDOWS,
    QWEN3_MOE,
    load_on_rank,
    write_model,
)
from tests.wrapped_models import write_wrapped

DENSE = [
    ParallelConfig(),
    ParallelConfig(tensor=2),
    ParallelConfig(pipeline=2),
]
MIXED = [ParallelConfig(data=2, expert=2), ParallelConfig(tensor=2, sequence=True, expert=2)]
CASES = [
    *(("Llama", {}, split) for split in DENSE),
    *(("Qwen2", {"tie_word_embeddings": True}, split) for split in DENSE),
    *(("Phi3", {}, split) for split in DENSE),
    *(("Qwen3Moe", QWEN3_MOE, split) for split in (*DENSE[::2], *MIXED)),
    ("Mixtral", {"num_local_experts": 4}, MIXED[0]),
    *(("Olmo2", {}, split) for split in DENSE),
    *(("Glm4Moe", GLM4_MOE, split) for split in (*DENSE[::2], *MIXED)),
    *(("DeepseekV3", LATENT, split) for split in (*DENSE[::2], *MIXED)),
    ("Glm4MoeLite", {**LATENT, "q_lora_rank": None}, MIXED[1]),
    *(("GptOss", GPT_OSS, split) for split in (DENSE[2], MIXED[1])),
]


def make_checkpoint(tmp_path: Path, family: str, options: dict[str, Any]) -> tuple[Path, Path]:
    """A HF folder in bfloat16 and the Megatron folder of the same model."""
    write_model(tmp_path / "hf", family=family, dtype=torch.bfloat16, **options)
    convert(Request(tmp_path / "hf", tmp_path / "megatron"), lambda done, total: None)
    return tmp_path / "hf", tmp_path / "megatron"


def differing(hf: Path, megatron: Path, parallel: ParallelConfig, dtype: str) -> list[str]:
    """Parameters that are not what the HF folder gave, after they were overwritten and loaded."""
    loaded = load_on_rank(hf, parallel, dtype)
    parameters = {
        f"{number}.{name}": parameter
        for number, chunk in enumerate(loaded.model)
        for name, parameter in (*chunk.named_parameters(), *chunk.named_buffers())
        if not name.endswith("local_tokens_per_expert")
    }
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(7)
    load_megatron(loaded.model, loaded.shape, megatron)
    assert len(expected) > 8
    return [name for name in expected if not torch.equal(parameters[name], expected[name])]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("family", "options", "parallel"), CASES)
def test_checkpoint_loads_what_the_hf_folder_loads(
    family: str, options: dict[str, Any], parallel: ParallelConfig, tmp_path: Path
) -> None:
    hf, megatron = make_checkpoint(tmp_path, family, options)
    for dtype in ("bfloat16", "float32"):
        found = run_ranks(differing, parallel.world_size, hf, megatron, parallel, dtype)
        assert not any(found), found


def embedding_of_policy(hf: Path, megatron: Path | None) -> Tensor:
    """What a trainer rank starts with."""
    cfg = Config(model=ModelConfig(path=hf, megatron_path=megatron, dtype="float32"))
    with open_policy(cfg) as policy:
        return unwrap(policy.chunks[0]).embedding.word_embeddings.weight.detach().clone()


def test_trainer_starts_from_the_megatron_folder_that_the_configuration_names(
    tmp_path: Path,
) -> None:
    hf, megatron = make_checkpoint(tmp_path, "Llama", {})
    tensors = load_file(hf / "model.safetensors")
    expected = tensors["model.embed_tokens.weight"].float()
    blank = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(blank, hf / "model.safetensors")
    [found] = run_ranks(embedding_of_policy, 1, hf, megatron)
    assert torch.equal(found[: len(expected)], expected) and not found[len(expected) :].any()
    [found] = run_ranks(embedding_of_policy, 1, hf, None)
    assert not found.any()


def test_an_export_could_not_be_made_without_the_rest_of_a_wrapper(tmp_path: Path) -> None:
    hf, megatron = tmp_path / "hf", tmp_path / "megatron"
    write_wrapped(hf, "Mistral3")
    convert(Request(hf, megatron), lambda done, total: None)
    expected = load_file(hf / "model.safetensors")["language_model.model.embed_tokens.weight"]
    [found] = run_ranks(embedding_of_policy, 1, hf, megatron)
    assert torch.equal(found[: len(expected)], expected)
    (hf / "model.safetensors").unlink()
    with pytest.raises(
        RanksFailed, match="holds more than the text model.* as model.path of a run"
    ):
        run_ranks(embedding_of_policy, 1, hf, megatron)


def refusal_of_engines(hf: Path, megatron: Path) -> str:
    """Why a trainer with the Megatron folder's weights takes no engines, which have `hf`'s."""
    cfg = Config(model=ModelConfig(path=hf, megatron_path=megatron, dtype="bfloat16"))
    with open_policy(cfg) as policy:
        try:
            with open_syncer(cfg, policy, open_control(cfg, policy)):
                return ""
        except InputError as error:
            return str(error)


def check_engines_folder(hf: Path, megatron: Path) -> None:
    """Raises InputError."""
    cfg = Config(model=ModelConfig(path=hf, megatron_path=megatron, dtype="bfloat16"))
    with open_policy(cfg) as policy:
        check_untrained(policy.chunks, policy.shape, hf)


def test_corrections_of_routers_that_engines_would_not_have_are_refused(tmp_path: Path) -> None:
    hf, megatron = make_checkpoint(tmp_path, "Glm4Moe", GLM4_MOE)
    tensors = load_file(hf / "model.safetensors")
    # What a weight sync brings may differ.
    tensors["model.layers.3.mlp.gate.weight"] += 1
    save_file(tensors, hf / "model.safetensors")
    run_ranks(check_engines_folder, 1, hf, megatron)
    name = f"model.layers.3.mlp{CORRECTION}"
    tensors[name][5] += 1e-6
    save_file(tensors, hf / "model.safetensors")
    [found] = run_ranks(refusal_of_engines, 1, hf, megatron)
    assert found.startswith(f"{hf}: {name} differs")


def described(hf: Path) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Key -> shape of the checkpoint's tensor, and whether padding may differ, says Megatron."""
    loaded = load_on_rank(hf, ParallelConfig())
    parts = list(unwrap(loaded.model[0]).sharded_state_dict().values())
    built = [p.build() if isinstance(p, ShardedTensorFactory) else p for p in parts]
    tensors = [p for p in nested_values({"all": built}) if not isinstance(p, ShardedObject)]
    return {part.key: (tuple(part.global_shape), part.allow_shape_mismatch) for part in tensors}


@pytest.mark.parametrize(
    ("family", "options"),
    [("Qwen2", {}), ("SmolLM3", MIXED_WINDOWS), ("Phi3", {}),
     ("Qwen3", {"tie_word_embeddings": True}), ("Qwen3Moe", QWEN3_MOE),
     ("Glm4Moe", GLM4_MOE), ("Glm4Moe", {**GLM4_MOE, "first_k_dense_replace": 0}),
     ("DeepseekV3", LATENT), ("Glm4MoeLite", {**LATENT, "q_lora_rank": None}),
     ("DeepseekV3", {**LATENT, "first_k_dense_replace": 0}), ("Olmo2", {})],
)  # fmt: skip
def test_blocks_are_the_tensors_that_megatron_describes(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path / "hf", family=family, **options)
    [theirs] = run_ranks(described, 1, tmp_path / "hf")
    blocks = {block.key: block for block in model_blocks(read_shape(tmp_path / "hf"))}
    assert blocks.keys() == theirs.keys()
    for key, (size, is_padded) in theirs.items():
        assert blocks[key].may_be_padded is is_padded
        assert blocks[key].full_size == ((250, *size[1:]) if is_padded else size)


def save_as_training_does(hf: Path, folder: Path, parallel: ParallelConfig) -> None:
    """Model under the prefix `model.`, with something of an optimizer beside it."""
    loaded = load_on_rank(hf, parallel)
    state = unwrap(loaded.model[0]).sharded_state_dict()
    moment = unwrap(loaded.model[0]).sharded_state_dict()
    for part in state.values():
        part.key = "model." + part.key
    for part in moment.values():
        part.key = "optimizer.state.exp_avg." + part.key
    tree = {"model": state, "optimizer": moment, "iteration": 3}
    dist_checkpointing.save(tree, str(folder))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("family", "options", "parallel"),
    [
        ("Llama", {}, ParallelConfig(tensor=2)),
        ("Phi3", {}, ParallelConfig(tensor=2)),
        ("Qwen3Moe", QWEN3_MOE, ParallelConfig(data=2, expert=2)),
        ("Olmo2", {}, ParallelConfig(tensor=2, sequence=True)),
        ("Glm4Moe", GLM4_MOE, ParallelConfig(data=2, expert=2)),
        ("DeepseekV3", LATENT, ParallelConfig(tensor=2, sequence=True, expert=2)),
    ],
)
def test_training_checkpoint_becomes_the_hf_folder_it_started_from(
    family: str, options: dict[str, Any], parallel: ParallelConfig, tmp_path: Path
) -> None:
    hf, step, target = tmp_path / "hf", tmp_path / "step", tmp_path / "out"
    write_model(hf, family=family, **options)
    step.mkdir()
    run_ranks(save_as_training_does, parallel.world_size, hf, step, parallel)
    convert(Request(step, target, files_from=hf), lambda done, total: None)
    expected = load_file(hf / "model.safetensors")
    found: dict[str, Tensor] = load_file(target / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    loaded = run_ranks(differing, parallel.world_size, hf, step, parallel, "float32")
    assert not any(loaded), loaded


def test_checkpoint_of_another_model_is_an_input_error(tmp_path: Path) -> None:
    hf, megatron = make_checkpoint(tmp_path, "Llama", {})
    write_model(tmp_path / "other", num_hidden_layers=2)
    with pytest.raises(RanksFailed, match=r"InputError: .*has shape \(4, .*config.json means \(2,"):
        run_ranks(differing, 1, tmp_path / "other", megatron, ParallelConfig(), "float32")


def test_checkpoint_with_fewer_rows_than_the_vocabulary_is_an_input_error(tmp_path: Path) -> None:
    hf, megatron = make_checkpoint(tmp_path, "Llama", {})
    shape = read_shape(hf)
    MegatronFolder(megatron).check(replace(shape, vocab=249))
    with pytest.raises(InputError, match=r"has shape \(250, 64\), but config.json means \(251, 64"):
        MegatronFolder(megatron).check(replace(shape, vocab=251))
