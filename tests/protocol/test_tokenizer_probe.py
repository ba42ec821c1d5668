"""Tokenizers that make other ids than their file, or than their family: named at a run's start."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from megatron_rl.config.prompts import RenderConfig
from megatron_rl.data.tiny_model import make_folder
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.render_probe import compare_tokenizers
from tests.protocol.template_families import FAMILIES, write_family


def open_folder(folder: Path, **render: Any) -> Renderer:
    config = RenderConfig(system_prompt="", **render)
    return Renderer(config, folder, 4096, format_checks={"sums": "none"})


def warnings_of(folder: Path) -> list[str]:
    return compare_tokenizers(open_folder(folder))


def set_class(folder: Path, name: str) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": name}))


@pytest.mark.parametrize("name", list(FAMILIES))
def test_tokenizers_that_keep_their_file_pass(tmp_path: Path, name: str) -> None:
    write_family(tmp_path, name)
    assert warnings_of(tmp_path) == []


def test_a_class_that_rebuilds_the_tokenizer_is_named(tmp_path: Path) -> None:
    """transformers 5 makes a SentencePiece tokenizer of whatever names the class of Llama 2."""
    write_family(tmp_path, "llama3")
    set_class(tmp_path, "LlamaTokenizerFast")
    own = open_folder(tmp_path)
    text = "Hello world"
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids
    assert own.encode(text) != plain
    (ids, lost) = compare_tokenizers(own)
    assert "as LlamaTokenizer, which makes other ids than its tokenizer.json" in ids
    assert '"tokenizer_class": "PreTrainedTokenizerFast"' in ids
    assert "does not give a text back: \"Hello world, it's" in lost
    # What the warning asks for mends it.
    set_class(tmp_path, "PreTrainedTokenizerFast")
    assert open_folder(tmp_path).encode(text) == plain
    assert warnings_of(tmp_path) == []


def test_a_mistral_tokenizer_with_another_familys_regex_is_named(tmp_path: Path) -> None:
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

    for folder, kind in (("wrong", "mistral3"), ("llama", "llama")):
        write_family(tmp_path / folder, "mistral", model_type=kind)
    (warning,) = warnings_of(tmp_path / "wrong")
    assert "was saved with a regex that is not Mistral's" in warning
    assert f'from_pretrained("{tmp_path}/wrong", fix_mistral_regex=True)' in warning
    assert warnings_of(tmp_path / "llama") == []
    # A model of Mistral's architecture may have a tokenizer of another family.
    write_family(tmp_path / "other", "qwen3", model_type="mistral")
    assert warnings_of(tmp_path / "other") == []
    # Mended by transformers itself, which looks at large vocabularies only.
    path = tmp_path / "wrong" / "tokenizer.json"
    mended = TokenizersBackend._patch_mistral_regex(
        Tokenizer.from_file(str(path)), str(tmp_path / "wrong"), local_files_only=True,
        fix_mistral_regex=True,
    )  # fmt: skip
    mended.save(str(path))
    assert warnings_of(tmp_path / "wrong") == []


def test_a_tokenizer_that_loses_text_is_named(tmp_path: Path) -> None:
    write_family(tmp_path, "qwen3")
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(path))
    (warning,) = warnings_of(tmp_path)
    assert '"Hello world, it\'s 12,345.67 (3/4)!\\n" becomes "hello world, it\'s' in warning
    # A closed vocabulary knows few characters, and is meant to.
    make_folder(tmp_path / "tiny", seed=0)
    assert warnings_of(tmp_path / "tiny") == []


def test_the_folders_template_is_kept_where_mistral_commons_file_lies(tmp_path: Path) -> None:
    write_family(tmp_path, "mistral", model_type="mistral")
    (tmp_path / "tekken.json").write_text("{}")
    renderer = open_folder(tmp_path)
    assert renderer.tokenizer.get_chat_template() == FAMILIES["mistral"].template
