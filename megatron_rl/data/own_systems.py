"""Whether prompts with a system message of their own ask for the form that the run checks.

Rendering adds no system prompt to such prompts. Used by the launcher and by `megatron-rl data`.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from megatron_rl.config.thinking import KNOWN_TAGS, ThinkTags
from megatron_rl.config.tree import Config
from megatron_rl.protocol.chat_template import read_template
from megatron_rl.protocol.types import Prompt

_FORMS = {
    "\\boxed": "the answer in \\boxed{}",
    "```": "a fenced code block",
    "####": "the answer behind ####",
    "<answer>": "the answer between <answer> and </answer>",
}
"""What messages ask for, by the mark that names it."""
_CHECKED = {"box": "\\boxed", "code": "```"}
"""The mark that a format check, without its thoughts, demands."""


class _Conflict(NamedTuple):
    """A form that prompts ask for, and another one that their format check demands."""

    asked: str
    check: str
    demanded: str


class _Checked(NamedTuple):
    """What the format check of a task demands."""

    name: str
    has_thoughts: bool
    mark: str
    """Of _FORMS; "": the whole response is the answer."""
    is_own: bool
    """The user's own comparison reads the answer, in whatever form."""


def has_own_system(prompt: Prompt) -> bool:
    """Whether the prompt has a system message, so that rendering adds none."""
    return any(message.role == "system" for message in prompt.messages)


def describe_own_systems(prompts: Sequence[Prompt], config: Config) -> str:
    """A warning about own system messages that disagree with the format check; empty: none do.

    Raises InputError for a chat template that cannot be read.
    """
    tags = None if config.render.thinking.is_none else config.render.tags
    template = read_template(config.render, config.model.path)
    thinks_itself = tags is not None and tags.is_in(template)
    # A model that knows the form needs no words for it, only none against it.
    is_taught = config.render.form_known or config.sft.cold_start_dataset is not None

    @cache
    def checked(task: str) -> _Checked:
        return _checked(task, config)

    found: dict[_Conflict, list[Prompt]] = {}
    for prompt in filter(has_own_system, prompts):
        if prompt.task in config.reward.all_tasks:
            conflicts = _conflicts(
                prompt, checked(prompt.task), config.render.tags,
                is_silence_fine=(thinks_itself or is_taught, is_taught),
            )  # fmt: skip
            for conflict in conflicts:
                found.setdefault(conflict, []).append(prompt)
    return _describe(found, len(prompts)) if found else ""


def _checked(task: str, config: Config) -> _Checked:
    # Without a model, think_box may still become box.
    decided = config.reward.decided(thinks=False)
    names = {reward.format_checks[task] for reward in (config.reward, decided)}
    return _Checked(
        " or ".join(sorted(names)),
        all(name.startswith("think") for name in names),
        _CHECKED.get(min(names).removeprefix("think_"), ""),
        ":" in config.reward.all_tasks[task].compare,
    )


def _conflicts(
    prompt: Prompt, check: _Checked, tags: ThinkTags, *, is_silence_fine: tuple[bool, bool]
) -> Iterator[_Conflict]:
    """is_silence_fine: whether no word about thoughts, and about the answer, is no conflict."""
    text = "\n".join(message.content for message in prompt.messages)
    system = "\n".join(turn.content for turn in prompt.messages if turn.role == "system")
    asked = next((pair for pair in (tags, *KNOWN_TAGS) if pair.is_in(text)), None)
    # Questions may hold marks that ask for nothing, such as headings with ####.
    forms = [form for mark, form in _FORMS.items() if mark in system]
    thoughts = f"thoughts between {asked.open} and {asked.close}" if asked else "no thoughts"
    if not (check.mark or check.is_own) and (asked or forms):
        said = [thoughts] * bool(asked) + forms
        yield _Conflict(" and ".join(said), check.name, "the answer alone")
    if check.has_thoughts and asked != tags and (asked or not is_silence_fine[0]):
        yield _Conflict(thoughts, check.name, f"thoughts between {tags.open} and {tags.close}")
    if check.mark not in text and (forms or not is_silence_fine[1]):
        said = " and ".join(forms) or "no form of the answer"
        yield _Conflict(said, check.name, _FORMS[check.mark])


def _describe(found: dict[_Conflict, list[Prompt]], count: int) -> str:
    # Evaluation sets may repeat ids.
    own = len({id(prompt) for prompts in found.values() for prompt in prompts})
    of_all = f"all {own:,} prompts" if own == count else f"{own:,} of {count:,} prompts"
    told = "; ".join(_tell(conflict, prompts) for conflict, prompts in found.items())
    return (
        f"warning: {of_all} have a system message of their own, which disagrees with the format "
        f'check: {told}. Set prompts.system="replace", so that render.system_prompt replaces these '
        "messages; or set reward.tasks.NAME.format_check or render.thinking to what they ask for"
    )


def _tell(conflict: _Conflict, prompts: Sequence[Prompt]) -> str:
    asks = f"{len(prompts):,} {'asks' if len(prompts) == 1 else 'ask'} for {conflict.asked}"
    first = prompts[0].place or repr(prompts[0].id)
    return f"{asks}, but {conflict.check} demands {conflict.demanded} (first {first})"
