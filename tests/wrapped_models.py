"""Tiny checkpoints that hold a vision tower beside the text model; shared by tests."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import MINISTRAL3, SIZES, disturb

_IDS = {
    "image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6,
}  # fmt: skip
_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 56, "patch_size": 14,
}  # fmt: skip
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
WRAPPERS: dict[str, dict[str, Any]] = {
    "Mistral3": {
        "text_config": {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
        "vision_config": _PIXTRAL,
        "image_token_index": 3,
    },
    "Ministral3": {
        "text_config": {"model_type": "ministral3", **MINISTRAL3},
        "vision_config": _PIXTRAL,
        "image_token_index": 3,
    },
    "Qwen2_5_VL": {
        "text_config": {"rope_parameters": _MROPE},
        "vision_config": {**_TOWER, "fullatt_block_indexes": [0]},
        **_IDS,
    },
    "Qwen3VL": {
        "text_config": {"head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]}},
        "vision_config": {
            **_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        **_IDS,
    },
    "Qwen3VLMoe": {
        "text_config": {
            "head_dim": 32, "rope_parameters": {**_MROPE, "mrope_section": [6, 5, 5]},
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        },
        "vision_config": {
            **_TOWER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        **_IDS,
    },
}  # fmt: skip
"""transformers' name of a family without `ForConditionalGeneration` -> its configuration; but
Ministral3 is a Mistral3 with another text model."""
_MISTRAL3 = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)
RENAMED = {
    "Mistral3": _MISTRAL3,
    "Ministral3": _MISTRAL3,
    "Qwen2_5_VL": (("model.", "model.language_model."), ("visual.", "model.visual.")),
    "Qwen3VLMoe": (),
}
"""What a file of another spelling says for what transformers 5 writes; see `respell`."""


def class_of(kind: str) -> str:
    """transformers' name of a kind of WRAPPERS, without `ForConditionalGeneration`."""
    return "Mistral3" if kind == "Ministral3" else kind


def write_wrapped(
    folder: Path,
    kind: str,
    *,
    is_tied: bool = False,
    dtype: torch.dtype = torch.float32,
    **sizes: Any,
) -> torch.nn.Module:
    """Write a random model of WRAPPERS to `folder` and return it, a transformers model."""
    import transformers

    torch.manual_seed(7)
    values = WRAPPERS[kind]
    text = {**SIZES, "tie_word_embeddings": is_tied, **values["text_config"], **sizes}
    # A tower of Qwen's writes features as wide as the text's; Mistral's projector does.
    vision = {"initializer_range": 0.1, "out_hidden_size": text["hidden_size"]}
    vision |= values["vision_config"]
    options = {**values, "text_config": text, "vision_config": vision}
    name = class_of(kind)
    config = getattr(transformers, f"{name}Config")(**options, tie_word_embeddings=is_tied)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model = disturb(model).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def respell(folder: Path, kind: str) -> None:
    """Rename the tensors of a folder to the other spelling that is about, and transpose experts."""
    tensors = load_file(folder / "model.safetensors")

    def other(name: str) -> str:
        for theirs, ours in RENAMED[kind]:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    renamed = {
        other(name): tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
