"""Messages <-> token ids: what generators and supervised fine-tuning must agree on.

Used by generators and by supervised fine-tuning. transformers is imported when a Renderer is
loaded, so that importing this module stays light.
"""

from pathlib import Path
from typing import Any

from megatron_rl.protocol.config import RenderConfig
from megatron_rl.protocol.process import InputError
from megatron_rl.protocol.types import Message


class Renderer:
    """A tokenizer with the run's system prompt and chat template."""

    def __init__(self, tokenizer: Any, cfg: RenderConfig) -> None:
        """tokenizer: a transformers tokenizer."""
        self._tokenizer = tokenizer
        self._cfg = cfg
        if cfg.chat_template:
            tokenizer.chat_template = cfg.chat_template
        if not tokenizer.chat_template:
            raise InputError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template: set render.chat_template"
            )
        if tokenizer.eos_token_id is None:
            raise InputError(f"the tokenizer in {tokenizer.name_or_path} names no eos_token")

    @property
    def eos_id(self) -> int:
        """Id of the token that ends a completion."""
        return self._tokenizer.eos_token_id

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation up to where the assistant begins to answer."""
        turns = [{"role": m.role, "content": m.content} for m in messages]
        if self._cfg.system_prompt:
            turns.insert(0, {"role": "system", "content": self._cfg.system_prompt})
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def response_ids(self, text: str) -> list[int]:
        """Token ids of an answer with the end of sequence after it."""
        return [*self._tokenizer.encode(text, add_special_tokens=False), self.eos_id]

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without the end of sequence at its end."""
        if token_ids and token_ids[-1] == self.eos_id:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def load_renderer(model_path: Path, cfg: RenderConfig) -> Renderer:
    """Renderer of a HF folder; InputError when it has no usable tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise InputError(f"no usable tokenizer in {model_path}: {error}") from error
    return Renderer(tokenizer, cfg)
