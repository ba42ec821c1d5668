"""Messages and answers to token ids, and back to text.

Used by generators and by supervised fine-tuning, which must agree on it. Reads only local files.
transformers is imported when a Renderer is made, so that importing this module stays light.
"""

import json
from pathlib import Path

import jinja2

from megatron_rl.protocol.config import RenderConfig
from megatron_rl.protocol.process import InputError
from megatron_rl.protocol.types import Message

_TAIL_TOKENS = 16
"""Tokens at a prompt's end that hold what a chat template writes behind the last message."""


class RenderError(ValueError):
    """A prompt that cannot be rendered; the text says why and what to do."""


class Renderer:
    """The tokenizer and chat template of a model folder."""

    def __init__(self, config: RenderConfig, model: Path, context_tokens: int) -> None:
        """Raises InputError when the folder has no tokenizer, or there is no chat template."""
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        except (OSError, ValueError) as error:
            raise InputError(f"model.path={model}: cannot load its tokenizer: {error}") from error
        if config.chat_template:
            self._tokenizer.chat_template = config.chat_template
        if not self._tokenizer.chat_template:
            raise InputError(
                f"model.path={model}: its tokenizer has no chat template; set render.chat_template"
            )
        if self._tokenizer.eos_token_id is None:
            raise InputError(f"model.path={model}: its tokenizer names no eos_token")
        self._system_prompt = config.system_prompt
        self._context_tokens = context_tokens
        self.stop_ids = stop_ids(model, self._tokenizer.eos_token_id)
        """Token ids that end a sequence."""

    def render(self, messages: list[Message], max_new_tokens: int) -> list[int]:
        """Prompt token ids, up to where the completion starts.

        Raises RenderError for a template that fails and for a prompt that leaves no room for
        max_new_tokens in the context.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if self._system_prompt:
            turns.insert(0, {"role": "system", "content": self._system_prompt})
        try:
            ids = self._tokenizer.apply_chat_template(
                turns, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RenderError(
                f"the chat template failed ({type(error).__name__}: {error}) on roles "
                f"{[turn['role'] for turn in turns]}: mend the messages or render.chat_template"
            ) from error
        room = self._context_tokens - max_new_tokens
        if not 0 < len(ids) <= room:
            raise RenderError(
                f"the prompt has {len(ids)} tokens; allowed are 1 to {room} = "
                f"generator.context_tokens {self._context_tokens} - max_new_tokens {max_new_tokens}"
            )
        return list(ids)

    def tail(self, prompt_ids: list[int]) -> str:
        """Text of the end of a prompt, special tokens included."""
        return self.decode(prompt_ids[-_TAIL_TOKENS:])

    def render_response(self, text: str) -> list[int]:
        """Token ids of an answer, the end of sequence included."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self._tokenizer.eos_token_id]

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without the token that ended it; other special tokens stay."""
        if token_ids and token_ids[-1] in self.stop_ids:
            token_ids = token_ids[:-1]
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def stop_ids(model: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """End-of-sequence ids of the tokenizer, config.json and generation_config.json together."""
    found = {tokenizer_eos} if tokenizer_eos is not None else set()
    for name in ("config.json", "generation_config.json"):
        path = model / name
        value = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return tuple(sorted(found))
