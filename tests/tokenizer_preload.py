"""Imported once by the server of `forked_tokenizer_children`: what its children would import."""

from megatron_rl.protocol.render import forbid_torch

forbid_torch()

from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

import megatron_rl.launcher.dry_run  # noqa: E402

__all__ = ["AutoTokenizer", "PreTrainedTokenizerFast", "megatron_rl"]
