"""Findings about a model's chat template and tokenizer, for the user at a run's start.

Runs in a child of the launcher, which has the tokenizer loaded anyway. Takes well below a second.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.chat_template import RenderError, Turn, contains, find_losses
from megatron_rl.protocol.render import Conversation, Renderer, read_values
from megatron_rl.protocol.tokenizer_probe import compare_tokenizers

_SHOWN_CHARACTERS = 60
_QUESTION: Turn = {"role": "user", "content": "1"}


class TaughtAnswer(NamedTuple):
    """The response of an SFT example."""

    conversation: Conversation
    response: str


def probe_renderer(renderer: Renderer, taught: Sequence[TaughtAnswer] = ()) -> list[str]:
    """Lines to show.

    taught: SFT examples, to compare with the template's rendering. Raises InputError if the
    template writes tokens that the model does not have.
    """
    _check_rows(renderer)
    notes = [
        renderer.template.describe_unread(),
        _describe_end(renderer),
        _describe_losses(renderer),
        *_describe_lost_words(renderer),
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


def _describe_losses(renderer: Renderer) -> str:
    """What the template leaves out of any conversation."""
    losses = find_losses(renderer.template, renderer.tags)
    kind = "warning" if "questions" in losses else "note"
    return f"{kind}: the chat template leaves out: {', '.join(losses)}" if losses else ""


def _describe_lost_words(renderer: Renderer) -> list[str]:
    """What the template leaves out of the run's own system prompts and examples."""
    lost: set[str] = set()
    for opening in renderer.openings.values():
        try:
            text = renderer.template.render([*opening, _QUESTION])
        except RenderError:
            continue  # each prompt is refused with the reason
        lost |= {turn["role"] for turn in opening if not contains(text, turn["content"])}
    notes = []
    if "system" in lost:
        notes.append(
            "warning: the chat template leaves out the run's system prompt. Put its words into "
            "prompts.template, or give a render.chat_template that writes it"
        )
    if lost - {"system"}:
        notes.append(
            "warning: the chat template changes the example exchange of render.demonstrations, "
            "such as by leaving out its thoughts. Set render.demonstrate=false, or give a "
            "render.chat_template that keeps it"
        )
    return notes


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
