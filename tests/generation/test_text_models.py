"""What SGLang is told of a model with a vision tower, of which it makes the text model alone."""

import importlib.util
import json
from pathlib import Path

import pytest

from generation.engine import EngineSetup
from generation.sglang_command import server_command, server_environment
from generation.text_models import FOLDER_VARIABLE
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.weights.layout.families import FAMILIES
from tests.generation.engine_driver import make_setup
from tests.wrapped_models import WRAPPERS, write_wrapped

MODELS = Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt" / "models"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_table_names_a_class_that_sglang_has(architecture: str) -> None:
    family = FAMILIES[architecture]
    name = family.engine_class or architecture
    for other in family.wrapper.others.values() if family.wrapper else ():
        assert FAMILIES[other.architecture] is other
    assert f"class {name}(" in (MODELS / f"{family.engine_module}.py").read_text()


def setup_of(folder: Path) -> EngineSetup:
    return make_setup(folder, folder / "log", model=folder)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_server_makes_the_text_model_alone(kind: str, is_tied: bool, tmp_path: Path) -> None:
    write_wrapped(tmp_path, kind, is_tied=is_tied, num_hidden_layers=1)
    found = server_environment(setup_of(tmp_path))
    assert found["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "generation.text_models"
    assert found[FOLDER_VARIABLE] == str(tmp_path)
    [given] = [word for word in server_command(setup_of(tmp_path), "load") if "override" in word]
    assert json.loads(given.partition("=")[2]) == {"language_model_only": True}


@pytest.mark.parametrize("is_cpu", [False, True])
@pytest.mark.parametrize(
    ("architecture", "module"),
    [("LlamaForCausalLM", "llama"), ("Glm4MoeForCausalLM", "glm4_moe"), ("OtherModel", "")],
)
def test_of_other_families_sglang_imports_the_models_own_alone_on_the_cpu(
    architecture: str, module: str, is_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_cpu, "is_needed", lambda: is_cpu)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    found = server_environment(setup_of(tmp_path))
    assert found.get("MEGATRON_RL_MODEL_FAMILY", "") == (module if is_cpu else "")
    package = found.get("SGLANG_EXTERNAL_MODEL_PACKAGE")
    assert package is None or (sglang_cpu.SITE_DIR / package / "wanted.py").exists()
    words = server_command(setup_of(tmp_path), "load")
    assert not [word for word in words if "override" in word]
    assert ("--disable-shared-experts-fusion" in words) == (module == "glm4_moe")


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("Mistral3", "language_model.model.layers.1.mlp.up_proj.weight",
         "model.layers.1.mlp.up_proj.weight"),
        ("Mistral3", "model.language_model.norm.weight", "model.norm.weight"),
        ("Mistral3", "language_model.lm_head.weight", "lm_head.weight"),
        ("Mistral3", "lm_head.weight", "lm_head.weight"),
        ("Mistral3", "multi_modal_projector.norm.weight", None),
        ("Mistral3", "model.vision_tower.ln_pre.weight", None),
        ("Qwen2_5_VL", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("Qwen2_5_VL", "model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("Qwen2_5_VL", "visual.blocks.0.norm1.weight", None),
        ("Qwen3VL", "model.visual.blocks.0.norm1.weight", None),
        # Of nobody: SGLang names it in its complaint.
        ("Qwen3VL", "audio.weight", "audio.weight"),
    ],
)  # fmt: skip
def test_tensors_of_both_spellings_have_the_text_models_own_names(
    architecture: str, name: str, expected: str | None
) -> None:
    wrapper = FAMILIES[f"{architecture}ForConditionalGeneration"].wrapper
    assert wrapper.text_name(name) == expected
