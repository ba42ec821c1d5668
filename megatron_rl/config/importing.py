"""Writes our TOML for the settings of verl, TRL, prime-rl or slime (`megatron-rl config import`).

Each of their keys is in one of four lists: mapped, default here, no counterpart, unknown. Where
they have a default that differs from ours and the file does not give the key, theirs is written.
"""

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_rl.config.aliases import meant
from megatron_rl.config.derived import DEFAULT_PRESET, DERIVED
from megatron_rl.config.errors import ConfigError, printable
from megatron_rl.config.files import REQUIRED, load_config, resolve
from megatron_rl.config.foreign import prime, slime, trl, verl
from megatron_rl.config.foreign.rules import Nearest, NoCounterpart, Refused, Rule, rule_of
from megatron_rl.config.foreign.settings import PRIME, SLIME, TRL, VERL, Foreign, Unread
from megatron_rl.config.layers import Layers, leaves
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.reference import heading, tables, value_text
from megatron_rl.config.tree import Config

_TABLES = {VERL: verl, TRL: trl, PRIME: prime, SLIME: slime}
_IN_TURN = "they generate and train in turn; 2 keeps engines and trainer busy"
_ALWAYS: dict[str, dict[str, tuple[Any, str]]] = {
    VERL: {"queue.max_staleness": (0, _IN_TURN)},
    TRL: {
        "queue.max_staleness": (0, _IN_TURN),
        "algorithm.zero_variance_groups": ("keep", "they train on groups of one reward too"),
    },
}
_LISTS = ("prompts", "eval.sets")
_PROMPT_TOKENS = 1024
"""Room for a prompt, where a file tells only the length of completions."""
_WIDTH = 96
"""Columns of lists of their keys."""


@dataclass
class Imported:
    """Our settings, and the place of each key of theirs."""

    system: str
    values: dict[str, Any] = field(default_factory=dict)
    """Ours, by key; without those that are the default here."""
    origins: dict[str, list[str]] = field(default_factory=dict)
    """Our key -> theirs, or why it is there."""
    given: dict[str, str] = field(default_factory=dict)
    """Their key -> their value, as a text."""
    mapped: list[str] = field(default_factory=list)
    default_here: list[str] = field(default_factory=list)
    no_counterpart: dict[str, str] = field(default_factory=dict)
    """Their key -> why, and what to do."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Their key -> keys of ours whose name is near; empty: none is."""
    to_check: list[str] = field(default_factory=list)
    """What the file cannot tell, and where ours differs."""
    refused: list[str] = field(default_factory=list)
    """Their keys of objectives that are not here: there is nothing to write. Empty: none."""
    fault: str = ""
    """What does not hold, for `load_config`; empty: it loads."""

    def toml(self) -> str:
        """The file: tables, then lists of their keys as comments."""
        lines = [f"# From settings of {self.system}, by `megatron-rl config import`."]
        if self.fault:
            lines += ["# It does not load yet:", *_comments(self.fault.splitlines())]
        for section, keys in groupby(sorted(self.values, key=_place), key=_section):
            lines += ["", heading(section)]
            for key in keys:
                name = key.rpartition(".")[2]
                text = f"{name} = {value_text(self.values[key])}"
                lines.append(f"{text:29} # {printable(', '.join(self.origins[key]))}")
        missing = [f"{k}: give {v}" for k, v in REQUIRED.items() if k not in self.values]
        if not any(key.startswith("prompts.") for key in self.values):
            missing.append("[[prompts]]: give path, a file or the name of a data set of the Hub")
        for title, found in (
            ("To add", missing),
            ("To check", self.to_check),
            ("Default here, of the run or its preset", self._wrapped(self.default_here, "")),
            ("No counterpart", self._by_reason(self.no_counterpart)),
            ("Unknown, not taken over", self._by_reason(self.unknown)),
        ):
            if found:
                lines += ["", f"# {title}:", *_comments(found)]
        return "\n".join(lines) + "\n"

    def _by_reason(self, reasons: dict[str, str]) -> list[str]:
        """Lines of keys, those with the same reason together."""
        lines: list[str] = []
        for reason in dict.fromkeys(reasons.values()):
            keys = [key for key, why in reasons.items() if why == reason]
            if len(keys) > 1 and reason:
                lines += [f"{reason}:", *self._wrapped(keys, "  ")]
            else:
                lines += [f"{key} = {self.given[key]}{reason and ': '}{reason}" for key in keys]
        return lines

    def _wrapped(self, keys: list[str], indent: str) -> list[str]:
        """Lines of keys with their values."""
        lines: list[str] = []
        for pair in (f"{key} = {self.given[key]}" for key in keys):
            if lines and len(lines[-1]) + len(pair) < _WIDTH:
                lines[-1] += f"; {pair}"
            else:
                lines.append(indent + pair)
        return lines


def import_settings(foreign: Foreign) -> Imported:
    """Ours for theirs; says in `fault` what `load_config` refuses."""
    found = Imported(foreign.system)
    table = _TABLES[foreign.system]
    plain = {_plain(key, foreign.system): key for key in reversed(foreign.values)}
    rules = table.RULES
    defaults = verl.defaults(plain) if foreign.system == VERL else table.DEFAULTS
    values = defaults | {name: foreign.values[key] for name, key in plain.items()}
    known = {key: v for key, v in values.items() if not isinstance(v, Unread)}
    taken: dict[str, list[str]] = {}
    for key, value in foreign.values.items():
        rule = rule_of(rules, _plain(key, foreign.system)) or _rule_below(rules, key, value)
        found.given[key] = _shown(value)
        if rule is None and value is not None:
            found.unknown[key] = _hint(key)
        elif isinstance(value, Unread):
            reason = f"; {rule}" if isinstance(rule, str) else ""
            found.no_counterpart[key] = f"{value.why}{reason}"
        else:
            try:
                taken[key] = _take(found, rule, value, known, key)
            except NoCounterpart as error:
                found.no_counterpart[key] = str(error)
                _note_refusal(found, error)
    for key, value in defaults.items():
        if key not in plain:
            _take_default(found, rules[key], value, known, key)
    for key, (value, why) in _ALWAYS.get(foreign.system, {}).items():
        if why != _IN_TURN or not any(name.startswith("async_training.") for name in plain):
            _put(found, {key: value}, why)
    _make_room(found)
    found.to_check += [*table.checks(known, found.values), *_left_to_preset(found)]
    _drop_defaults(found)
    for key, ours in taken.items():
        if any(one in found.values for one in ours):
            found.mapped.append(key)
        else:
            found.default_here.append(key)
    found.fault = "\n".join(found.refused) or _fault(found)
    return found


def _plain(key: str, system: str) -> str:
    """The key in the table."""
    return prime.plain(key) if system == PRIME else key


def _rule_below(rules: Mapping[str, Rule], key: str, value: Any) -> Rule | None:
    """The rule of an empty table's keys."""
    return rule_of(rules, f"{key}.") if value == {} else None


def _take(
    found: Imported, rule: Rule | None, value: Any, known: Mapping[str, Any], key: str
) -> list[str]:
    """Put a key's values among ours; returns our keys. Raises NoCounterpart."""
    if value is None or (not callable(rule) and value in ({}, [])):
        # Not given there either.
        return []
    if rule is None or isinstance(rule, str):
        raise NoCounterpart(rule or "")
    try:
        ours = rule(value, known)
    except NoCounterpart:
        raise
    except KeyError as error:
        raise NoCounterpart(f"needs {error.args[0]}, whose value is not known") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise NoCounterpart(f"the value has an unexpected form ({error})") from error
    _note(found, ours)
    return _put(found, ours, key)


def _note_refusal(found: Imported, error: ValueError | KeyError | TypeError) -> None:
    """Add the text of a refusal, once for all keys that a rule combines."""
    if isinstance(error, Refused) and str(error) not in found.refused:
        found.refused.append(str(error))


def _note(found: Imported, ours: dict[str, Any]) -> None:
    """Say what differs, once for all keys that a rule combines."""
    if isinstance(ours, Nearest) and ours.differs not in found.to_check:
        found.to_check.append(ours.differs)


def _put(found: Imported, ours: dict[str, Any], origin: str) -> list[str]:
    flat: dict[str, Any] = {}
    for key, value in ours.items():
        flat.update(leaves(value, key) if key in _LISTS else [(key, value)])
    for key, value in flat.items():
        if not _is_plain(value):
            raise NoCounterpart(f"write {key} yourself: it takes plain values")
        if key in found.values and found.values[key] != value:
            raise NoCounterpart(
                f"{found.origins[key][0]} gives {key} = {value_text(found.values[key])} already"
            )
    for key, value in flat.items():
        found.values[key] = value
        found.origins.setdefault(key, []).append(origin)
    return list(flat)


def _is_plain(value: Any) -> bool:
    """Whether a value can stand in one line of TOML, also a hostile file's."""
    if isinstance(value, dict):
        return all(
            re.fullmatch(r"[A-Za-z0-9_-]+", str(k)) and _is_plain(v) for k, v in value.items()
        )
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, str | int | float)


def _take_default(
    found: Imported, rule: Rule, value: Any, known: Mapping[str, Any], key: str
) -> None:
    """Their default, where the file does not say otherwise."""
    try:
        ours = rule(value, known) if not isinstance(rule, str) else {}
    except (KeyError, TypeError, ValueError) as error:
        _note_refusal(found, error)
        # What it belongs to is not as they have it, and is named where it was given.
        return
    _note(found, ours)
    origin = f"{key} is not given: the default of {found.system}"
    _put(found, {k: v for k, v in ours.items() if k not in found.values}, origin)


def _make_room(found: Imported) -> None:
    """A context for the longest completion, where they take the model's own context."""
    keys = ("sampling.max_new_tokens", "eval.max_new_tokens")
    longest = max((v for k in keys if isinstance(v := found.values.get(k), int)), default=0)
    usual = resolve(Layers()).generator.context_tokens
    if "generator.context_tokens" not in found.values and longest >= usual:
        why = f"not given: the longest completion, and {_PROMPT_TOKENS} tokens of prompt"
        _put(found, {"generator.context_tokens": longest + _PROMPT_TOKENS}, why)
        found.to_check.append(
            f"generator.context_tokens: not given; with {longest + _PROMPT_TOKENS}, prompts of "
            f"more than {_PROMPT_TOKENS} tokens are left out"
        )


def _drop_defaults(found: Imported) -> None:
    """Leave out what a run does anyway, with the preset that was chosen."""
    layers = Layers()
    if preset := found.values.get("algorithm.preset"):
        layers.tree["algorithm"] = {"preset": preset}
    base = resolve(layers).model_dump(mode="json")
    # What a derived key follows from may have changed too.
    kept = {
        *REQUIRED,
        *DERIVED,
        *([] if preset in (None, DEFAULT_PRESET) else ["algorithm.preset"]),
    }
    ours = {key: value for key, value in leaves(base, "") if key not in kept}
    for key, value in list(found.values.items()):
        if key in ours and (type(value) is bool, value) == (type(ours[key]) is bool, ours[key]):
            del found.values[key], found.origins[key]


def _left_to_preset(found: Imported) -> list[str]:
    """Notes on values that the preset alone gives, because the file does not tell theirs."""
    preset = PRESETS[found.values.get("algorithm.preset", DEFAULT_PRESET)].values
    unread = ["algorithm.reference."]
    if found.values.get("algorithm.kl.placement") == "none":
        unread.append("algorithm.kl.")
    if found.values.get("algorithm.policy_loss.name") == "reinforce":
        unread.append("algorithm.policy_loss.")
    return [
        f"{key}: {value_text(value)} is of the preset; the file does not tell theirs"
        for key, value in (leaves(preset, "algorithm") if preset else ())
        if key not in found.values and not key.startswith(tuple(unread))
    ]


def _fault(found: Imported) -> str:
    known = {entry.key for table in tables() for entry in table.entries}
    assert all(_generic(key) in known for key in found.values), found.values
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "imported.toml"
        path.write_text(found.toml())
        try:
            load_config(path)
        except ConfigError as error:
            return str(error)
    return ""


def _generic(key: str) -> str:
    return ".".join("0" if part.isdigit() else part for part in key.split("."))


def _hint(key: str) -> str:
    known = [entry.key for table in tables() for entry in table.entries]
    near = meant(key, known)
    return f"{' or '.join(near)} may be meant" if near else ""


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _place(key: str) -> tuple[int, list[tuple[int, str]]]:
    """Order of the tree; a table before its subtables."""
    section = _section(key)
    first = section.partition(".")[0]
    parts = [(int(p), "") if p.isdigit() else (0, p) for p in section.split(".")]
    return list(Config.model_fields).index(first), parts


def _shown(value: Any) -> str:
    text = value.text if isinstance(value, Unread) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _comments(lines: list[str]) -> list[str]:
    return [f"#   {printable(line.rstrip())}" for line in lines]
