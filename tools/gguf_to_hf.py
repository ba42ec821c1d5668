"""Converts the GGUF file of a Llama with a smollm tokenizer. Used by tools.convert_smollm2."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.utils import logging

SPECIAL_TOKEN_TYPE = 3  # GGUF's "control" token
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

Values = dict[str, Any]


def convert(gguf_file: Path, out: Path, dtype: torch.dtype) -> None:
    """Write the file of tools.convert_smollm2 as HF folder into the existing folder `out`.

    The dequantised weights are rounded to `dtype`.
    """
    parsed = load_gguf_checkpoint(str(gguf_file))
    config, tokenizer = parsed["config"], parsed["tokenizer"]
    config = _model_config(config, dtype)
    save_file(
        _read_weights(gguf_file, config, dtype),
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    # safetensors 0.8.0 makes the file readable by its owner only.
    (out / "model.safetensors").chmod(0o644)
    special_ids = {name: config[name] for name in _SPECIAL_IDS}
    _write_json(out / "config.json", config)
    _write_json(out / "generation_config.json", {"do_sample": False, **special_ids})
    _write_json(
        out / "tokenizer_config.json",
        _tokenizer_config(tokenizer, config) | parsed["tokenizer_config"],
    )
    _build_tokenizer(tokenizer).save(str(out / "tokenizer.json"))


def _read_weights(gguf_file: Path, config: Values, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    logging.disable_progress_bar()
    # The empty model only maps GGUF's names to its own.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    return load_gguf_checkpoint(
        str(gguf_file), return_tensors=True, model_to_load=model, torch_dtype=dtype
    )["tensors"]


def _model_config(parsed: Values, dtype: torch.dtype) -> Values:
    ignored = ("_model_name_or_path", "unk_token_id")
    return {
        "architectures": ["LlamaForCausalLM"],
        **{name: value for name, value in parsed.items() if name not in ignored},
        # GGUF keeps it as float32 (9.99999975e-06).
        "rms_norm_eps": round(parsed["rms_norm_eps"], 9),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _tokenizer_config(parsed: Values, config: Values) -> Values:
    tokens = parsed["tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        **{name.removesuffix("_id"): tokens[config[name]] for name in _SPECIAL_IDS},
        "unk_token": tokens[parsed["unk_token_id"]],
        "clean_up_tokenization_spaces": False,
    }


def _build_tokenizer(parsed: Values) -> Tokenizer:
    """GGUF's "smollm" pre-tokenizer: one token per digit, then byte-level BPE."""
    merges = [tuple(merge.split(" ")) for merge in parsed["merges"]]
    vocabulary = {token: index for index, token in enumerate(parsed["tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(parsed["tokens"], parsed["token_type"], strict=True)
            if kind == SPECIAL_TOKEN_TYPE
        ]
    )
    return tokenizer


def _write_json(path: Path, content: Values) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
