"""Llama 2 and 3, SmolLM2, and the many models with their architecture."""

from megatron_rl.weights.layout.families.family import Family

LLAMA = Family("LlamaForCausalLM", "llama")
