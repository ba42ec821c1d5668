"""Renders messages and answers to token ids, and decodes them.

Used by generators, by supervised fine-tuning, and by a child of the launcher that finds prompts
that cannot be rendered. Reads only local files. Imports transformers only for a Renderer.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.hf_config import mlp_sizes, positions_of, text_values
from megatron_rl.config.prompts import RenderConfig
from megatron_rl.config.thinking import continued
from megatron_rl.config.tree import Config
from megatron_rl.protocol.chat_template import ChatTemplate, RenderError, Turn, find_answer_form
from megatron_rl.protocol.types import ChatMessage

_TAIL_TOKENS = 16
"""Tokens at a prompt's end that a chat template writes after the last message."""
_BATCH_PROMPTS = 512
_CPP = re.compile(r"\bC\+\+|\bcpp\b", re.IGNORECASE)


class NoTemplate(InputError):
    """A model's folder has no chat template."""


class RenderedExample(NamedTuple):
    """Token ids of a prompt and of the response to learn."""

    prompt_ids: list[int]
    response_ids: list[int]
    response: str
    """In the model's think tags."""


class Conversation(NamedTuple):
    """The input to render a prompt."""

    task: str
    messages: list[ChatMessage]
    is_program: bool = False
    """As `Prompt.is_program`."""


class Renderer:
    """The tokenizer and chat template of a model folder."""

    def __init__(
        self,
        config: RenderConfig,
        model: Path,
        context_tokens: int,
        *,
        format_checks: Mapping[str, str],
    ) -> None:
        """format_checks: by task; selects the system prompt.

        Raises InputError if there is no tokenizer or chat template.
        """
        self.model = model
        self.tokenizer = _load_tokenizer(model, config.chat_template)
        self.template = ChatTemplate(self.tokenizer, config.chat_template_kwargs)
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        self.form = find_answer_form(self.template, added)
        """What the template writes around an answer."""
        config = config.for_model(count_parameters(model))
        self._config, self._format_checks = config, format_checks
        self.history = config.history
        """What stands for earlier replies of a conversation: `render.history`."""
        self.tags = None if config.thinking.is_none else config.tags
        """Think tags of the model; None: it does not think."""
        self.context_tokens = context_tokens
        """Limit of prompt plus completion."""
        self.model_stop_ids = stop_ids(model, self.tokenizer.eos_token_id)
        """End tokens that the model's folder names."""
        self.end_id = self._find_end()
        """The token that ends an answer: the chat template's, else the end-of-sequence token."""
        self.stop_ids = tuple(sorted({*self.model_stop_ids, self.end_id}))
        """Token ids that end a sequence."""
        self.rows = read_values(model / "config.json").get("vocab_size")
        """Token ids that the model has; None if its folder does not say it."""
        # Such as of a tokenizer that got tokens after training: most prompts have none of them.
        self._has_foreign_ids = self.rows is not None and len(self.tokenizer) > self.rows

    def _find_end(self) -> int:
        own = self.tokenizer.eos_token_id
        ends = [own] if own is not None else list(self.model_stop_ids)
        if self.form.end:
            ends = [self.tokenizer.convert_tokens_to_ids(self.form.end)]
        if not ends:
            raise InputError(
                f"model.path={self.model}: neither its tokenizer (eos_token), its "
                "generation_config.json (eos_token_id) nor its chat template names an end token, "
                "so no completion would end: name one in generation_config.json"
            )
        return int(ends[0])

    def render(
        self,
        messages: list[ChatMessage],
        max_new_tokens: int,
        *,
        task: str,
        is_program: bool = False,
    ) -> list[int]:
        """Prompt token ids, up to the start of the completion.

        is_program: selects the demonstration. Raises RenderError if the template fails, if the
        prompt leaves no room for max_new_tokens in the context, or for a token that the model
        does not have.
        """
        text = self._text(Conversation(task, messages, is_program))
        # Templates write special tokens such as <s> themselves.
        ids = self.encode(text)
        refusal = self.find_refusal(len(ids), max_new_tokens) or self.find_foreign(ids)
        if refusal:
            raise RenderError(refusal)
        return ids

    def render_example(
        self, messages: list[ChatMessage], response: str, *, task: str, is_program: bool = False
    ) -> RenderedExample:
        """A prompt and its response, whose thoughts get the model's tags.

        Raises RenderError like `render`, if the response does not fit the context.
        """
        prompt = self.render(messages, 0, task=task, is_program=is_program)
        if self.tags is not None:
            response = continued(response, self.tags, self.tail(prompt))
        ids = self.render_response(response)
        if refusal := self.find_excess(len(prompt) + len(ids)) or self.find_foreign(ids):
            raise RenderError(refusal)
        return RenderedExample(prompt, ids, response)

    def find_refusals(
        self, conversations: Sequence[Conversation], max_new_tokens: int
    ) -> dict[int, str]:
        """By index: why `render` would refuse a conversation; fast for many short ones.

        Assumes that a template adds the same text to all conversations with the same roles, and
        that a token has at least one byte, so that few prompts are tokenized. `render` refuses the
        rest (such as a normalization that makes a text longer).
        """
        room_bytes = self.context_tokens - max_new_tokens
        added_bytes: dict[tuple[object, ...], int] = {}
        refusals: dict[int, str] = {}
        unsure: list[tuple[int, str]] = []
        for index, conversation in enumerate(conversations):
            roles = tuple(message.role for message in conversation.messages)
            shape = (*_opening_key(conversation), *roles)
            own_bytes = sum(len(m.content.encode()) for m in conversation.messages)
            is_short = shape in added_bytes and own_bytes + added_bytes[shape] <= room_bytes
            if is_short and not self._has_foreign_ids:
                continue
            try:
                text = self._text(conversation)
            except RenderError as error:
                refusals[index] = str(error)
                continue
            added_bytes.setdefault(shape, max(0, len(text.encode()) - own_bytes))
            unsure.append((index, text))
        for start in range(0, len(unsure), _BATCH_PROMPTS):
            batch = unsure[start : start + _BATCH_PROMPTS]
            texts = [text for _, text in batch]
            ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)
            for (index, _), prompt_ids in zip(batch, ids["input_ids"], strict=True):
                refusal = self.find_refusal(len(prompt_ids), max_new_tokens)
                if refusal := refusal or self.find_foreign(prompt_ids):
                    refusals[index] = refusal
        return refusals

    def _text(self, conversation: Conversation) -> str:
        """The rendered conversation. Raises RenderError if the template fails."""
        return self.template.render(self.turns(conversation))

    def turns(self, conversation: Conversation) -> list[Turn]:
        """The messages, with the run's system prompt and example before them."""
        turns = [{"role": m.role, "content": m.content} for m in conversation.messages]
        return self._opened(turns, _opening_key(conversation))

    def opened(self, turns: Sequence[Turn], task: str) -> list[Turn]:
        """The first messages of an environment, with the run's system prompt before them."""
        return self._opened(list(turns), (task, False, False))

    def _opened(self, turns: list[Turn], key: tuple[str, bool, bool]) -> list[Turn]:
        task, is_program, is_cpp = key
        if task not in self._format_checks:
            raise InputError(
                f"unknown task {task!r}: known are {sorted(self._format_checks)}, "
                "others are defined in [reward.tasks.NAME]"
            )
        # Many templates accept a system message only as the first message.
        if any(turn["role"] == "system" for turn in turns):
            return turns
        check = self._format_checks[task]
        opening: list[Turn] = []
        if system_prompt := self._config.system_prompt_of(check):
            opening.append({"role": "system", "content": system_prompt})
        if shown := self._config.demonstration_of(check, is_program=is_program, is_cpp=is_cpp):
            opening.append({"role": "user", "content": shown.question})
            opening.append({"role": "assistant", "content": shown.reply})
        return opening + turns

    def find_refusal(self, tokens: int, max_new_tokens: int) -> str:
        """Why a prompt of `tokens` tokens cannot be completed; empty when it can."""
        room = self.context_tokens - max_new_tokens
        if 0 < tokens <= room:
            return ""
        return (
            f"the prompt has {tokens} tokens; allowed are 1 to {room} = generator.context_tokens "
            f"{self.context_tokens} - max_new_tokens {max_new_tokens}"
        )

    def find_excess(self, tokens: int) -> str:
        """Why prompt and response of so many tokens cannot be learnt; empty when they can."""
        if tokens <= self.context_tokens:
            return ""
        return (
            f"prompt and response have {tokens} tokens; allowed are at most "
            f"{self.context_tokens} (generator.context_tokens): raise it"
        )

    def find_foreign(self, ids: Sequence[int]) -> str:
        """Why the model cannot read these tokens; empty when it can."""
        highest = max(ids, default=0) if self._has_foreign_ids else 0
        if self.rows is None or highest < self.rows:
            return ""
        return (
            f"the token {self.tokenizer.convert_ids_to_tokens(highest)!r} has the id {highest}, "
            f"and the model has {self.rows} tokens (vocab_size in config.json): give the "
            "tokenizer that the model was trained with"
        )

    def tail(self, prompt_ids: list[int]) -> str:
        """Text of the end of a prompt, with special tokens."""
        return self.decode(prompt_ids[-_TAIL_TOKENS:])

    def render_response(self, text: str) -> list[int]:
        """Token ids of an answer as the chat template has it behind a prompt, with its end."""
        return [*self.encode(self.form.around(text)), self.end_id]

    def encode(self, text: str) -> list[int]:
        # verbose: warns of texts beyond the model's positions, which `find_refusal` names better.
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without its stop token; other special tokens stay."""
        if token_ids and token_ids[-1] in self.stop_ids:
            token_ids = token_ids[:-1]
        text = self.tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def forbid_torch() -> None:
    """Keep torch out of a process that needs none, where transformers 5 would load it for seconds.

    Tokenizers do without. Call it before a Renderer is made.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]  # forbids the import
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def _load_tokenizer(model: Path, chat_template: str) -> Any:
    """The folder's tokenizer, with the given template if any. Raises InputError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            model,
            local_files_only=True,
            # mistral-common's tokenizer, taken where a tekken.json lies, has no template.
            mistral_format=False,
        )
    except (OSError, ValueError) as error:
        raise InputError(f"model.path={model}: cannot load its tokenizer: {error}") from error
    if chat_template:
        tokenizer.chat_template = chat_template
    if not tokenizer.chat_template:
        raise NoTemplate(
            f"model.path={model}: its tokenizer has no chat template; set render.chat_template"
        )
    return tokenizer


def open_renderer(config: Config) -> Renderer:
    """The renderer of the run's initial model. Raises InputError."""
    return Renderer(
        config.render,
        config.model.path,
        config.generator.context_tokens,
        format_checks=config.reward.format_checks,
    )


def count_parameters(model: Path) -> int:
    """Approximate number of parameters, from a model folder's config.json; 0 if unknown."""
    found = read_values(model / "config.json")
    try:
        hidden, layers = found["hidden_size"], found["num_hidden_layers"]
        units = mlp_sizes(found).units_held()
    except KeyError:
        return 0
    heads = found.get("num_attention_heads", 1)
    kv_share = found.get("num_key_value_heads", heads) / heads
    vocabulary = found.get("vocab_size", 0) * (1 if found.get("tie_word_embeddings") else 2)
    return round(hidden * (vocabulary + layers * (2 + 2 * kv_share) * hidden + 3 * units))


def names_cpp(messages: Sequence[ChatMessage]) -> bool:
    """Whether a message names C++, so that a Python example would mislead.

    Most data sets name the language of a program only in the text.
    """
    return any(_CPP.search(message.content) for message in messages)


def _opening_key(conversation: Conversation) -> tuple[str, bool, bool]:
    return conversation.task, conversation.is_program, names_cpp(conversation.messages)


def describe_system_prompts(config: Config, kinds: list[tuple[str, bool, bool]]) -> list[str]:
    """One line for each system prompt and its demonstration, with its tasks.

    kinds: (task, is_program, whether the prompt names C++).
    """
    tasks_of: dict[str, list[str]] = {}
    render = config.render.for_model(count_parameters(config.model.path))
    for task, is_program, is_cpp in kinds:
        format_check = config.reward.format_checks[task]
        text = config.render.system_prompt_of(format_check)
        shown = json.dumps(text, ensure_ascii=False) if text else "none"
        exchange = render.demonstration_of(format_check, is_program=is_program, is_cpp=is_cpp)
        if exchange:
            shown += f"; shown before each prompt: {json.dumps(exchange.reply, ensure_ascii=False)}"
        tasks_of.setdefault(shown, []).append(task)
    return [
        f"system prompt ({', '.join(dict.fromkeys(names))}): {shown}"
        for shown, names in tasks_of.items()
    ]


def stop_ids(model: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """All end-of-sequence ids of the tokenizer, config.json and generation_config.json."""
    found = {tokenizer_eos} if tokenizer_eos is not None else set()
    for name in ("config.json", "generation_config.json"):
        value = read_values(model / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [value] if value is not None else [])
    return tuple(sorted(found))


def stop_strings(model: Path) -> list[str]:
    """Texts of generation_config.json that end a completion. Raises InputError."""
    path = model / "generation_config.json"
    given = read_values(path).get("stop_strings") or []
    found = [given] if isinstance(given, str) else given
    if not (isinstance(found, list) and all(isinstance(text, str) and text for text in found)):
        raise InputError(
            f"{path}: stop_strings={given!r} is no text and no list of texts: mend it, or leave "
            "it out"
        )
    return list(dict.fromkeys(found))


def read_values(path: Path) -> dict[str, Any]:
    """Values of a model's JSON file; values of `text_config` come first."""
    return text_values(json.loads(path.read_text())) if path.exists() else {}


def judge_context(config: Config) -> int:
    """Tokens of a judge's messages and reply together."""
    positions = positions_of(read_values(config.scored_folder / "config.json"))
    return min(positions or config.scorer.kv_tokens, config.scorer.kv_tokens)
