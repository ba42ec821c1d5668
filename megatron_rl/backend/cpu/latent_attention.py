"""Multi-head latent attention for hosts without TransformerEngine. Used by trainer ranks."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor


class WholeLinear(torch.nn.Module):
    """A product with a matrix that is whole on every tensor rank."""

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        # finalize_model_grads sums the gradients of marked parameters over the tensor group.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """[..., outputs], and no bias that is left to add."""
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):
    """Megatron's, with the projections to latents as in TransformerEngine's layers.

    Its local layers divide them among tensor ranks and gather the result. In megatron-core 0.16.1
    the gradient of the rotated keys would then be that of a rank's own heads alone.
    """

    config: MLATransformerConfig

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, width, config)


def use_latents(submodules: Any, norm: type) -> None:
    """Change the attention of a spec of Megatron's local layers."""
    attention = submodules.self_attention
    attention.module = LatentAttention
    attention.submodules.q_layernorm = norm
    attention.submodules.kv_layernorm = norm
    # TransformerEngine's names in checkpoints, which Megatron sets for ordinary attention alone.
    submodules.sharded_state_dict_keys_map.update(
        {
            "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
            "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
        }
    )
