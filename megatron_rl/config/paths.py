"""Makes relative paths of a configuration absolute. Used by `layers.py`.

A path in a TOML file is relative to the file's folder; a path on the command line, and `run.dir`
everywhere, is relative to the current folder.
"""

import os
import re
from pathlib import Path
from typing import Any

_TEMPLATE = "render.chat_template"
PATH_KEYS = (
    "model.path",
    "model.megatron_path",
    "scorer.judge",
    "algorithm.reference.policy",
    "prompts.*.path",
    "eval.sets.*.prompts.path",
    "sft.dataset",
    "replay.runs",
    "replay.datasets",
    "checkpoint.resume",
    "ports.keys_dir",
    _TEMPLATE,
)
"""Keys with paths; `*` replaces the number of a table in a list."""
_WORDS = {
    "algorithm.reference.policy": ("none", "start", "ema"),
    "checkpoint.resume": ("auto", "never"),
}
_HUB_KEYS = ("model.path", "algorithm.reference.policy")
_HUB_DATA_KEYS = ("prompts.*.path", "eval.sets.*.prompts.path")
_FILE = re.compile(r".*\.(?:jsonl|ndjson|json|parquet|arrow|csv|tsv|txt|gz|zst|zip|py)")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a model name on the Hugging Face Hub, as "Qwen/Qwen3-8B"."""
    return _HUB_NAME.fullmatch(text) is not None


def is_hub_data(text: str) -> bool:
    """Whether a text has the form of a data set's name on the Hub, and not of a file's name."""
    return is_hub_name(text) and _FILE.fullmatch(text) is None


def with_absolute_paths(value: Any, key: str, folder: Path) -> Any:
    """The value with paths relative to `folder` made absolute. key: of the value; "": all.

    An empty text stays empty: `Section` decides what it means.
    """
    if isinstance(value, dict):
        prefix = f"{key}." if key else ""
        return {
            name: with_absolute_paths(inner, prefix + name, folder) for name, inner in value.items()
        }
    if isinstance(value, list):
        is_paths = key in PATH_KEYS
        return [
            with_absolute_paths(inner, key if is_paths else f"{key}.*", folder) for inner in value
        ]
    if key == _TEMPLATE and is_template_text(str(value)):
        return value
    key = ".".join("*" if part.isdigit() else part for part in key.split("."))
    if key not in PATH_KEYS or not isinstance(value, str) or value in ("", *_WORDS.get(key, ())):
        return value
    path = Path(os.path.normpath(folder / Path(value).expanduser()))
    is_hub = (key in _HUB_KEYS and is_hub_name(value)) or (
        key in _HUB_DATA_KEYS and is_hub_data(value)
    )
    if is_hub and not path.exists():
        return value
    return str(path)


def is_template_text(text: str) -> bool:
    """Whether a value of render.chat_template is a Jinja template, not the path of a file."""
    return "{{" in text or "{%" in text
