"""The whole configuration as TOML that explains itself, and as a page of tables.

Used by the launcher: `megatron-rl config`, and `--markdown` for docs/configuration.md.
"""

import textwrap
from typing import Any

import tomli_w

from megatron_rl.config.derived import AUTO
from megatron_rl.config.files import REQUIRED
from megatron_rl.config.reference import ITEM, Entry, Table, tables

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
relative to the current folder, and so is `run.dir` everywhere.
"""


def commented_toml() -> str:
    """The defaults as TOML with meanings; it loads and equals the defaults."""
    return "\n".join([_HEAD, *(_table(table) for table in tables())])


def _table(table: Table) -> str:
    lines = [*_comment(table.meaning), _mark(_heading(table.key), is_set=table.is_given)]
    for entry in table.entries:
        lines += _comment(explain(entry))
        is_open = entry.default in (None, AUTO) or entry.key in REQUIRED
        is_set = table.is_given and not is_open and not _is_of_preset(entry.key)
        name = entry.key.rpartition(".")[2]
        lines.append(_mark(f"{name} = {value_text(entry.default, entry)}", is_set=is_set))
    return "\n".join(lines) + "\n"


def _heading(key: str) -> str:
    """TOML's header of a table, given the key of one of its items."""
    parts = key.split(".")
    name = ".".join(part for part in parts if part != ITEM)
    return f"[[{name}]]" if parts[-1] == ITEM else f"[{name}]"


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
    """A value as TOML writes it; of one that is not there, an ellipsis or the first choice."""
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
            f"## `{_heading(table.key)}`\n",
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
