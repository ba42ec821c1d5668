"""Reads the commands of a shell script, without running it. Used by `read.py` and `hydra.py`.

Variables, lists and sums that earlier lines assign are filled in. A variable without a value
stays as it is.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.foreign.expression import parsed, value_of
from megatron_rl.config.foreign.settings import MAX_CHARACTERS, MAX_VALUE, MAX_WORDS, word_value

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)=\(")
# One level of braces, or of parentheses, inside.
_BRACED = r"(?:[^{}\n]|\{[^{}\n]*\})"
_SUM = r"(?:[^()\n]|\([^()\n]*\)){0,200}"
_TOKEN = re.compile(
    r"""(?P<array>"?\$\{(?P<list>\w+)\[@\]\}"?)|(?P<double>"(?:[^"\\]|\\.)*")|(?P<single>'[^']*')"""
    r"""|(?P<escape>\\.)|(?P<comment>(?:^|(?<=\s))\#[^\n]*)|(?P<arguments>"?\$[@*]"?)"""
    rf"""|(?P<value>\$\(\({_SUM}\)\)|\$\([^()\n]*\)|\$\{{{_BRACED}{{0,500}}\}}|\$\w+)""",
    re.VERBOSE | re.DOTALL,
)
_VALUE = re.compile(
    rf"\$\(\((?P<sum>{_SUM})\)\)|\$(?P<plain>\w+)"
    rf"|\$\{{(?P<name>\w{{1,100}})(?::?[-=](?P<default>{_BRACED}{{0,400}}))?\}}"
)


def commands(path: Path, text: str) -> Iterator[list[str]]:
    """The words of each line, with the variables that earlier lines assign."""
    text = text.replace("\\\n", " ")
    values: dict[str, str] = {"HOME": str(Path.home())}
    lists: dict[str, list[str]] = {}
    lines = iter(text.splitlines())
    for line in lines:
        array = _ARRAY.match(line)
        if array:
            line += _rest_of_list(path, line, lines)
        try:
            words = shlex.split(_expanded(line, values, lists))
        except ValueError as error:
            if "main_" in line or "train.py" in line:
                raise InputError(f"{path}: cannot read {line.strip()[:80]!r}: {error}") from error
            continue
        if array:
            inner = _expanded(line, values, lists)[array.end() :].rstrip().removesuffix(")")
            lists[array[1]] = shlex.split(inner)
            if len(lists[array[1]]) > MAX_WORDS:
                raise InputError(f"{path}: the list {array[1]} has more than {MAX_WORDS} words")
            continue
        yield words
        if words and words[0] in ("export", "declare", "local", "readonly"):
            words = words[1:]
        for word in words:
            if (assigned := _ASSIGNED.fullmatch(word)) is None:
                break
            values[assigned[1]] = assigned[2].rstrip(";")
            if len(values[assigned[1]]) > MAX_VALUE:
                raise InputError(
                    f"{path}: the value of {assigned[1]} has more than {MAX_VALUE} characters"
                )


def _rest_of_list(path: Path, line: str, lines: Iterator[str]) -> str:
    """The lines up to the one that closes a list."""
    rest = [""]
    while ")" not in _expanded(line, {}, {}, keep=True):
        following = next(lines, None)
        if following is None:
            raise InputError(f"{path}: the list {line.strip()[:40]!r} has no end")
        rest.append(line := following)
    return "\n".join(rest)


def _expanded(
    line: str, values: dict[str, str], lists: dict[str, list[str]], *, keep: bool = False
) -> str:
    """The line with its variables' values, quoted, and without comments.

    keep: leave out quoted texts and variables instead.
    """

    def replaced(found: re.Match[str]) -> str:
        text = found[0]
        if keep or found["comment"] or found["arguments"]:
            return ""
        if found["array"]:
            name = found["list"]
            return " ".join(map(shlex.quote, lists[name])) if name in lists else text
        if found["double"]:
            inner = _filled(text[1:-1], values, escape=True)
            return f'"{inner}"'
        return shlex.quote(_filled(text, values)) if found["value"] else text

    return _TOKEN.sub(replaced, line)


def _filled(text: str, values: dict[str, str], *, escape: bool = False) -> str:
    """The text with its variables' values; a variable that has none stays."""

    def replaced(found: re.Match[str]) -> str:
        if found["sum"] is not None:
            names = {name: word_value(value) for name, value in values.items()}
            total = parsed(found["sum"].replace("$", "").replace("/", "//"))
            value = str(value_of(total, names)) if total is not None else found[0]
            return found[0] if value.startswith("Unread") else value
        default = found["default"]
        if default and default[0] == default[-1] and default[0] in "'\"":
            default = default[1:-1]
        value = values.get(found["name"] or found["plain"], default)
        value = found[0] if value is None else value
        return value.replace("\\", "\\\\").replace('"', '\\"') if escape else value

    for _ in range(3):  # A default may name a variable.
        text, before = _VALUE.sub(replaced, text), text
        if text == before or len(text) > MAX_CHARACTERS:
            break
    return text
