"""Converts GGUF files of the Llama architecture to HF folders. Used by tools.convert_smollm2."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKEN_TYPE = 3  # GGUF's "control" token

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}

Fields = dict[str, Any]


class UnsupportedModel(RuntimeError):
    """The GGUF file is not a Llama with a smollm tokenizer."""


def convert(gguf_file: Path, out: Path, dtype: torch.dtype) -> None:
    """Write a GGUF file as HF folder into the existing folder `out`. Raises UnsupportedModel.

    The dequantised weights are rounded to `dtype`.
    """
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = (fields["general.architecture"], fields["tokenizer.ggml.pre"])
    if kind != ("llama", "smollm"):
        raise UnsupportedModel(f"{gguf_file}: architecture and tokenizer are {kind}")
    weights = _read_weights(reader, fields, dtype)
    is_tied = "lm_head.weight" not in weights
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    # safetensors 0.8.0 makes the file readable by its owner only.
    (out / "model.safetensors").chmod(0o644)
    _write_json(out / "config.json", _model_config(fields, dtype, is_tied=is_tied))
    _write_json(out / "generation_config.json", {"do_sample": False, **_special_ids(fields)})
    _write_json(out / "tokenizer_config.json", _tokenizer_config(fields))
    _build_tokenizer(fields).save(str(out / "tokenizer.json"))


def _read_weights(
    reader: gguf.GGUFReader, fields: Fields, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            _, layer, part, _ = parts
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if part in heads:
                weight = undo_rope_permutation(weight, heads[part])
        else:
            name = _TOP_NAMES[parts[0]]
        weights[name] = torch.from_numpy(np.ascontiguousarray(weight)).to(dtype)
    return weights


def undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection in HF's order (halves) from GGUF's (interleaved pairs).

    weight: [heads * head_dim, hidden]; row 2i + j of a GGUF head is row i + j * head_dim / 2 of HF.
    """
    rows, hidden = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _model_config(fields: Fields, dtype: torch.dtype, *, is_tied: bool) -> Fields:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF keeps it as float32 (9.99999975e-06).
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": is_tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **_special_ids(fields),
    }


def _special_ids(fields: Fields) -> Fields:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(fields: Fields) -> Fields:
    tokens = fields["tokenizer.ggml.tokens"]
    ids = _special_ids(fields)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }


def _build_tokenizer(fields: Fields) -> Tokenizer:
    """GGUF's "smollm" pre-tokenizer: one token per digit, then byte-level BPE."""
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [
        token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN_TYPE
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def _write_json(path: Path, content: Fields) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
