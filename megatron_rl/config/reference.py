"""Reference of every configuration key: type, limits, default and meaning, as data, TOML and page.

Used by `megatron-rl config`; with `--markdown` it prints docs/configuration.md. It is generated
from the sections, so it cannot differ from what a run accepts.
"""

import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import annotated_types
import tomli_w
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_rl.config.derived import AUTO, DERIVED
from megatron_rl.config.expert import EXPERT, is_expert, public_key
from megatron_rl.config.files import REQUIRED
from megatron_rl.config.section import Section
from megatron_rl.config.tree import Config

ITEM = "0"
"""Number of a list's item in the keys of the reference."""
NAME = "NAME"
"""A user's name in the keys of the reference."""
_PLAIN = {bool: "true or false", int: "whole number", float: "number", str: "text", Path: "path"}
_BOUNDS = {"gt": "above {}", "ge": "at least {}", "lt": "below {}", "le": "at most {}"}
_WIDTH = 100
_PRESET = "algorithm.preset"
_HEAD = """\
# Every key with its default. Keys behind "# " are not set: they have no default, or follow from
# other keys ("auto"), or the preset of [algorithm] fills them in, or they belong to a table that is
# there when you write it.
"""
_PAGE = """\
# Configuration

Every key that a run's TOML may hold; `megatron-rl config --markdown` prints this page, and
`megatron-rl config` the same as TOML. `megatron-rl config explain KEY` tells about one key or
section, `megatron-rl config show --config FILE` what a run would use and where each value comes
from, and `megatron-rl config diff A B` how two files differ. `megatron-rl config migrate FILE`
rewrites a file that uses former names of keys.

Tables below `[expert]` hold keys that few runs need. `run.patience` scales all deadlines among
them at once.

`[[prompts]]`, `[[stages]]`, `[[eval.sets]]` and `[[reward.extra]]` are lists: write the table as
often as needed; an override names an item by its number, as in `prompts.0.path=FILE`, and the
next free number appends one. `NAME` is a name of yours. Defaults of `[algorithm]` are those of the
preset magistral.

A relative path in a TOML file is relative to the folder of that file. On the command line it is
relative to the current folder, and so is `run.dir` everywhere. An empty text unsets a path whose
default is "not given": `dataset = ""` in `[sft]`, or `sft.dataset=` on the command line.
"""


@dataclass(frozen=True)
class Entry:
    """One key that can be set."""

    key: str
    """With its sections, such as train.group_size; items of lists as prompts.0.path."""
    kind: str
    """Allowed values, such as "whole number above 0"."""
    default: Any
    """TOML value; None: not given."""
    is_required: bool
    meaning: str


@dataclass(frozen=True)
class Table:
    """A section: a TOML table, or the item of a list of tables."""

    key: str
    """Such as sft.optimizer, or prompts.0."""
    meaning: str
    entries: tuple[Entry, ...]
    is_given: bool
    """Whether the table exists by default, unlike items of lists."""


def tables() -> list[Table]:
    """All sections of the tree, each before its subsections."""
    found = list(_sections(Config, "", "", Config(), is_given=True))
    plain = [_part(table, expert=False) for table in found]
    experts = [_part(table, expert=True) for table in found]
    return [table for table in [*plain, *experts] if table.entries]


def _part(table: Table, *, expert: bool) -> Table:
    """The table with only its common keys, or only its expert keys, by the user's names."""
    entries = [entry for entry in table.entries if is_expert(entry.key) == expert]
    named = tuple(replace(entry, key=public_key(entry.key)) for entry in entries)
    if not expert:
        return replace(table, entries=named)
    return replace(table, key=f"{EXPERT}.{table.key}", entries=named)


def find_entries(key: str) -> list[Entry]:
    """The entry of a key, or all entries of a section and its subsections; [] for neither.

    Numbers of items may be left out or be any, and a user's name may stand for `NAME`.
    """
    given = [part for part in key.strip().strip(".").split(".") if not part.isdigit()]
    begin = [
        (entry, len(parts))
        for table in tables()
        for entry in table.entries
        for parts in [[part for part in entry.key.split(".") if part != ITEM]]
        if given and _same(parts[: len(given)], given)
    ]
    exact = [entry for entry, length in begin if length == len(given)]
    return exact or [entry for entry, _ in begin]


def known_names() -> list[str]:
    """All keys, and the sections that hold them, without numbers of items."""
    found: dict[str, None] = {}
    for table in tables():
        for entry in table.entries:
            parts = [part for part in entry.key.split(".") if part != ITEM]
            found |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return list(found)


def _same(parts: Sequence[str], given: Sequence[str]) -> bool:
    return len(parts) == len(given) and all(
        part in (mine, NAME) for part, mine in zip(parts, given, strict=True)
    )


def _sections(
    model: type[Section], key: str, meaning: str, value: Section | None, *, is_given: bool
) -> Iterator[Table]:
    """The table of a section, then the tables of its subsections.

    meaning: of the field that holds it. value: its defaults there; None: it does not exist by
    default.
    """
    entries: list[Entry] = []
    inner: list[Iterator[Table]] = []
    for name, field in model.model_fields.items():
        path = f"{key}.{name}" if key else name
        section, form = _section_of(field.annotation)
        if section is None:
            entries.append(_entry(path, field, value))
            continue
        held = None
        if form == "itself":
            found = getattr(value, name) if value is not None else _default_of(field)
            held = found if isinstance(found, Section) else None
        else:
            path = f"{path}.{ITEM if form == 'list' else NAME}"
        is_there = is_given and held is not None
        inner.append(_sections(section, path, _text(field.description), held, is_given=is_there))
    if entries:
        told = " ".join(filter(None, [meaning, _text(model.__doc__)]))
        yield Table(key, told, tuple(entries), is_given)
    for below in inner:
        yield from below


def _section_of(annotation: Any) -> tuple[type[Section] | None, str]:
    """(section of a field, form): form is itself, list or dict."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, "itself"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (list, dict):
        section, _ = _section_of(arguments[-1])
        return section, "list" if origin is list else "dict"
    if origin in (types.UnionType, typing.Union):
        return next((found for a in arguments if (found := _section_of(a))[0]), (None, ""))
    return None, ""


def _entry(key: str, field: FieldInfo, value: Section | None) -> Entry:
    name = key.rpartition(".")[2]
    default = _default_of(field)
    # The section has made paths absolute; the field has the stated one.
    if value is not None and not isinstance(default, Path):
        default = value.model_dump(mode="json")[name]
    kind = _kind(field.annotation, field.metadata)
    if key in DERIVED:
        kind, default = f'{kind} | "{AUTO}"', AUTO
    return Entry(
        key,
        kind,
        str(default) if isinstance(default, Path) else default,
        field.is_required() or key in REQUIRED,
        _text(field.description),
    )


def _default_of(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    return None if default is PydanticUndefined else default


def _text(documentation: str | None) -> str:
    return " ".join((documentation or "").split())


def _kind(annotation: Any, metadata: list[Any]) -> str:
    """The allowed values of a type, in words."""
    return " ".join([_type(annotation), *_bounds(metadata)])


def _type(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        metadata = [m for found in arguments[1:] for m in getattr(found, "metadata", [found])]
        return _kind(arguments[0], metadata)
    if origin is Literal:
        return " | ".join(f'"{choice}"' for choice in arguments)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(_type(a) for a in arguments if a is not type(None))
    if origin is list:
        return f"list of: {_type(arguments[0])}"
    if origin is dict:
        return f"table of: {_type(arguments[-1])}"
    return _PLAIN.get(annotation, "any value")


def _bounds(metadata: list[Any]) -> list[str]:
    """Limits of a number; errors tell other constraints."""
    found = []
    for item in metadata:
        for constraint in item if isinstance(item, annotated_types.GroupedMetadata) else [item]:
            for name, words in _BOUNDS.items():
                limit = getattr(constraint, name, None)
                if limit is not None:
                    found.append(words.format(f"{limit:g}"))
    return [" and ".join(found)] if found else []


def commented_toml() -> str:
    """The defaults as TOML with meanings; it loads and equals the defaults."""
    return "\n".join([_HEAD, *(_table(table) for table in tables())])


def _table(table: Table) -> str:
    lines = [*_comment(table.meaning), _mark(heading(table.key), is_set=table.is_given)]
    for entry in table.entries:
        lines += _comment(explain(entry))
        is_open = entry.default in (None, AUTO) or entry.key in REQUIRED
        is_set = table.is_given and not is_open and not _is_of_preset(entry.key)
        name = entry.key.rpartition(".")[2]
        lines.append(_mark(f"{name} = {value_text(entry.default, entry)}", is_set=is_set))
    return "\n".join(lines) + "\n"


def heading(key: str) -> str:
    """TOML's header of a table, given its key, or the key of an item of a list."""
    parts = key.split(".")
    name = ".".join(part for part in parts if not part.isdigit())
    return f"[[{name}]]" if parts[-1].isdigit() else f"[{name}]"


def _is_of_preset(key: str) -> bool:
    return key.removeprefix("expert.").startswith("algorithm.") and key != _PRESET


def _mark(text: str, *, is_set: bool) -> str:
    return text if is_set else f"# {text}"


def _comment(text: str) -> list[str]:
    wrapped = textwrap.wrap(text, _WIDTH - 3, break_long_words=False, break_on_hyphens=False)
    return [f"#: {line}" for line in wrapped]


def explain(entry: Entry) -> str:
    """Meaning and type of a key in one line."""
    need = "; has to be given" if entry.is_required else ""
    return f"{entry.meaning} ({entry.kind}{need})"


def value_text(value: Any, entry: Entry | None = None) -> str:
    """A value as TOML; for None an ellipsis or the first choice."""
    if value is None:
        is_choice = entry is not None and entry.kind.startswith('"')
        return entry.kind.partition(" | ")[0] if is_choice and entry is not None else "..."
    if isinstance(value, dict) and not value:
        return "{}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {value_text(v)}" for k, v in value.items()) + "}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip()


def markdown() -> str:
    """The page docs/configuration.md."""
    parts = [_PAGE]
    for table in tables():
        rows = [
            f"| `{entry.key.rpartition('.')[2]}` | {_cell(entry.kind)} | {_default_cell(entry)} | "
            f"{_cell(entry.meaning)} |"
            for entry in table.entries
        ]
        parts += [
            f"## `{heading(table.key)}`\n",
            f"{table.meaning}\n",
            "| key | takes | default | meaning |\n|---|---|---|---|",
            "\n".join(rows) + "\n",
        ]
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\\boxed", "\\\\boxed")


def _default_cell(entry: Entry) -> str:
    if entry.is_required:
        return "has to be given"
    if entry.default is None:
        return "not given"
    text = " ".join(value_text(entry.default).split())
    # A backtick or a bar would end the cell's code.
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return "`` " + shown.replace("|", "\\|") + " ``"
