"""Decides the think tags and the format checks that a configuration leaves open.

Used by the launcher before it saves the configuration, and by tools that render or grade by it. The
files of the model's tokenizer tell most; where a template has think tags, a child process renders a
prompt, because templates may close the thoughts at once.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import HOUSE_TAGS, KNOWN_TAGS, MODEL_TAGS, ThinkTags
from megatron_rl.config.tree import Config
from megatron_rl.protocol.chat_template import read_json, read_template
from megatron_rl.protocol.render import RenderError, open_renderer
from megatron_rl.protocol.tokenizer_child import call_in_child
from megatron_rl.protocol.types import ChatMessage
from megatron_rl.trainer.sft_dataset import SftExample, keep_sft_dataset

_RENDER_S = 120.0
_NONE = ThinkTags(open="", close="")


def decide_thinking(config: Config, earlier: Config | None = None) -> Config:
    """The configuration with its think tags and all format checks decided.

    earlier: the configuration of the resumed run. Raises InputError for a tokenizer that cannot be
    read, and for a format check that excludes the tags. Without a model folder nothing is decided.
    """
    is_decided = config.reward.is_decided and not config.render.thinking.is_auto
    if is_decided or not config.model.path.is_dir():
        return config
    if earlier is not None and earlier.render.thinking.is_auto:
        # Its run began before tags were recorded, when every model was asked for <think>.
        return _decided(config, config.render.tags, thinks=True)
    tags = config.render.thinking
    if tags.is_none and config.reward.demands_thoughts:
        raise InputError(
            'render.thinking = "none" and a format check think_box or think_code in [reward.tasks] '
            "exclude each other: set the format check to box or code, or leave render.thinking out"
        )
    template = read_template(config.render, config.model.path)
    if tags.is_auto:
        found = _named_tags(config) or find_tags(template, _vocabulary(config.model.path))
        tags = found or (HOUSE_TAGS if _asks_for_thoughts(config) else _NONE)
    is_closed = not tags.is_none and tags.is_in(template) and _is_closed(config, tags)
    return _decided(config, tags, thinks=not (tags.is_none or is_closed))


def _decided(config: Config, tags: ThinkTags, *, thinks: bool) -> Config:
    render = config.render.model_copy(update={"thinking": tags})
    reward = config.reward.decided(thinks=thinks)
    return config.model_copy(update={"render": render, "reward": reward})


def find_tags(template: str, vocabulary: set[str]) -> ThinkTags | None:
    """The think tags of a model; None without any.

    Tags of the template come first, and among them those that are tokens.
    """
    written = [tags for tags in MODEL_TAGS if tags.is_in(template)]
    tokens = [tags for tags in written or MODEL_TAGS if {tags.open, tags.close} <= vocabulary]
    return next(iter(tokens or written), None)


def describe_thinking(config: Config, tasks: Sequence[str]) -> str:
    """One line about the decision, for the tasks of the prompts."""
    tags, checks = config.render.thinking, config.reward.format_checks
    named = [f"{task} {checks[task]}" for task in sorted(tasks)]
    said = f"format checks: {', '.join(named) or 'none'}; thoughts"
    if any(checks[task].startswith("think") for task in tasks):
        return tags.fill(f"{said}: between {{open}} and {{close}}")
    if not tags.is_none:
        return f"{said} are not asked for: the format checks say so, or the chat template ends them"
    return (
        f'{said}: none (render.thinking is "none", or it is "auto" and neither chat template nor '
        "vocabulary has think tags); to train a model to think, set "
        'render.thinking = {open = "<think>", close = "</think>"}'
    )


def _named_tags(config: Config) -> ThinkTags | None:
    """The tags that the user's system prompt asks for; None without any."""
    asked = config.render.system_prompt or ""
    return next((tags for tags in KNOWN_TAGS if tags.is_in(asked)), None)


def _asks_for_thoughts(config: Config) -> bool:
    """Whether a format check, a system prompt or the cold start of the user's has thoughts."""
    if config.reward.demands_thoughts or "{open}" in (config.render.system_prompt or ""):
        return True
    dataset = config.sft.cold_start_dataset
    if dataset is None or not dataset.exists():
        return False
    examples = keep_sft_dataset(dataset)
    thinking = sum(_has_thoughts(one) for one in examples)
    return 2 * thinking > len(examples)


def _has_thoughts(example: SftExample) -> bool:
    """Whether the last message that is learnt has thoughts."""
    apart = not example.response and example.messages[-1].thoughts
    return bool(apart) or any(tags.is_in(example.answer) for tags in KNOWN_TAGS)


def _vocabulary(folder: Path) -> set[str]:
    """Tokens that a tokenizer's files name as whole texts."""
    config, whole = (read_json(folder / f"tokenizer{name}.json") for name in ("_config", ""))
    decoder, model = config.get("added_tokens_decoder") or {}, whole.get("model") or {}
    added = [*decoder.values(), *(whole.get("added_tokens") or [])]
    vocabulary = model.get("vocab") or {}
    names = vocabulary if isinstance(vocabulary, dict) else (piece for piece, _ in vocabulary)
    texts = (one["content"] if isinstance(one, dict) else one for one in added)
    return {*names, *read_json(folder / "added_tokens.json"), *texts}


def _is_closed(config: Config, tags: ThinkTags) -> bool:
    """Whether prompts end with closed thoughts, as Qwen3's with enable_thinking=false."""
    tail = call_in_child(end_of_prompt, config, what="rendering a prompt", limit_s=_RENDER_S)
    return tags.is_closed_by(tail)


def end_of_prompt(config: Config) -> str:
    """The end of a rendered prompt; "" if the template fails. Imports transformers."""
    renderer = open_renderer(config)
    task = next(iter(config.reward.format_checks))
    try:
        return renderer.tail(renderer.render([ChatMessage("user", "1")], 0, task=task))
    except RenderError:
        return ""
