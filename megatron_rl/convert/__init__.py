"""Conversion of model folders: Hugging Face, mistral-format and Megatron. One process, by hand."""
