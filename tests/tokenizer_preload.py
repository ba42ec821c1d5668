"""Imported once by the server of `forked_tokenizer_children`: what its children would import."""

import sys

# As in a child that was spawned.
sys.modules["torch"] = None  # type: ignore[assignment]

import transformers  # noqa: E402
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402

import megatron_rl.launcher.dry_run  # noqa: E402

__all__ = ["AutoTokenizer", "PreTrainedTokenizerFast", "megatron_rl", "transformers"]
