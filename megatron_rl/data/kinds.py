"""What a `prompts.kind` reads: a reader of SOURCES, and the data set whose columns are meant.

"auto" looks at path and name; the name of a known data set is read like "auto", by its columns.
"""

from collections.abc import Collection
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import nearest
from megatron_rl.config.paths import is_hub_data
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.tables.data_sets import DATA_SETS, named_form

AUTO = "auto"
NAMED = [name for one in DATA_SETS for name in one.names]
"""Known data sets."""
_TABLES = ("files", "hub")
_READ_BY = {
    **dict.fromkeys(("options", "train_size", "held_out_size"), ("reasoning_gym",)),
    **dict.fromkeys(("columns", "answer_part", "where", "strip_suffix"), _TABLES),
    **dict.fromkeys(("template", "strip_prefix"), (*_TABLES, "reasoning_gym")),
    "revision": ("hub",),
}
"""The readers of keys that some of ours do not read."""


def read_as(
    source: PromptSource, readers: Collection[str] = (), *, key: str = "prompts.kind"
) -> str:
    """The reader of a source: "files", "hub", "reasoning_gym", or the kind itself.

    readers: kinds that exist, to name the nearest; empty: any kind passes. key: of the kind, for
    errors. Raises InputError.
    """
    kind = source.kind
    # These two make prompts, unless rows of theirs are given.
    is_made = kind == "reasoning_gym" and (bool(source.name) or source.path is None)
    if is_made and source.path is not None:
        raise InputError(
            f"prompts.path = {source.path} is not read next to prompts.name = {source.name!r} of "
            "kind 'reasoning_gym', which makes the prompts: set prompts.kind = 'files' to read the "
            "file, or leave out path"
        )
    is_made |= kind == "human_eval" and not (source.path or source.name)
    is_form = named_form(kind) is not None and not is_made
    if kind != AUTO and not is_form:
        if readers and kind not in readers and ":" not in kind:
            raise _unknown(kind, readers, key)
        return kind
    if source.path is not None:
        return "hub" if is_hub_data(str(source.path)) and not source.path.exists() else "files"
    if "/" in source.name:
        return "hub"
    if source.name and not is_form and named_form(source.name) is None:
        return "reasoning_gym"
    raise InputError(
        f"a prompt source of kind {kind!r} needs a path (prompts.path), or as prompts.name a data "
        "set of the Hub, as 'openai/gsm8k'" + ("" if is_form else ", or one of reasoning_gym")
    )


def unread_keys(source: PromptSource) -> list[str]:
    """A text about keys of the source that are set, and that its reader does not read, if any."""
    reader = read_as(source)
    if reader not in (*_TABLES, "jsonl", "reasoning_gym"):
        return []
    plain = PromptSource()
    unread = [
        f"prompts.{key} (for {', '.join(readers)})"
        for key, readers in _READ_BY.items()
        if reader not in readers and getattr(source, key) != getattr(plain, key)
    ]
    what = source.path or source.name
    told = f"warning: {what} is read by kind {reader!r}, without {', '.join(unread)}"
    return [told] if unread else []


def paths_of(source: PromptSource) -> list[Path]:
    """The path of a source, if it has one."""
    return [source.path] if source.path is not None else []


def with_hub_name(source: PromptSource) -> PromptSource:
    """The source with the Hub's name of its data set in prompts.name.

    With a path, prompts.name is what stages call the source.
    """
    if source.path is None or source.kind == "hub":
        return source
    return source.model_copy(update={"name": str(source.path), "path": None})


def _unknown(kind: str, readers: Collection[str], key: str) -> InputError:
    known = list(dict.fromkeys([AUTO, *sorted(readers), *NAMED]))
    return InputError(
        f"{key}={kind!r} is neither one of {', '.join(known)} nor package.module:function"
        f"{nearest(kind, known)}"
    )
