"""Tables of the model families that are trained, a file for each maker.

Read by trainer ranks, engine ranks, conversions and the launcher. Nothing but data.
"""

from megatron_rl.weights.layout.families.deepseek import DEEPSEEK_V3
from megatron_rl.weights.layout.families.family import Family
from megatron_rl.weights.layout.families.glm import GLM4_MOE, GLM4_MOE_LITE
from megatron_rl.weights.layout.families.gpt_oss import GPT_OSS
from megatron_rl.weights.layout.families.llama import LLAMA
from megatron_rl.weights.layout.families.mistral import MINISTRAL3, MISTRAL, MISTRAL3, MIXTRAL
from megatron_rl.weights.layout.families.olmo import OLMO2, OLMO3
from megatron_rl.weights.layout.families.phi import PHI3
from megatron_rl.weights.layout.families.qwen import (
    QWEN2,
    QWEN2_5_VL,
    QWEN3,
    QWEN3_MOE,
    QWEN3_VL,
    QWEN3_VL_MOE,
)
from megatron_rl.weights.layout.families.smollm import SMOLLM3

_ALL = (
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, GLM4_MOE, GLM4_MOE_LITE, DEEPSEEK_V3,
    GPT_OSS, MINISTRAL3, MISTRAL3, OLMO2, OLMO3, PHI3, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE,
    SMOLLM3,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL}
"""Architecture in config.json -> the table."""
