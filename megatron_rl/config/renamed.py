"""Renamed keys: a refusal names the new key, and `megatron-rl config migrate` rewrites files."""

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from megatron_rl.config.errors import ConfigError
from megatron_rl.config.expert import EXPERT, public_key, with_expert

RENAMED = {
    "algorithm.credit": "algorithm.advantage_estimator",
    "algorithm.flat_groups": "algorithm.zero_variance_groups",
    "algorithm.surrogate": "algorithm.policy_loss",
    "hosts": "nodes",
    "ports.hosts": "ports.nodes",
    "replay.traces": "replay.datasets",
    "sft.control": "sft.baseline",
    "sft.traces": "sft.dataset",
    "generator.wait_for_publish": "generator.wait_for_weight_sync",
    "generator.shares_gpus": "generator.colocate",
    "reward.tasks.*.gate": "reward.tasks.*.format_check",
    "stages.*.train.groups_per_batch": "stages.*.train.prompts_per_batch",
    "train.groups_per_batch": "train.prompts_per_batch",
}
"""Former name -> present name, with as many parts; `*` matches any one part of a key.

Names are those of the checked tree: `new_name` adds `expert.` where it belongs.
"""

RENAMED_METRICS = {
    "queue/groups_dropped_flat": "queue/groups_dropped_zero_variance",
    "groups_dropped.flat": "groups_dropped.zero_variance",
    "control_accuracy": "sft_baseline_accuracy",
    "control_se": "sft_baseline_se",
    "rl_minus_control": "rl_minus_sft_baseline",
    "groups_dropped_flat": "groups_dropped_zero_variance",
    "publish_s_median": "weight_sync_s_median",
} | {
    f"publish/{name}": f"weight_sync/{name}"
    for name in (
        "damaged_parcels",
        "dropped_generators",
        "generators",
        "pause_s",
        "peak_extra_mb",
        "reclaim_s",
        "release_s",
        "s",
        "transfer_s",
        "wire_mb",
    )
}
"""Former -> present names in metrics.jsonl and summary.json."""

_HEADER = re.compile(r"^\s*\[\[?\s*([A-Za-z0-9_.\-]+)\s*\]\]?")
_ASSIGNMENT = re.compile(r"^(\s*)([A-Za-z0-9_.\-]+)(\s*=)")
_QUOTED_KEY = re.compile(r"^\s*\"([A-Za-z0-9_.]+)\"\s*=")
_OVERRIDE = re.compile(r"(?<=[\"'])([a-z_]+(?:\.[A-Za-z0-9_\-]+)+)(?==)")


def new_name(key: str) -> str:
    """The present name of a key; also moves keys to `[expert]`."""
    parts = key.split(".")
    for old, new in RENAMED.items():
        pattern = old.split(".")
        head = parts[: len(pattern)]
        if len(head) == len(pattern) and all(
            asked in ("*", given) for asked, given in zip(pattern, head, strict=True)
        ):
            named = [
                given if now == "*" else now
                for now, given in zip(new.split("."), head, strict=True)
            ]
            key = ".".join([*named, *parts[len(pattern) :]])
            break
    return public_key(key)


def migrate(text: str) -> tuple[str, list[str]]:
    """(the TOML text with present names, a line "old -> new" for each change).

    Tables, keys, and quoted overrides of sweeps ("section.key=value") change; comments and layout
    stay. Raises ConfigError for invalid TOML, and for a former name in an inline table, which the
    user must rewrite.
    """
    before = _parsed(text)
    changes: list[str] = []
    section: list[str] = []
    lines = []
    moved: dict[str, list[str]] = {}
    for line in _statements(text):
        if found := _HEADER.match(line):
            section = _of_list(found[1]).split(".")
            line = _replaced(line, found.span(1), found[1], changes, [])
        elif found := _QUOTED_KEY.match(line):
            line = _replaced(line, found.span(1), found[1], changes, [])
        elif found := _ASSIGNMENT.match(line):
            new = new_name(".".join([*section, found[2]]))
            if section and section[0] != EXPERT and new.startswith(f"{EXPERT}."):
                table, _, name = new.rpartition(".")
                changes.append(f"{'.'.join([*section, found[2]])} -> {new}")
                moved.setdefault(table, []).append(name + line[found.end(2) :].rstrip() + "\n")
                continue
            line = _replaced(line, found.span(2), found[2], changes, section)
        for found in reversed(list(_OVERRIDE.finditer(line))):
            line = _replaced(line, found.span(), found[1], changes, [])
        lines.append(line)
    migrated = "".join(_with_tables(lines, moved))
    # A table whose keys all moved stays, empty.
    if not _is_toml(migrated) or with_expert(_parsed(migrated)) != with_expert(
        _renamed(before, "")
    ):
        known = [f"{old} -> {public_key(new)}" for old, new in RENAMED.items()]
        raise ConfigError(
            "a former name stands where it cannot be rewritten safely, such as in an inline table: "
            f"replace by hand: {'; '.join(dict.fromkeys([*changes, *known]))}"
        )
    return migrated, changes


def _statements(text: str) -> Iterator[str]:
    """The headers, the keys with their values, and the other lines of a valid file, in turn."""
    begun = ""
    for line in text.splitlines(keepends=True):
        # The value of a key may have several lines.
        begun += line
        if _is_toml(begun):
            yield begun
            begun = ""


def _is_toml(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _with_tables(lines: list[str], moved: dict[str, list[str]]) -> list[str]:
    """The lines of a file with moved keys in their tables; missing tables are added."""
    for table, keys in moved.items():
        headers = [
            number
            for number, line in enumerate(lines)
            if (found := _HEADER.match(line)) and found[1] == table
        ]
        if headers:
            lines[headers[0] + 1 : headers[0] + 1] = keys
        else:
            lines += ["\n", f"[{table}]\n", *keys]
    return lines


def _parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"invalid TOML: {error}") from error


def _of_list(header: str) -> str:
    """Headers below `[[stages]]` belong to one item of that list."""
    first, _, rest = header.partition(".")
    return ".".join(filter(None, (first, "*", rest))) if first == "stages" else header


def _replaced(
    line: str, span: tuple[int, int], key: str, changes: list[str], section: list[str]
) -> str:
    full = ".".join([*section, key])
    if (new := new_name(full)) == full:
        return line
    changes.append(f"{full} -> {new}")
    own = ".".join(new.split(".")[len(section) :])
    return line[: span[0]] + own + line[span[1] :]


def _renamed(value: Any, key: str) -> Any:
    """The tree with present names."""
    if isinstance(value, dict):
        return {
            _last_part(f"{key}.{name}" if key else name, name): _renamed(
                inner, f"{key}.{name}" if key else name
            )
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [_renamed(item, f"{key}.{n}") for n, item in enumerate(value)]
    if isinstance(value, str) and "=" in value:
        name, _, rest = value.partition("=")
        return f"{new_name(name)}={rest}"
    return value


def _last_part(key: str, name: str) -> str:
    """Present name of a key in its table; a quoted name with dots is a whole key."""
    return new_name(name) if "." in name else new_name(key).rpartition(".")[2]
