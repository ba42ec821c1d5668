"""Mistral's own format: `params.json` and `consolidated*.safetensors`, as HF values and names.

Pure but for reading params.json. Mistral's rotary embedding turns neighbouring rows of a head, HF's
turns rows half a head apart, so that the rows of queries and keys stand in another order.
Source: the reference implementation, mistralai/mistral-inference (rope.py, transformer_layers.py).
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.config.errors import InputError
from megatron_rl.weights.layout.shape import ModelShape, read_values

PARAMS = "params.json"
WEIGHTS = "consolidated*.safetensors"
_SAME = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope_theta": "rope_theta",
}
_POSITIONS = ("max_position_embeddings", "max_seq_len")
_WITHOUT_EFFECT = ("model_type", "causal", "max_batch_size", "use_cache")
_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{word}_proj": f"attention.w{word}" for word in "qkvo"},
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
}


def is_mistral_folder(folder: Path) -> bool:
    """Whether the weights are in mistral format only; many folders have HF's too."""
    return (folder / PARAMS).is_file() and not any(folder.glob("model*.safetensors*"))


def read_config(folder: Path) -> dict[str, Any]:
    """The equivalent of HF's config.json. Raises InputError for unknown parameters."""
    path = folder / PARAMS
    params = read_values(path)
    if not any(folder.glob(WEIGHTS)):
        raise InputError(f"{folder} has {PARAMS} but no {WEIGHTS}; pickled weights are not read")
    values = {hf: _needed(params, ours, path) for ours, hf in _SAME.items()}
    positions = next((params[key] for key in _POSITIONS if params.get(key)), None)
    if positions is None:
        raise InputError(f"{path} has none of {', '.join(_POSITIONS)}: add the context length")
    _refuse_unknown(params, path)
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        **values,
        "max_position_embeddings": positions,
        "hidden_act": params.get("activation") or "silu",
        "sliding_window": _window(params.get("sliding_window"), path),
        "tie_word_embeddings": bool(params.get("tied_embeddings")),
    }


def _needed(params: dict[str, Any], key: str, path: Path) -> Any:
    if not params.get(key):
        raise InputError(f"{path} lacks the key {key!r}: add what the model was trained with")
    return params[key]


def _refuse_unknown(params: dict[str, Any], path: Path) -> None:
    known = (*_SAME, *_POSITIONS, *_WITHOUT_EFFECT)
    known = (*known, "activation", "sliding_window", "tied_embeddings")
    # A key that is null, false or empty switches nothing on.
    unknown = sorted(key for key, value in params.items() if value and key not in known)
    if unknown:
        raise InputError(
            f"{path} has keys that are not supported: {', '.join(unknown)}; supported are dense "
            "text models without quantisation"
        )


def _window(value: Any, path: Path) -> int | None:
    """The sliding window; some files hold it as a string."""
    try:
        return None if value is None else int(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: sliding_window {value!r} is not supported: a number") from error


def name_of(hf: str) -> str:
    """Mistral's name of an HF tensor."""
    for theirs, ours in _NAMES.items():
        if hf.startswith(f"{theirs}.") or f".{theirs}." in hf:
            hf = hf.replace(theirs, ours, 1)
    return hf


def reorder(hf: str, tensor: Tensor, shape: ModelShape) -> Tensor:
    """Mistral's tensor with its rows in HF's order: rows 0, 2, 4 ... of a head, then 1, 3, 5 ..."""
    if not hf.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    columns = tensor.shape[1]
    pairs = tensor.view(-1, shape.head_dim // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(-1, columns)
