"""The text model of a wrapper alone, for SGLang's registry (SGLANG_EXTERNAL_MODEL_PACKAGE).

Imported by SGLang's processes, on CUDA too. SGLang's own classes of wrappers hold a vision tower,
which answers no text, and name the text model's parameters each in another way.
"""

MODEL_VARIABLE = "MEGATRON_RL_TEXT_MODEL"
"""Variable of the server's environment: the wrapper's architecture."""
TIED_VARIABLE = "MEGATRON_RL_TEXT_TIED"
"""1 or 0: whether the output matrix is the embedding."""
