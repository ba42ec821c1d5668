"""Model folders, read, written and converted: Hugging Face, Megatron, mistral-format.

Used by trainer ranks, and by conversions that a person starts. May import config, protocol, backend
and weights.layout.
"""
