"""A model's chat template: the variables it reads, how it ends an answer, what it leaves out.

Used by a Renderer, and by tools that only read its text. Imports no transformers: the tokenizer is
given.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import RenderConfig
from megatron_rl.config.thinking import ANSWER_CHANNEL, CHANNEL_TAGS, ThinkTags

Turn = dict[str, Any]
"""A message as templates take it: role, content, and what else they read, such as tool_calls."""
Tool = dict[str, Any]
"""As templates take it: {"type": "function", "function": {name, description, parameters}}."""
_FAILURES = (
    jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError,
)  # fmt: skip
"""Errors that a template raises on messages it does not take."""
_OFFERED = (
    "messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now",
)  # fmt: skip
"""Variables that every template is offered, as are special tokens (`..._token`)."""
_ASKS = ("defined", "undefined", "none", "default", "d")
"""Tests and filters by which a template asks whether a variable is given."""


class RenderError(ValueError):
    """A prompt cannot be rendered; the text says why and what to do."""


class _Generation(Extension):
    """Reads the blocks {% generation %}, a tag of transformers."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class AnswerForm(NamedTuple):
    """What a template writes around an answer."""

    lead: str = ""
    """Spaces before it that are not part of the prompt, or ANSWER_CHANNEL."""
    gap: str = ""
    """Spaces between the answer and `end`."""
    end: str = ""
    """The token that ends it; "": none."""
    rest: str = ""
    """Text after it that begins with no token of its own."""

    @property
    def has_channels(self) -> bool:
        """Whether the template writes thoughts, calls and answers as separate messages."""
        return self.lead == ANSWER_CHANNEL

    def around(self, answer: str) -> str:
        """An answer with what the template writes before its end."""
        lead = "" if answer.startswith(CHANNEL_TAGS.open) else self.lead
        return f"{lead}{answer}{self.gap}"


class ChatTemplate:
    """The tokenizer's chat template with the run's variables."""

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        """Raises InputError if the template is no Jinja."""
        self._tokenizer = tokenizer
        self._given = dict(variables)
        try:
            self.reads = variables_of(tokenizer.get_chat_template())
        except _FAILURES as error:
            line = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise InputError(
                f"the chat template cannot be read: {error}{line}. Mend it, or give another one as "
                "render.chat_template"
            ) from error

    def render(
        self, turns: Sequence[Turn], *, opens_answer: bool = True, tools: Sequence[Tool] = ()
    ) -> str:
        """The conversation as text. Raises RenderError if the template fails.

        opens_answer: end with what the template writes before an answer.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                list(turns),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=opens_answer,
                **self._given,
            )
        except _FAILURES as error:
            raise RenderError(
                f"the chat template failed ({type(error).__name__}: {error}) on roles "
                f"{[turn['role'] for turn in turns]}: mend the messages or render.chat_template, "
                'or set render.system_prompt="" where it takes no system message'
            ) from error
        assert isinstance(text, str)
        return text

    def describe_unread(self) -> str:
        """A warning about given variables that the template never reads; empty: none."""
        unread = sorted(self._given.keys() - self.reads)
        if not unread:
            return ""
        own = sorted(
            name for name in self.reads if name not in _OFFERED and not name.endswith("_token")
        )
        return (
            f"warning: render.chat_template_kwargs: the chat template reads no variable "
            f"{', '.join(map(repr, unread))}, so it changes nothing; it reads "
            f"{', '.join(own) or 'none but messages and tools'}. Mend the name, or leave it out"
        )


def read_template(config: RenderConfig, model: Path) -> str:
    """The text of the chat template, with all variants of a tokenizer that has several.

    "" without one. Raises InputError for a file that cannot be read.
    """
    if config.chat_template:
        return config.chat_template
    named = read_json(model / "tokenizer_config.json").get("chat_template", "")
    older = read_json(model / "chat_template.json").get("chat_template", "")
    file = model / "chat_template.jinja"
    try:
        own = file.read_text(encoding="utf-8") if file.exists() else ""
    except UnicodeDecodeError as error:
        raise InputError(f"cannot read {file}: {error}; copy the model's folder again") from error
    texts = [own, *(one if isinstance(one, str) else json.dumps(one) for one in (named, older))]
    return "\n".join(filter(None, texts))


def read_json(path: Path) -> dict[str, Any]:
    """The object of a model's JSON file; {} without one. Raises InputError for a damaged file."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}; copy the model's folder again") from error
    return found if isinstance(found, dict) else {}


def variables_of(template: str) -> frozenset[str]:
    """Names that a template reads from outside. Raises jinja2.TemplateError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    tree = environment.parse(template)
    # Jinja counts a name that some branch defines; a template with a default asks for it first.
    defined = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
    questions = tree.find_all((nodes.Test, nodes.Filter))
    asked = [one.node for one in questions if one.name in _ASKS]
    given = {node.name for node in asked if isinstance(node, nodes.Name)}
    return frozenset(meta.find_undeclared_variables(tree) - (defined - given))


def find_answer_form(template: ChatTemplate, tokens: Iterable[str]) -> AnswerForm:
    """What the template writes around an answer.

    tokens: the tokenizer's added tokens, among which are those that end a turn.
    """
    question: Turn = {"role": "user", "content": "probe-question"}
    turns: list[Turn] = [question, {"role": "assistant", "content": "probe-answer"}]
    try:
        prompt = template.render([question])
        before, found, behind = template.render(turns, opens_answer=False).rpartition(
            "probe-answer"
        )
        earlier = template.render([*turns, question]).rpartition("probe-answer")[2]
    except RenderError:
        return AnswerForm()  # prompts are refused with the reason
    if not found:
        return AnswerForm()
    lead = before.removeprefix(prompt) if before.startswith(prompt) else ""
    lead = "" if lead.strip() and lead != ANSWER_CHANNEL else lead
    text = behind.lstrip()
    begins = [token for token in tokens if token.strip() and text.startswith(token)]
    # What follows the last answer alone is no end of a turn: some templates open an answer always.
    ends = [token for token in begins if earlier.lstrip().startswith(token)]
    if not ends:
        return AnswerForm(lead, rest="" if begins else text.rstrip())
    return AnswerForm(lead, behind.removesuffix(text), max(ends, key=len))


class Part(NamedTuple):
    """What a message of a conversation consists of."""

    role: str
    tags: ThinkTags | None = None
    """Around its thoughts; None: it has none."""


def find_losses(template: ChatTemplate, parts: Sequence[Part]) -> list[tuple[int, str]]:
    """The messages whose "words", or only whose "thoughts", the template leaves out or changes.

    [] for a conversation that the template refuses.
    """
    turns = []
    for place, (role, tags) in enumerate(parts):
        thoughts = tags.around(f"\nprobe-thought-{place}-end\n") + "\n" if tags else ""
        turns.append({"role": role, "content": f"{thoughts}probe-word-{place}-end"})
    try:
        text = template.render(turns)
    except RenderError:
        return []  # each such prompt is refused with the reason
    losses = []
    for place, (_, tags) in enumerate(parts):
        if f"probe-word-{place}-end" not in text:
            losses.append((place, "words"))
        elif tags and f"probe-thought-{place}-end" not in text:
            losses.append((place, "thoughts"))
    return losses
