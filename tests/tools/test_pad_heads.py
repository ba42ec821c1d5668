"""Added heads of zeros change neither what a model computes nor how it learns."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.pad_heads import pad_folder


def make_folder(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def loss_of(model: LlamaForCausalLM) -> torch.Tensor:
    ids = torch.arange(40).view(2, 20)
    return model(ids, labels=ids).loss


def test_padded_model_computes_and_learns_the_same(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    pad_folder(tmp_path / "model", tmp_path / "padded", 2)
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    padded = LlamaForCausalLM.from_pretrained(tmp_path / "padded", dtype=torch.float32)
    assert (padded.config.num_attention_heads, padded.config.num_key_value_heads) == (12, 4)
    for model in (plain, padded):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
    torch.testing.assert_close(loss_of(padded), loss_of(plain), rtol=1e-5, atol=1e-5)
    layer = padded.model.layers[0].self_attn
    assert layer.v_proj.weight[3 * 8 :].abs().max() == 0
    assert layer.o_proj.weight[:, 9 * 8 :].abs().max() == 0
    assert layer.q_proj.weight[9 * 8 :].abs().max() == 0
