"""Whole runs of models whose folders hold more than what is trained: they learn and keep it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rl.protocol.metrics import read_jsonl
from tests.end_to_end import commands
from tests.generation.layout_models import LATENT_IN_ENGINES
from tests.tiny_models import GLM4_MOE, GPT_OSS, LATENT, MIXED_WINDOWS, write_model
from tests.wrapped_models import class_of, write_wrapped

pytestmark = [pytest.mark.slow(150), pytest.mark.exhaustive, pytest.mark.timeout(600)]

KEPT = {
    "Mistral3": ("vision_tower.", "multi_modal_projector."),
    "Ministral3": ("vision_tower.", "multi_modal_projector."),
    "Qwen3VL": ("model.visual.",),
    "Qwen3VLMoe": ("model.visual.",),
    "Olmo2": (),
    "Glm4Moe": (".e_score_correction_bias",),
    "DeepseekV3": (".e_score_correction_bias",),
    "SmolLM3": (),
    "Phi3": (),
    "GptOss": (),
}
"""Parts of the names of tensors that are not trained."""
ROUTED = ["parallel.sequence=true", "train.router_replay=true"]
SETTINGS = {"Glm4Moe": ROUTED, "DeepseekV3": ROUTED, "GptOss": ROUTED, "Qwen3VLMoe": ROUTED}
OPTIONS: dict[str, dict[str, Any]] = {
    "Glm4Moe": GLM4_MOE,
    "GptOss": GPT_OSS,
    "DeepseekV3": {**LATENT, **LATENT_IN_ENGINES},
    "SmolLM3": MIXED_WINDOWS,
    "Phi3": {"sliding_window": 12},
}  # fmt: skip
IMAGES: dict[str, dict[str, Any]] = {
    # Token 3 stands for a part of the image.
    "Mistral3": {
        "input_ids": torch.tensor([[7, 3, 3, 9, 11]]),
        "pixel_values": torch.linspace(-1, 1, 3 * 28 * 56).view(1, 3, 28, 56),
        "image_sizes": torch.tensor([[28, 56]]),
    },
    "Qwen3VL": {
        "input_ids": torch.tensor([[7, 3, 9, 11]]),
        "pixel_values": torch.linspace(-1, 1, 4 * 3 * 2 * 16 * 16).view(4, -1),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "mm_token_type_ids": torch.tensor([[0, 1, 0, 0]]),
    },
}
IMAGES |= {"Ministral3": IMAGES["Mistral3"], "Qwen3VLMoe": IMAGES["Qwen3VL"]}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads", "max_position_embeddings")  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of a first run, and its tasks."""
    folder = tmp_path_factory.mktemp("made")
    command = [sys.executable, "-m", "megatron_rl.data.tiny", str(folder)]
    subprocess.run(command, cwd=commands.ROOT, check=True, timeout=200)
    return folder


def make_model(made: Path, folder: Path, kind: str) -> None:
    """A model of the tiny one's sizes, with its tokenizer and a file of a processor."""
    shutil.copytree(made / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    values = json.loads((folder / "config.json").read_text())
    sizes = {name: values[name] for name in SIZES}
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    tokens = {name: values.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    given = {**sizes, **tokens, "initializer_range": 0.02}
    if kind in IMAGES:
        write_wrapped(folder, kind, **given, head_dim=head_dim)
    else:
        write_model(folder, family=kind, **{**given, **OPTIONS.get(kind, {})})
    (folder / "preprocessor_config.json").write_text('{"size":   28}')


def run(made: Path, model: Path, run_dir: Path, settings: list[str]) -> dict[str, Any]:
    """The summary of a first run that starts from `model`."""
    given = ["run", "--config", "tiny", "--config", made / "paths.toml", "--run-dir", run_dir]
    steps = ["train.steps=20", "eval.prompts=200", "generator.replicas=2"]
    with commands.launched(*given, f"model.path={model}", *steps, *settings) as launcher:
        output, _ = launcher.communicate(timeout=400)
    assert launcher.returncode == 0, output[-3000:]
    return json.loads((run_dir / "summary.json").read_text())


def answers(model: torch.nn.Module, kind: str) -> torch.Tensor:
    """Logits of tokens around an image."""
    with torch.no_grad():
        return model(**IMAGES[kind]).logits


@pytest.mark.parametrize("kind", KEPT)
def test_a_model_learns_and_keeps_what_is_not_trained(
    made: Path, kind: str, tmp_path: Path
) -> None:
    source, run_dir = tmp_path / "model", tmp_path / "run"
    make_model(made, source, kind)
    summary = run(made, source, run_dir, SETTINGS.get(kind, []))
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.15
    # Where no completion spans versions only rounding is left.
    gaps = [
        row["train/logprob_gap"]
        for row in read_jsonl(run_dir / "metrics.jsonl")
        if row.get("train/logprob_gap_tokens") and not row["queue/rollouts_spanning_versions"]
    ]
    assert gaps and max(gaps) < 1e-4
    final = run_dir / "hf" / "final"
    given, found = (load_file(folder / "model.safetensors") for folder in (source, final))
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        is_kept = any(part in name for part in KEPT[kind])
        # No token may have chosen an expert.
        if ".experts." not in name:
            assert torch.equal(found[name], tensor) == is_kept, name
    for file in ("preprocessor_config.json", "tokenizer.json"):
        assert (final / file).read_bytes() == (source / file).read_bytes()
    if kind in IMAGES:
        check_answers(source, final, kind)


def check_answers(source: Path, final: Path, kind: str) -> None:
    """The export sees images as a model does that was given the text part by hand."""
    loader = getattr(transformers, f"{class_of(kind)}ForConditionalGeneration").from_pretrained
    by_hand, exported = loader(source).eval(), loader(final).eval()
    trained = exported.model.language_model.state_dict()
    before = answers(by_hand, kind)
    by_hand.model.language_model.load_state_dict(trained)
    by_hand.lm_head.load_state_dict(exported.lm_head.state_dict())
    assert torch.equal(answers(exported, kind), answers(by_hand, kind))
    assert not torch.allclose(before, answers(by_hand, kind), atol=1e-3)
    # The image counts.
    other = {**IMAGES[kind], "pixel_values": -IMAGES[kind]["pixel_values"]}
    with torch.no_grad():
        assert not torch.allclose(exported(**other).logits, answers(exported, kind), atol=1e-4)
