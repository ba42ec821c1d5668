"""Finds the files with the rows of a data set's folder, by subset and split.

Three kinds of folder are known. Nothing in a folder is executed.

- `datasets` saved it (`save_to_disk`): it has state.json, or dataset_dict.json for several splits.
- It is a copy from the Hub, and README.md names the files of each subset and split.
- Names of folders and files give subset and split, as in `main/train-00000-of-00002.parquet`.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.data.tables.files import CSV, FORMATS, format_of, stem_of

_SPLITS = {
    "train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test",
    "evaluation": "test", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation",
}  # fmt: skip
"""Word in the name of a file or folder -> split, as in `datasets`."""
_EVALUATED = ("test", "validation")
_PLAIN = {"data", "default"}
"""Folders that name no subset."""
_SHARD = re.compile(r"(.*)-\d{5}-of-(\d{5})(?:-[0-9a-f]{16})?")
_FRONT_MATTER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.S)


class TableFiles(NamedTuple):
    """The files whose rows are prompts."""

    root: Path
    """The given folder, or the folder of the given file."""
    files: list[Path]
    """In the order of their rows."""
    chosen: str
    """Subset and split, for people; empty without a choice."""


Parts = dict[tuple[str, str], list[Path]]
"""Files by (subset, split)."""


def find_files(path: Path, *, subset: str = "", split: str = "") -> TableFiles:
    """The files of a path. Raises InputError for a missing or wrong choice."""
    if not path.is_dir():
        if path.exists() and not format_of(path):
            raise InputError(
                f"{path} is of no format that is read: expected {FORMATS}, or a folder"
            )
        if subset or split:
            raise InputError(f"{path} is one file: it has no subset or dataset_split to choose")
        return TableFiles(path.parent, [path], "")
    parts = _parts(path)
    if not parts:
        raise InputError(
            f"{path} holds no prompts: expected files that end in {FORMATS}. A data set that is a "
            "script is not run: its revision refs/convert/parquet has files"
        )
    return _choose(path, parts, subset, split)


def list_splits(path: Path) -> set[tuple[str, str]]:
    """(subset, split) of each part of a folder; empty for a file and for what holds no rows."""
    return set(_parts(path)) if path.is_dir() else set()


def _parts(folder: Path) -> Parts:
    return _saved(folder) or _declared(folder) or _named(folder)


def _choose(root: Path, parts: Parts, subset: str, split: str) -> TableFiles:
    subsets = sorted({known for known, _ in parts})
    if not subset and len(subsets) > 1:
        subset = _default_subset(root, parts, split)
    subset = subset or subsets[0]
    if subset not in subsets:
        raise InputError(
            f"{root} has no subset {subset!r}: it has {', '.join(filter(None, subsets)) or 'none'}"
        )
    splits = sorted(known for of, known in parts if of == subset)
    if not split and len(splits) > 1:
        raise InputError(
            f"{root} has the splits {', '.join(splits)}: choose one by prompts.dataset_split "
            "(--dataset-split of a data tool)"
        )
    is_told = bool(split) or len(splits) > 1
    split = split or splits[0]
    if split not in splits:
        raise InputError(f"{root} has no split {split!r}: it has {', '.join(splits)}")
    _check_shards(root, parts[subset, split])
    chosen = ", ".join(filter(None, (subset, f"split {split}" if is_told else "")))
    return TableFiles(root, parts[subset, split], chosen)


def _default_subset(root: Path, parts: Parts, split: str) -> str:
    """The subset to read without a choice. Raises InputError if there is none."""
    subsets = sorted({known for known, _ in parts})
    default = next((name for name in ("", "default") if name in subsets), None)
    # README.md names "default". Without it, files of an evaluation split are not read by default.
    with_split = {known for known, of in parts if of == (split or "train")}
    if default == "default" or (default == "" and (default in with_split or not with_split)):
        return default
    splits = ", ".join(sorted(of for known, of in parts if known == default))
    other = f", or the split {splits} by prompts.dataset_split" if splits else ""
    raise InputError(
        f"{root} has the subsets {', '.join(filter(None, subsets))}: choose one by prompts.subset "
        f"(--subset of a data tool){other}"
    )


def _check_shards(root: Path, files: list[Path]) -> None:
    """Raise InputError if a file of a numbered series is missing."""
    series: dict[tuple[Path, str, int], int] = {}
    for file in files:
        if numbered := _SHARD.fullmatch(stem_of(file)):
            key = (file.parent, numbered[1], int(numbered[2]))
            series[key] = series.get(key, 0) + 1
    for (folder, name, count), there in series.items():
        if there != count:
            raise InputError(
                f"{root} holds {there} of the {count} files "
                f"{(folder / name).relative_to(root)}-*-of-{count:05}: copy or download the rest"
            )


# --- folders of save_to_disk ----------------------------------------------------------------------


def _saved(root: Path) -> Parts:
    """Files that `save_to_disk` wrote; empty for another folder."""
    if (root / "dataset_dict.json").exists():
        splits = _read_json(root / "dataset_dict.json").get("splits", [])
        return {("", str(split)): _saved_split(root / str(split)) for split in splits}
    if (root / "state.json").exists():
        return {("", "train"): _saved_split(root)}
    return {}


def _saved_split(folder: Path) -> list[Path]:
    state = _read_json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise InputError(
            f"{folder} is a selection of rows that an old version of `datasets` saved: load and "
            "save it again by a newer one"
        )
    try:
        names = [Path(entry["filename"]).name for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}/state.json names no _data_files: save it again") from error
    files = [folder / name for name in names]
    for file in files:
        if not file.exists():
            raise InputError(f"{folder}/state.json names {file.name}, which is not there")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return found if isinstance(found, dict) else {}


# --- folders as on the Hub ------------------------------------------------------------------------


def _declared(root: Path) -> Parts:
    """Files that `configs` in README.md names; empty for none."""
    parts: Parts = {}
    for config in _configs(root):
        declared = config.get("data_files")
        if isinstance(declared, str) or (
            isinstance(declared, list) and all(isinstance(one, str) for one in declared)
        ):
            declared = [{"split": "train", "path": declared}]
        for one in declared or []:
            if not isinstance(one, dict) or not {"split", "path"} <= one.keys():
                given = ", ".join(map(str, one)) if isinstance(one, dict) else type(one).__name__
                raise InputError(f"{root}/README.md: expected a split and a path, got {given}")
            listed = one["path"] if isinstance(one["path"], list) else [one["path"]]
            patterns = [_text_of(root, "path", pattern) for pattern in listed]
            files = sorted({file for pattern in patterns for file in _matching(root, pattern)})
            if files:
                name = _text_of(root, "config_name", config.get("config_name", "default"))
                parts[name, _text_of(root, "split", one["split"])] = files
    return parts


def _text_of(root: Path, key: str, value: Any) -> str:
    """The text of a value in README.md. Raises InputError for a list or a mapping.

    Aliases of YAML may make a short head a list of any length, which no message can show.
    """
    if isinstance(value, list | dict | set):
        raise InputError(f"{root}/README.md: {key} is a {type(value).__name__}; expected a text")
    return str(value)


def _configs(root: Path) -> list[dict[str, Any]]:
    readme = root / "README.md"
    matter = _FRONT_MATTER.match(readme.read_text("utf-8", "replace")) if readme.exists() else None
    if matter is None:
        return []
    import yaml

    class Loader(yaml.SafeLoader):
        """Without merge keys, which copy what they name and so may fill the memory."""

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(
                        problem="merge keys (<<) are not read", problem_mark=key.start_mark
                    )

    try:
        found = yaml.load(matter[1], Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{readme}: its head is no YAML: {error}") from error
    configs = found.get("configs") if isinstance(found, dict) else None
    return [one for one in configs if isinstance(one, dict)] if isinstance(configs, list) else []


def _matching(root: Path, pattern: str) -> list[Path]:
    """Files that a pattern in README.md matches. Raises InputError for files outside the folder."""
    if pattern.startswith(("/", "~")) or ".." in Path(pattern).parts or "://" in pattern:
        raise InputError(f"{root}/README.md names files outside the folder: {pattern!r}")
    return [file for file in root.glob(pattern) if format_of(file) and file.is_file()]


def _named(root: Path) -> Parts:
    """Files by names of folders and files.

    Files without a name of a split are "train" if all others are of a split for evaluation.
    """
    files = [file for file in root.rglob("*") if format_of(file) and file.is_file()]
    files = [file for file in files if not _is_hidden(file.relative_to(root))]
    parts: Parts = {}
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        inside = file.relative_to(root)
        folders = inside.parts[:-1]
        split = _split_in(stem_of(inside)) or _series_in(stem_of(inside))
        split = split or next(filter(None, map(_split_in, reversed(folders))), "")
        own = [name for name in folders if name not in _PLAIN and not _split_in(name)]
        parts.setdefault(("/".join(own), split), []).append(file)
    if any(split not in ("", *_EVALUATED) for _, split in parts):
        # Other files without a split are not rows, such as dataset_infos.json.
        return {key: files for key, files in parts.items() if key[1]}
    told = [file for (_, split), files in parts.items() if split for file in files]
    for (subset, split), files in [*parts.items()]:
        if not split:
            del parts[subset, split]
            if rows := [file for file in _rows_among([*files, *told]) if file in files]:
                parts[subset, "train"] = rows
    return parts


def _rows_among(files: list[Path]) -> list[Path]:
    """The files without CSV, which next to another format is a table about the data set."""
    return [file for file in files if format_of(file) not in CSV] or files


def _is_hidden(inside: Path) -> bool:
    return any(part.startswith((".", "__")) for part in inside.parts) or inside.name in (
        "dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json",
    )  # fmt: skip


def _split_in(name: str) -> str:
    """The split in a name; empty for none."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), "")


def _series_in(stem: str) -> str:
    """The split of a numbered file of another name, as "math-00000-of-00001"; empty for none."""
    numbered = _SHARD.fullmatch(stem)
    return numbered[1] if numbered else ""
