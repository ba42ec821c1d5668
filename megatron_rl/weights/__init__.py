"""Weights between Hugging Face folders, Megatron shards and generators; used by trainer ranks."""
