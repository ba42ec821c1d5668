"""Findings about a model's chat template and tokenizer, for the user at a run's start.

Runs in a child of the launcher, which has the tokenizer loaded anyway. Takes well below a second.
"""

import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import KNOWN_TAGS, ThinkTags
from megatron_rl.protocol.chat_template import Part, RenderError, Turn, find_losses
from megatron_rl.protocol.render import Conversation, Renderer, read_values
from megatron_rl.protocol.tokenizer_probe import compare_tokenizers

_SHOWN_CHARACTERS = 60
_MOST_SHAPES = 256
"""Kinds of conversations that are tried, the most frequent first."""
_QUESTIONS = "questions"
_QUESTION: Turn = {"role": "user", "content": "1"}


class TaughtAnswer(NamedTuple):
    """The response of an SFT example."""

    conversation: Conversation
    response: str


def probe_renderer(
    renderer: Renderer,
    conversations: Sequence[Conversation] = (),
    taught: Sequence[TaughtAnswer] = (),
) -> list[str]:
    """Lines to show.

    conversations: the run's prompts, for what the template leaves out of them. taught: SFT
    examples, to compare with the template's rendering. Raises InputError if the
    template writes tokens that the model does not have.
    """
    _check_rows(renderer)
    notes = [
        renderer.template.describe_unread(),
        _describe_end(renderer),
        *_describe_losses(renderer, [*conversations, *(one.conversation for one in taught)]),
        _describe_clock(renderer),
        _describe_taught(renderer, taught),
        *compare_tokenizers(renderer.tokenizer, renderer.model, renderer.encode, renderer.decode),
    ]
    return [note for note in notes if note]


def _check_rows(renderer: Renderer) -> None:
    rows = read_values(renderer.model / "config.json").get("vocab_size")
    try:
        ids = renderer.encode(renderer.template.render([_QUESTION]))
    except RenderError:
        return  # each prompt is refused with the reason
    highest = max([*ids, renderer.end_id])
    if rows is not None and highest >= rows:
        raise InputError(
            f"model.path={renderer.model}: the chat template writes the token "
            f"{renderer.tokenizer.convert_ids_to_tokens(highest)!r} with id {highest}, but the "
            f"model has {rows} tokens (vocab_size in config.json). Give a template of tokens that "
            "the model has (render.chat_template), or a model with more rows"
        )


def _describe_end(renderer: Renderer) -> str:
    """How the template ends an answer, unless with an end token of the model."""
    form = renderer.form
    known = " and ".join(
        repr(renderer.tokenizer.convert_ids_to_tokens(token)) for token in renderer.model_stop_ids
    )
    known = known or "none"
    if form.rest:
        return (
            f"warning: the chat template writes {form.rest[:_SHOWN_CHARACTERS]!r} after an answer, "
            f"which begins with no special token, so completions end only with {known}. If the "
            "model ends its answers with that text, set sampling.stop"
        )
    if renderer.end_id in renderer.model_stop_ids:
        return ""
    return (
        f"note: the chat template ends an answer with {form.end!r}, and the model's folder names "
        f"only {known} as its end: completions end with each of them, and SFT teaches {form.end!r}"
    )


def _describe_losses(renderer: Renderer, conversations: Sequence[Conversation]) -> list[str]:
    """What the template leaves out of these prompts, and of the run's messages before them."""
    shapes = Counter(_shape(renderer, conversation) for conversation in conversations)
    lost: Counter[str] = Counter()
    own: set[str] = set()
    for (opening, parts), count in shapes.most_common(_MOST_SHAPES):
        losses = find_losses(renderer.template, parts)
        own |= {parts[place].role for place, _ in losses if place < opening}
        names = {_name(parts[place], what) for place, what in losses if place >= opening}
        lost.update(dict.fromkeys(names, count))
    notes = []
    if lost:
        kind = "warning" if _QUESTIONS in lost else "note"
        told = ", ".join(f"{name} ({count:,} prompts)" for name, count in sorted(lost.items()))
        notes.append(f"{kind}: the chat template leaves out or changes: {told}")
    if "system" in own:
        notes.append(
            "warning: the chat template leaves out or changes the run's system prompt. Put its "
            "words into prompts.template, or give a render.chat_template that writes it"
        )
    if own - {"system"}:
        notes.append(
            "warning: the chat template changes the example exchange of render.demonstrations, "
            "such as by leaving out its thoughts. Set render.demonstrate=false, or give a "
            "render.chat_template that keeps it"
        )
    return notes


def _shape(renderer: Renderer, conversation: Conversation) -> tuple[int, tuple[Part, ...]]:
    """(number of the run's messages before the prompt, what each message consists of)."""
    turns = renderer.turns(conversation)
    parts = tuple(Part(turn["role"], _tags_in(turn, renderer.tags)) for turn in turns)
    return len(turns) - len(conversation.messages), parts


def _tags_in(turn: Turn, tags: ThinkTags | None) -> ThinkTags | None:
    if turn["role"] != "assistant":
        return None
    own = [tags] if tags else []
    return next((pair for pair in (*own, *KNOWN_TAGS) if pair.is_in(turn["content"])), None)


def _name(part: Part, what: str) -> str:
    known = {"system": "system messages", "user": _QUESTIONS, "assistant": "earlier answers"}
    name = known.get(part.role, f"messages of the role {part.role!r}")
    return name if what == "words" else f"thoughts of {name}"


def _describe_clock(renderer: Renderer) -> str:
    if "strftime_now" not in renderer.template.reads:
        return ""
    return (
        "note: the chat template can write the date, so prompts may change from day to day; if it "
        "reads a variable for the date, set it in render.chat_template_kwargs"
    )


def _describe_taught(renderer: Renderer, taught: Sequence[TaughtAnswer]) -> str:
    """SFT responses that the template would write otherwise than they are taught."""
    first, count, form = "", 0, renderer.form
    for conversation, written in taught:
        turns = renderer.turns(conversation)
        task, messages, is_program = conversation
        try:
            example = renderer.render_example(messages, written, task=task, is_program=is_program)
            response = example.response
            answer = {"role": "assistant", "content": response}
            own = f"{renderer.template.render(turns)}{form.lead}{response}{form.gap}{form.end}"
            whole = renderer.template.render([*turns, answer], opens_answer=False)
        except RenderError:
            continue  # the cold start refuses it with the reason
        if not whole.startswith(own):
            place = len(os.path.commonprefix([own, whole]))
            shown = slice(place, place + _SHOWN_CHARACTERS)
            first = first or f"{own[shown]!r} is taught, {whole[shown]!r} would be written"
            count += 1
    if not count:
        return ""
    return (
        f"note: the chat template would write {count} of the first {len(taught)} SFT responses "
        f"otherwise than they are taught (text and end, behind the prompt): {first}"
    )
