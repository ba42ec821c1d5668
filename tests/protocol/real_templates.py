"""Renderers of published chat templates, with a byte-level tokenizer trained on real text."""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.prompts import RenderConfig
from megatron_rl.protocol.render import Renderer
from tests.protocol.template_families import byte_by_byte

TEMPLATES = Path(__file__).parent / "chat_templates"
ROOT = TEMPLATES.parents[2]
_WORDS = 3000
_SAMPLES = (
    "机器学习 模型 训练 数据。強化学習のモデル。Привет, мир! нейронная сеть. مرحبا بالعالم نموذج."
    " नमस्ते दुनिया। 한국어 모델 학습. ελληνικά. e\u0301te\u0301 na\u0308chste "
    '🙂🙃👩\u200d💻\r\n\t{"a": [1, 2]}'
)


class Model(NamedTuple):
    """The tokens that a template needs of its model."""

    special: tuple[str, ...]
    ends: tuple[str, ...]
    """Of generation_config.json; the first is the tokenizer's eos_token."""
    plain: tuple[str, ...] = ()
    """Added tokens that are not special."""
    bos: str = ""


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_QWEN = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
_QWEN_MODEL = Model(_CHATML, ("<|im_end|>", "<|endoftext|>"), _QWEN)
_DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
_MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]",
)  # fmt: skip
MODELS = {
    "smollm2": Model(_CHATML, ("<|im_end|>",), bos="<|im_start|>"),
    "qwen2.5": _QWEN_MODEL,
    "qwen3": _QWEN_MODEL,
    "qwen3.5": _QWEN_MODEL,
    "llama3.2": Model(
        (
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
        ),
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        bos="<|begin_of_text|>",
    ),
    "glm4.5": Model(
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>",
         "<|observation|>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        (*_QWEN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "deepseek_v3": Model(
        _DEEPSEEK, ("<｜end▁of▁sentence｜>",), ("<think>", "</think>"), "<｜begin▁of▁sentence｜>"
    ),
    "phi3.5": Model(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        ("<|endoftext|>", "<|end|>", "<|assistant|>"),
    ),
    "mistral_nemo": Model(_MISTRAL, ("</s>",), bos="<s>"),
    "ministral3": Model(
        (*_MISTRAL, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]", "[THINK]", "[/THINK]"),
        ("</s>",),
        bos="<s>",
    ),
    "gpt_oss": Model(
        (
            "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>",
            "<|start|>", "<|end|>", "<|message|>", "<|call|>",
        ),
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        bos="<|startoftext|>",
    ),
    "kimi_k2": Model(
        (
            "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>",
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[BOS]", "[EOS]",
        ),
        ("<|im_end|>", "[EOS]"),
    ),
    "hostile": _QWEN_MODEL,
}  # fmt: skip


@cache
def _trained(*, has_bytes: bool = True) -> str:
    """A BPE tokenizer of the project's documents and of several scripts, as JSON.

    has_bytes: byte by byte, as most; else with "▁" for spaces, as Llama 2's and Mistral's older
    ones, and with a token for unknown characters.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=_WORDS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if has_bytes else [],
        special_tokens=[] if has_bytes else ["<unk>"],
        show_progress=False,
    )
    if has_bytes:
        tokenizer = byte_by_byte(models.BPE())
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))[:8]]
    tokenizer.train_from_iterator([*texts, *[_SAMPLES] * 50], trainer)
    text: str = tokenizer.to_str()
    return text


def open_model(
    folder: Path,
    name: str,
    *,
    template: str = "",
    token: dict[str, Any] | None = None,
    has_bytes: bool = True,
) -> Renderer:
    """The renderer of a model, whose tokenizer is written to the folder.

    template: instead of the model's own. token: options of its added tokens.
    has_bytes: whether the tokenizer works byte by byte.
    """
    from tokenizers import AddedToken, Tokenizer

    model = MODELS[name]
    tokenizer = Tokenizer.from_str(_trained(has_bytes=has_bytes))
    tokenizer.add_tokens(
        [
            AddedToken(text, special=text in model.special, normalized=False, **(token or {}))
            for text in (*model.special, *model.plain)
        ]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": model.ends[0],
        "chat_template": template or (TEMPLATES / f"{name}.jinja").read_text(),
    }
    if not has_bytes:
        values["unk_token"] = "<unk>"
    if model.bos:
        values["bos_token"] = model.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    ids = [tokenizer.token_to_id(text) for text in model.ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": tokenizer.get_vocab_size()}))
    config = RenderConfig(
        system_prompt="",
        chat_template_kwargs={"date_string": "1 May 2026"} if name == "llama3.2" else {},
    )
    return Renderer(config, folder, 4096, format_checks={"sums": "think_box"})
