"""Keys of TRL that name data: load_dataset of a script, dataset_name and mixtures of a YAML."""

from typing import Any

from megatron_rl.config.foreign.rules import (
    NOTHING,
    Convert,
    NoCounterpart,
    Rule,
    Values,
    each,
    joined,
)
from megatron_rl.config.paths import is_hub_data

_BUILDERS = ("parquet", "json", "arrow", "csv")
"""Paths of load_dataset that stand for a form of files."""
_MAX_SETS = 32
"""Further data sets of a mixture are named without being taken."""


def _put(place: str, key: str) -> Convert:
    """Sets a key of a source; several values make several sources."""

    def rule(value: Any, _: Values) -> dict[str, Any]:
        values = value if isinstance(value, list) else [value]
        if len(values) > 1 and place != "prompts.0":
            raise NoCounterpart(f"several: write a table with {key} for each")
        evaluated = {"eval.sets.0.name": "validation"} if place.startswith("eval") else {}
        places = [place, *(f"prompts.{n}" for n in range(1, len(values)))]
        return evaluated | {f"{p}.{key}": one for p, one in zip(places, values, strict=True)}

    return rule


def _source(section: str, place: str, *, path: str = "path", name: str = "name") -> dict[str, Rule]:
    """Arguments of load_dataset; path, name: what they are called there."""
    # A script without a split takes it from the result, by [...].
    usual = {} if section.endswith("_dataset") else {f"{place}.dataset_split": "train"}

    def put_path(value: Any, values: Values) -> dict[str, Any]:
        if value in _BUILDERS:
            return NOTHING
        lacks_split = f"{section}.split" not in values and is_hub_data(value)
        return _put(place, "path")(value, values) | (usual if lacks_split else {})

    def put_files(value: Any, values: Values) -> dict[str, Any]:
        if isinstance(value, dict):
            split = str(values.get(f"{section}.split", "train")).partition("[")[0]
            if split not in value:
                raise NoCounterpart(f"no file of the split {split}: write {place}.path")
            value = value[split]
        if values.get(f"{section}.{path}") not in _BUILDERS:
            raise NoCounterpart(f"one file of a data set: write its path as {place}.path")
        return _put(place, "path")(value, values)

    def put_split(value: Any, values: Values) -> dict[str, Any]:
        if "[" in str(value) or "+" in str(value):
            raise NoCounterpart("parts of splits: where chooses rows; dataset_split a split")
        if values.get(f"{section}.{path}") in _BUILDERS:
            return NOTHING
        return _put(place, "dataset_split")(value, values)

    return {
        f"{section}.{path}": put_path, f"{section}.data_files": put_files,
        f"{section}.split": put_split, f"{section}.{name}": _put(place, "subset"),
        f"{section}.revision": _put(place, "revision"),
    }  # fmt: skip


def _columns(place: str) -> Convert:
    """The columns that are kept: that of the prompt, and that which the rewards read."""

    def rule(value: list[str], values: Values) -> dict[str, Any]:
        question = values.get("dataset_prompt_column", "prompt")
        others = [name for name in value if name != question]
        answers = [name for name in others if name == "solution"] or others
        if question not in value or len(answers) != 1:
            raise NoCounterpart(f"{place}.columns says which is the question, and the answer")
        return {f"{place}.columns.question": question, f"{place}.columns.answer": answers[0]}

    return rule


def _has_mixture(values: Values) -> bool:
    return any(key.startswith(("datasets.0", "dataset_mixture.datasets.0")) for key in values)


def _named(name: str) -> Convert:
    """A key of one data set, which may be evaluated on too: its name, subset or a split."""
    places = (
        ("prompts.0", "dataset_train_split", "train"),
        ("eval.sets.0.prompts", "dataset_test_split", "test"),
    )

    def rule(value: Any, values: Values) -> dict[str, Any]:
        if _has_mixture(values):
            raise NoCounterpart("no effect with a mixture of data sets")
        is_evaluated = values.get("eval_strategy", "no") != "no"
        if name == "dataset_test_split" and not is_evaluated:
            raise NoCounterpart("no effect without eval_strategy")
        found: dict[str, Any] = {}
        for place, split, usual in places[: 1 + is_evaluated]:
            if name == "dataset_name":
                found[f"{place}.path"] = value
                if place.startswith("eval"):
                    found["eval.sets.0.name"] = "validation"
            if name == "dataset_config":
                found[f"{place}.subset"] = value
            if name == split or (
                name == "dataset_name" and split not in values and is_hub_data(value)
            ):
                found[f"{place}.dataset_split"] = value if name == split else usual
        return found

    return rule


def _prompt_column(value: str, values: Values) -> dict[str, Any]:
    """The column of the questions, in each source."""
    count = sum(_has(values, number) for number in range(_MAX_SETS)) or 1
    return {f"prompts.{number}.columns.question": value for number in range(count)}


def _has(values: Values, number: int) -> bool:
    names = (f"datasets.{number}.path", f"dataset_mixture.datasets.{number}.id")
    return any(name in values for name in names)


def _held_out(value: float, values: Values) -> dict[str, Any]:
    """The share of rows that is not trained on, of each source."""
    if not 0 < value < 1:
        raise NoCounterpart("a number of rows: prompts.held_out_share is a share")
    numbers = [number for number in range(_MAX_SETS) if _has(values, number)]
    return {f"prompts.{number}.held_out_share": value for number in numbers}


def _weight(value: float, _: Values) -> dict[str, Any]:
    if value != 1:
        raise NoCounterpart("a share of the rows: prompts.weight is the source's share of groups")
    return NOTHING


def _mixture(number: int) -> dict[str, Rule]:
    """The data set of a number in a mixture of TRL, or of open-r1."""
    place, ours, open_r1 = f"prompts.{number}", "datasets", "dataset_mixture.datasets"
    return {
        **_source(f"{ours}.{number}", place),
        **_source(f"{open_r1}.{number}", place, path="id", name="config"),
        f"{ours}.{number}.columns": _columns(place),
        f"{open_r1}.{number}.columns": _columns(place),
        f"{open_r1}.{number}.weight": _weight,
    }


def _script(section: str, place: str) -> dict[str, Rule]:
    """train_dataset or eval_dataset of a script."""
    return {
        **_source(section, place),
        f"{section}.shuffle(...)": lambda value, values: NOTHING,
        f"{section}.*": _MAPS,
        section: "write its file, or its name on the Hub, as prompts.path",
    }


def checks(values: Values) -> list[str]:
    """What a reader of our file must decide about its data."""
    if not _has(values, 1):
        return []
    return [joined("TRL")]


_MAPS = "map and filter are not run: prompts.template, prompts.columns and prompts.where do this"

RULES: dict[str, Rule] = {
    **_script("train_dataset", "prompts.0"),
    **_script("eval_dataset", "eval.sets.0.prompts"),
    **{key: rule for number in range(_MAX_SETS) for key, rule in _mixture(number).items()},
    "dataset_mixture.datasets.*": "write a [[prompts]] for it",
    "dataset_mixture.test_split_size": _held_out,
    "dataset_mixture.*": "run.seed seeds everything here",
    "datasets.*": "write a [[prompts]] for it",
    "test_split_size": _held_out,
    "dataset_prompt_column": _prompt_column,
    "dataset_configs": lambda value, values: _named("dataset_config")(
        value[0] if len(value) == 1 else value, values
    ),
    **{
        name: _named(name)
        for name in ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
    },
    **each("", "streaming dataset_streaming dataset_num_proc", "rows are read before the start"),
}
