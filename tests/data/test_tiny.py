"""What `python -m megatron_rl.data.tiny` makes, and that it is made whole and once."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.shipped import config_path
from megatron_rl.data import tiny
from megatron_rl.protocol.metrics import read_jsonl


def test_the_layer_leads_to_model_prompts_and_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    layer = tiny.make_tiny(Path("made"), 3)
    config = load_config([config_path("tiny"), layer])
    assert config.model.path == tmp_path / "made" / "model"
    # float32; 64 x 192 of the embedding, 4 layers, the last norm. The header is a few KiB.
    layer_parameters = 2 * 192 * 192 + 2 * 64 * 192 + 3 * 384 * 192 + 2 * 192
    weights = 4 * (64 * 192 + 4 * layer_parameters + 192)
    size = (config.model.path / "model.safetensors").stat().st_size
    assert weights < size < weights + 8192
    assert config.sft.dataset is not None and config.prompts[0].path is not None
    splits = [row["split"] for row in read_jsonl(config.prompts[0].path)]
    assert (splits.count("train"), splits.count("held_out")) == (8000, 1000)
    # sort/12345: the boxed answer is ascending but for the teacher's mistake, in 6 of 10.
    answers = [row["response"].split("{")[1].rstrip("}") for row in read_jsonl(config.sft.dataset)]
    assert len(answers) == 500
    assert sum(list(answer) == sorted(answer, reverse=True) for answer in answers) == 300
    assert sum(list(answer) == sorted(answer) for answer in answers) == 200


def test_a_folder_is_made_once_and_finished_after_an_interruption(tmp_path: Path) -> None:
    layer = tiny.make_tiny(tmp_path / "made", 0)
    weights = (tmp_path / "made" / "model" / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match=r"paths\.toml exists: name another folder"):
        tiny.make_tiny(tmp_path / "made", 0)
    layer.unlink()
    (tmp_path / "made" / "tasks" / "sft.jsonl").unlink()
    assert tiny.make_tiny(tmp_path / "made", 0) == layer
    assert (tmp_path / "made" / "tasks" / "sft.jsonl").exists()
    assert (tmp_path / "made" / "model" / "model.safetensors").read_bytes() == weights
