"""Findings about a model's chat template and tokenizer, for the user at a run's start.

Runs in a child of the launcher, which has the tokenizer loaded anyway. Takes well below a second.
"""

import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.thinking import KNOWN_TAGS, ThinkTags
from megatron_rl.protocol.chat_template import Part, RenderError, Turn, find_losses, read_json
from megatron_rl.protocol.render import Conversation, Renderer

_SHOWN_CHARACTERS = 60
_MOST_SHAPES = 256
"""Kinds of conversations that are tried, the most frequent first."""
_QUESTIONS = "questions"
_QUESTION: Turn = {"role": "user", "content": "1"}
PROBES = (
    "Hello world, it's 12,345.67 (3/4)!\n",
    "def f(x):\n    return x  # \ttab\n\n\n",
    "HelloWorld iPhone 'The' \"QUOTED\" don't a//b/\n",
    "\\frac{1}{2}+\\sqrt{x_{10}}=\\boxed{-7}",
    "naïve Größe, задача 数学 🙂",
)
_MISTRAL = ("mistral", "mistral3", "voxtral", "ministral", "ministral3", "pixtral")
_MISTRAL_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Mistral's tokenizers divide a text, as `fix_mistral_regex` of transformers 5.19 has it."""


class TaughtAnswer(NamedTuple):
    """The response of an SFT example."""

    conversation: Conversation
    response: str


def probe_renderer(
    renderer: Renderer,
    conversations: Sequence[Conversation] = (),
    taught: Sequence[TaughtAnswer] = (),
    max_new_tokens: int | None = None,
) -> list[str]:
    """Lines to show.

    conversations: the run's prompts, for what the template leaves out of them. taught: SFT
    examples, to compare with the template's rendering, and with max_new_tokens, the longest
    completions in training. Raises InputError if the template writes tokens that the model does not
    have.
    """
    _check_rows(renderer)
    notes = [
        renderer.template.describe_unread(),
        _describe_end(renderer),
        *_describe_losses(renderer, [*conversations, *(one.conversation for one in taught)]),
        _describe_clock(renderer),
        _describe_taught(renderer, taught),
        "" if max_new_tokens is None else _describe_long(renderer, taught, max_new_tokens),
        *compare_tokenizers(renderer),
    ]
    return [note for note in notes if note]


def _check_rows(renderer: Renderer) -> None:
    rows = renderer.rows
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
            own = f"{renderer.template.render(turns)}{form.around(response)}{form.end}"
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


def _describe_long(renderer: Renderer, taught: Sequence[TaughtAnswer], most: int) -> str:
    """A warning if most SFT responses are longer than completions may be."""
    lengths: list[int] = []
    for (task, messages, is_program), written in taught:
        try:
            example = renderer.render_example(messages, written, task=task, is_program=is_program)
        except RenderError:
            continue  # the cold start refuses it with the reason
        lengths.append(len(example.response_ids))
    count = sum(length > most for length in lengths)
    if 2 * count <= len(lengths):
        return ""
    return (
        f"warning: {count} of the first {len(taught)} SFT responses have more tokens than "
        f"sampling.max_new_tokens = {most} (the longest has {max(lengths)}): a model that is taught"
        " them is cut at this limit. Raise it, or shorten the responses"
    )


# --- tokenizer ----------------------------------------------------------------------------------


def compare_tokenizers(renderer: Renderer) -> list[str]:
    """Warnings where the tokenizer, as transformers loads it, differs from its own file.

    Only a Renderer makes token ids in a run: engines and trainer ranks are given ids.
    """
    found = (_differs_from_file(renderer), _splits_wrongly(renderer), _loses_text(renderer))
    return [text for text in found if text]


def _differs_from_file(renderer: Renderer) -> str:
    """A warning if transformers makes other ids than tokenizer.json."""
    tokenizer, folder = renderer.tokenizer, renderer.model
    path = folder / "tokenizer.json"
    # Mistral's regex is mended at load on request; then the file is known to differ.
    if not path.exists() or tokenizer.init_kwargs.get("fix_mistral_regex"):
        return ""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_file(str(path))
    plain.no_truncation()
    plain.no_padding()
    for text in PROBES:
        own, theirs = renderer.encode(text), plain.encode(text, add_special_tokens=False).ids
        if own != theirs:
            return (
                f"warning: transformers loads the tokenizer of {folder} as "
                f"{type(tokenizer).__name__}, which makes other ids than its tokenizer.json: of "
                f"{text!r} {_first_difference(own, theirs)}. The model was most likely trained "
                'with tokenizer.json: set "tokenizer_class": "PreTrainedTokenizerFast" in '
                "tokenizer_config.json"
            )
    return ""


def _first_difference(own: list[int], theirs: list[int]) -> str:
    place = next(
        (n for n, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b),
        min(len(own), len(theirs)),
    )
    return f"{own[place : place + 3]} in place of {theirs[place : place + 3]} at token {place}"


def _splits_wrongly(renderer: Renderer) -> str:
    """A warning for a tokenizer of Mistral that was saved with another family's regex."""
    folder = renderer.model
    kind = read_json(folder / "config.json").get("model_type")
    backend = getattr(renderer.tokenizer, "backend_tokenizer", None)
    if kind not in _MISTRAL or backend is None or backend.pre_tokenizer is None:
        return ""
    if backend.token_to_id("[INST]") is None:
        return ""  # another family's tokenizer
    state = backend.pre_tokenizer.__getstate__().decode()
    # Older tokenizers of Mistral divide no text before they merge.
    if '"Split"' not in state or '"ByteLevel"' not in state:
        return ""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(_MISTRAL_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    right = pre_tokenizers.Sequence([split, byte_level])
    for text in PROBES:
        own = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        expected = [piece for piece, _ in right.pre_tokenize_str(text)]
        if own != expected:
            return (
                f"warning: the tokenizer of {folder} was saved with a regex that is not Mistral's: "
                f"it divides {text!r} into {len(own)} pieces in place of {len(expected)}, so "
                "prompts have other tokens than the model was trained on. Save it anew: "
                f'AutoTokenizer.from_pretrained("{folder}", fix_mistral_regex=True)'
                f'.save_pretrained("{folder}")'
            )
    return ""


def _loses_text(renderer: Renderer) -> str:
    """A warning if a text does not come back from its ids; closed vocabularies do not count."""
    for text in PROBES:
        ids = renderer.encode(text)
        if renderer.tokenizer.unk_token_id in ids:
            continue
        if (back := renderer.decode(ids)) != text:
            return (
                f"warning: the tokenizer of {renderer.model} does not give a text back: {text!r} "
                f"becomes {back!r}, and answers are graded by their text. See its normalizer and "
                "decoder in tokenizer.json, and clean_up_tokenization_spaces in "
                "tokenizer_config.json"
            )
    return ""
