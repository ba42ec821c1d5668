"""Classes of models for SGLang's registry (SGLANG_EXTERNAL_MODEL_PACKAGE): its own ones, changed.

Imported by SGLang's processes, on CUDA too. SGLang's own classes of wrappers hold a vision tower,
which answers no text, and name the text model's parameters each in another way. It has none for
layers without rotary embeddings.
"""

FOLDER_VARIABLE = "MEGATRON_RL_MODEL_FOLDER"
"""Variable of the server's environment: the model's folder."""
