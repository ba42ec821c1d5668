"""Tiny tokenizers with chat templates that behave as those of families in use, in our words.

Without tools, those of Qwen3, Llama 3.2 and R1's distilled models write what the published ones
write, but for names in a default system message.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.prompts import RenderConfig
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import ChatMessage

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SMOLLM2 = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}{% endif %}" + CHATML
)
_TOOL_RESPONSES = """\
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
"""
"""How both Qwens write messages of tools: as turns of the user. Other roles are left out."""
_QWEN25 = (
    """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{{- messages[0].content if messages[0].role == 'system' else 'You are Qwen.' }}
{{- '\\n# Tools' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
"""
    + _TOOL_RESPONSES
    + """\
{%- elif m.role in ('user', 'assistant', 'system') and
not (tools and loop.first and m.role == 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)
_QWEN3 = (
    """\
{%- set ns = namespace(last=messages | length - 1) %}
{%- for m in messages %}
{%- set is_tools = m.content.startswith('<tool_response>') and
m.content.endswith('</tool_response>') %}
{%- if m.role == 'user' and not is_tools %}
{%- set ns.last = loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
"""
    + _TOOL_RESPONSES
    + """\
{%- elif m.role in ('user', 'system') %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = '' %}{%- set content = m.content %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
)
_MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
{%- set system = 'Think first.[THINK]Draft here.[/THINK]Then answer.' %}{%- set turns = messages %}
{%- endif %}
{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- for m in turns if m.role != 'tool' %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant must take turns') }}
{%- endif %}
{%- endfor %}
{%- for m in turns %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}
{%- elif m.role == 'tool' and m.tool_call_id is defined %}
{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('only user, assistant and tools with ids') }}
{%- endif %}
{%- endfor %}"""
_LLAMA3 = """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if date_string is not defined %}
{%- set date_string = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- endif %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n' }}
{{- 'Today Date: ' + date_string + '\\n\\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
{%- if m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
_R1 = """\
{%- set ns = namespace(system='', after_tool=false, any_tool=false) %}
{%- for m in messages if m.role == 'system' %}{%- set ns.system = m.content %}{%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}{%- set ns.after_tool = false %}
{%- elif m.role == 'assistant' and ns.after_tool %}
{{- '<｜tool▁outputs▁end｜>' + m.content + '<｜end▁of▁sentence｜>' }}
{%- set ns.after_tool = false %}
{%- elif m.role == 'assistant' %}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}
{{- '\\n' if ns.any_tool else '<｜tool▁outputs▁begin｜>' }}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- set ns.after_tool = true %}{%- set ns.any_tool = true %}
{%- endif %}
{%- endfor %}
{%- if ns.after_tool %}{{- '<｜tool▁outputs▁end｜>' }}
{%- elif add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""


class Family(NamedTuple):
    """A model's template, its own tokens and its ends."""

    template: str
    tokens: tuple[str, ...]
    bos: str
    eos: str
    ends: tuple[str, ...]
    """Of generation_config.json."""


_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_THINK = ("<think>", "</think>")
FAMILIES = {
    "smollm2": Family(_SMOLLM2, _CHATML_TOKENS, "<|im_start|>", "<|im_end|>", ("<|im_end|>",)),
    "qwen2.5": Family(
        _QWEN25, _CHATML_TOKENS, "", "<|im_end|>", ("<|im_end|>", "<|endoftext|>")
    ),
    # The base model has the same template, and ends with <|endoftext|>.
    "qwen2.5-base": Family(_QWEN25, _CHATML_TOKENS, "", "<|endoftext|>", ("<|endoftext|>",)),
    "qwen3": Family(
        _QWEN3, (*_CHATML_TOKENS, *_THINK), "", "<|im_end|>", ("<|im_end|>", "<|endoftext|>")
    ),
    "mistral": Family(
        _MISTRAL,
        (
            "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]",
            "[/THINK]",
        ),
        "<s>", "</s>", ("</s>",),
    ),
    "llama3": Family(
        _LLAMA3,
        (
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eom_id|>", "<|eot_id|>",
        ),
        "<|begin_of_text|>", "<|end_of_text|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "r1": Family(
        _R1,
        (
            "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
            *_THINK,
        ),
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", ("<｜end▁of▁sentence｜>",),
    ),
}  # fmt: skip
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 divides a text; Mistral's tokenizers were saved with it by mistake."""
_MERGES = (("1", "2"), ("Ċ", "Ċ"), ("t", "h"), ("th", "e"), ("Ġ", "a"))
"""So that tokens cross the places where a template puts texts together."""


def byte_by_byte(model: Any) -> Any:
    """A tokenizer that divides a text as Llama 3 does, and knows every byte."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_family(folder: Path, name: str, **config: Any) -> dict[str, int]:
    """Write the tokenizer of a family, byte by byte with few merges; returns its tokens' ids.

    config: more values of config.json.
    """
    from tokenizers import AddedToken, models, pre_tokenizers

    family = FAMILIES[name]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in _MERGES)]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = byte_by_byte(models.BPE(vocab=vocab, merges=list(_MERGES)))
    # Qwen3's tags are tokens that are not special, Mistral's are special.
    tokenizer.add_tokens(
        [AddedToken(one, special=one not in _THINK, normalized=False) for one in family.tokens]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": family.bos, "eos_token": family.eos, "chat_template": family.template}
    values = {key: value for key, value in named.items() if value}
    values |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    ids = {token: tokenizer.token_to_id(token) for token in family.tokens}
    ends = [ids[token] for token in family.ends]
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ends if len(ends) > 1 else ends[0]})
    )
    size = {"model_type": "llama", "vocab_size": tokenizer.get_vocab_size()}
    (folder / "config.json").write_text(json.dumps(size | config))
    return ids


ASK = "what is\n12 a the 12?"
SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": ASK}


def make(folder: Path, **render: Any) -> Renderer:
    config = RenderConfig(**{"system_prompt": "", **render})
    return Renderer(config, folder, 4096, format_checks={"sums": "think_box"})


def prompt_ids(renderer: Renderer, question: str = ASK) -> list[int]:
    return renderer.render([ChatMessage("user", question)], 8, task="sums")


def own_ids(folder: Path, turns: list[dict[str, str]], opens: bool, **variables: Any) -> list[int]:
    """What transformers makes of the folder, without our renderer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer.apply_chat_template(
        turns, tokenize=True, add_generation_prompt=opens, **variables
    )
    ids: list[int] = found["input_ids"]
    return ids
