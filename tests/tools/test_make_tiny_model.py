"""tools.make_tiny_model: the tokenizer's tokens and template, and the model's shape."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from megatron_rl.data.tiny_model import VOCABULARY, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny") / "model"
    make_folder(out, seed=3)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def test_a_prompt_and_its_answer_are_one_token_a_digit_and_tag(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = [{"role": "user", "content": "sort 31="}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt + "<think></think>\\boxed{13}", add_special_tokens=False)
    assert [VOCABULARY[i] for i in ids] == [
        "<bos>", "s", "o", "r", "t", " ", "3", "1", "=", "<think>", "</think>", "\\boxed{",
        "1", "3", "}",
    ]  # fmt: skip


def test_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "<think>a b,  12+3=15;</think>\\boxed{15}<eos>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_every_id_decodes_to_a_text_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(64)]
    assert texts == VOCABULARY
    assert len(set(texts)) == 64


def test_special_tokens_have_the_ids_of_the_model(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert ids == (0, 1, 2)


def test_a_character_without_a_token_is_unknown(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("aZ", add_special_tokens=False)[1] == VOCABULARY.index("<unk>")


def test_the_model_has_the_promised_size_and_dtype(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    # Per layer: query and output 192x192, key and value 64x192, three 384x192, two norms.
    layer = 2 * 192 * 192 + 2 * 64 * 192 + 3 * 384 * 192 + 2 * 192
    assert model.num_parameters() == 64 * 192 + 4 * layer + 192
    assert model.dtype == torch.float32


def test_weights_are_those_of_a_fresh_llama(folder: Path) -> None:
    fresh = LlamaForCausalLM(AutoConfig.from_pretrained(folder)).state_dict()
    made = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert {name: tuple(w.shape) for name, w in made.items()} == {
        name: tuple(w.shape) for name, w in fresh.items()
    }
    for name, weight in made.items():
        if "norm" in name:
            assert torch.equal(weight, fresh[name])
        else:
            # Normal with mean 0 and deviation 0.02: 12,288 values or more of each.
            assert abs(float(weight.mean())) < 5 * 0.02 / weight.numel() ** 0.5
            assert float(weight.std()) == pytest.approx(0.02, rel=0.03)


def test_the_seed_decides_the_weights(folder: Path, tmp_path: Path) -> None:
    make_folder(tmp_path / "same", seed=3)
    make_folder(tmp_path / "other", seed=4)
    weights = (folder / "model.safetensors").read_bytes()
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == weights
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != weights


def test_an_existing_folder_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(FileExistsError, match="name another folder"):
        make_folder(folder, seed=3)
