"""Reads the settings of a verl command line, a TRL script or YAML, and prime-rl TOML files.

Used by `importing.py`. Nothing of a file is executed: shell words, Python's syntax tree, YAML's
plain types and TOML are read as data. A value that only a program could tell is an `Unread`.
"""

import ast
import operator
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.layers import leaves

VERL, TRL, PRIME = "verl", "TRL", "prime-rl"
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"\s*([A-Za-z_]\w*)=\(")
_TOKEN = re.compile(
    r"""(?P<array>"?\$\{(?P<list>\w+)\[@\]\}"?)|(?P<double>"(?:[^"\\]|\\.)*")|(?P<single>'[^']*')"""
    r"""|(?P<escape>\\.)|(?P<comment>(?:^|(?<=\s))\#[^\n]*)|(?P<arguments>"?\$[@*]"?)"""
    r"""|(?P<value>\$\(\([^\n]{0,200}?\)\)|\$\([^()\n]*\)|\$\{[^}\n]{0,500}\}|\$\w+)""",
    re.VERBOSE | re.DOTALL,
)
_VALUE = re.compile(
    r"\$\(\((?P<sum>[^\n]{0,200}?)\)\)|\$\{(?P<name>\w{1,100})(?::?-(?P<default>[^}]{0,400}))?\}|\$(?P<plain>\w+)"
)
_OPEN = re.compile(r"\$[({\w][^/'\" ,\]]*|`[^`]*`")
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
# Limits for files that grow without end: a variable that holds another one twice, and so on.
_MAX_CHARACTERS, _MAX_VALUE, _MAX_WORDS, _MAX_NUMBER = 200_000, 4096, 10_000, 1e15
_DATA_ARGUMENTS = ("path", "name", "data_dir", "data_files", "split")


@dataclass(frozen=True)
class Unread:
    """A value that the file does not tell."""

    text: str
    why: str


@dataclass
class Foreign:
    """Settings of another system."""

    system: str
    values: dict[str, Any] = field(default_factory=dict)
    """By their key there. Keys of several prime-rl files: FILE: KEY."""


def read_foreign(paths: Sequence[Path]) -> Foreign:
    """The settings of one script or YAML, or of one or several TOML files. Raises InputError."""
    try:
        return _read({path: _text(path) for path in paths})
    except RecursionError as error:
        raise InputError(f"{paths[0]}: its values are nested too deeply") from error


def _read(texts: dict[Path, str]) -> Foreign:
    paths = list(texts)
    if all(path.suffix == ".toml" for path in paths):
        return _prime(texts)
    if len(paths) > 1:
        raise InputError("several files are read only where all are TOML of prime-rl: name one")
    [(path, text)] = texts.items()
    if path.suffix == ".py":
        return _trl_script(path, text)
    if path.suffix in (".yaml", ".yml"):
        return _trl_yaml(path, text)
    return _verl(path, text)


def _text(path: Path) -> str:
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text: {error}") from error
    if len(text) > _MAX_CHARACTERS:
        raise InputError(f"{path} has {len(text)} characters; at most {_MAX_CHARACTERS} are read")
    return text


def _prime(texts: dict[Path, str]) -> Foreign:
    found = Foreign(PRIME)
    for path, text in texts.items():
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is no valid TOML: {error}") from error
        prefix = f"{path.stem}: " if len(texts) > 1 else ""
        found.values |= {prefix + key: value for key, value in leaves(tree, "") if key}
    return found


def _verl(path: Path, text: str) -> Foreign:
    """The arguments of the last command that starts verl's trainer."""
    words: list[str] = []
    for line in _commands(path, text.replace("\\\n", " ")):
        places = [n for n, word in enumerate(line) if _starts_verl(word)]
        if places:
            words = line[places[0] + 1 :]
    if not words:
        raise InputError(
            f"{path} holds no command of verl (python3 -m verl.trainer.main_ppo key=value ...); a "
            "script of TRL ends in .py or .yaml, a file of prime-rl in .toml"
        )
    found = Foreign(VERL)
    for word in words:
        if word in ("|", "&", ";", "&&", "||"):
            break
        key, separator, value = word.partition("=")
        if key.startswith(("~", "--")):
            found.values[key] = Unread(value, "options of Hydra are not read")
        elif separator:
            found.values[key.lstrip("+")] = _hydra(value)
    return found


def _starts_verl(word: str) -> bool:
    """Whether a word is verl.trainer.main_ppo, or another main module or file of verl."""
    module = word.removesuffix(".py").replace("/", ".").lstrip(".")
    return module.startswith(("verl.", "recipe.")) and module.rpartition(".")[2].startswith("main_")


def _commands(path: Path, text: str) -> Iterator[list[str]]:
    """The words of each line, with the variables that earlier lines assign."""
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
            if "main_" in line:
                raise InputError(f"{path}: cannot read {line.strip()[:80]!r}: {error}") from error
            continue
        if array:
            inner = _expanded(line, values, lists)[array.end() :].rstrip().removesuffix(")")
            lists[array[1]] = shlex.split(inner)
            if len(lists[array[1]]) > _MAX_WORDS:
                raise InputError(f"{path}: the list {array[1]} has more than {_MAX_WORDS} words")
            continue
        yield words
        if words and words[0] in ("export", "declare", "local", "readonly"):
            words = words[1:]
        for word in words:
            if (assigned := _ASSIGNED.fullmatch(word)) is None:
                break
            values[assigned[1]] = assigned[2].rstrip(";")
            if len(values[assigned[1]]) > _MAX_VALUE:
                raise InputError(
                    f"{path}: the value of {assigned[1]} has more than {_MAX_VALUE} characters"
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
        if found["comment"] or found["arguments"]:
            return ""
        if keep:
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
            names = {name: _hydra(value) for name, value in values.items()}
            parsed = _parsed(found["sum"].replace("$", "").replace("/", "//"))
            value = str(_value(parsed, names)) if parsed is not None else found[0]
            return found[0] if value.startswith("Unread") else value
        value = values.get(found["name"] or found["plain"], found["default"])
        value = found[0] if value is None else value
        return value.replace("\\", "\\\\").replace('"', '\\"') if escape else value

    for _ in range(3):  # A default may name a variable.
        text, before = _VALUE.sub(replaced, text), text
        if text == before or len(text) > _MAX_CHARACTERS:
            break
    return text


def _hydra(text: str) -> Any:
    """The value of a word of Hydra."""
    plain = text.strip()
    if unset := _OPEN.search(plain):
        return Unread(plain, f"{unset[0]} has no value in this file")
    if plain.startswith("[") and plain.endswith("]"):
        return [_hydra(item) for item in plain[1:-1].split(",") if item.strip()]
    if plain[:1] in "'\"" and plain[:1] == plain[-1:]:
        return plain[1:-1]
    if plain.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(plain.lower())
    return _number(plain)


def _number(text: str) -> Any:
    """The number that a text is, else the text."""
    for kind in (int, float):
        try:
            return kind(text) if any(map(str.isdigit, text)) else text
        except ValueError:
            continue
    return text


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of literals, of names, and of sums of numbers; else an Unread."""
    match node:
        case ast.Constant(value=value) if isinstance(value, str | int | float | None):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            found = [_value(item, names) for item in items]
            return next((item for item in found if isinstance(item, Unread)), found)
        case ast.Dict(keys=keys, values=values) if all(keys):
            both = zip(filter(None, keys), values, strict=True)
            pairs = [(_value(key, names), _value(value, names)) for key, value in both]
            unread = [one for pair in pairs for one in pair if isinstance(one, Unread)]
            return unread[0] if unread else {str(key): value for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = _value(operand, names)
            return -value if isinstance(value, int | float) else Unread(ast.unparse(node), _WHY)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            pair = [_value(left, names), _value(right, names)]
            if pair[1] and all(
                isinstance(one, int | float) and abs(one) < _MAX_NUMBER for one in pair
            ):
                return _OPERATORS[type(op)](*pair)
        case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[first, *_]):
            return _value(first, names)
    return Unread(ast.unparse(node), _WHY)


_WHY = "the file is read, not run, and does not tell this value"


def _trl_yaml(path: Path, text: str) -> Foreign:
    import yaml

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise InputError(f"{path} has aliases (*name), which are not read: write the values")
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise InputError(f"{path} holds no settings: expected a YAML of `trl grpo --config`")
    # YAML takes 1e-6 for a text.
    return Foreign(TRL, {str(k): _number(v) if isinstance(v, str) else v for k, v in tree.items()})


def _trl_script(path: Path, text: str) -> Foreign:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no valid Python: {error}") from error
    script = _Script(tree)
    found = Foreign(TRL)
    for name in ("GRPOConfig", "GRPOTrainer"):
        for call in script.calls(name):
            for key in call.keywords:
                script.add(found.values, name, key, call)
            if name == "GRPOTrainer" and call.args:
                found.values["model"] = script.value(call.args[0], call.lineno)
    if not found.values:
        raise InputError(f"{path} holds neither GRPOConfig(...) nor GRPOTrainer(...) with keywords")
    if "train_dataset.path" not in found.values and len(loads := script.calls("load_dataset")) == 1:
        found.values.pop("train_dataset", None)
        script.add_data(found.values, "train_dataset", loads[0], loads[0].lineno + 1)
    return found


class _Script:
    """Names and calls of a Python file."""

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        self._calls = [node for node in nodes if isinstance(node, ast.Call)]
        self._assigned: dict[str, list[tuple[int, ast.expr]]] = {}
        self._known: dict[ast.expr, Any] = {}
        for node in nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._assigned.setdefault(node.targets[0].id, []).append((node.lineno, node.value))

    def calls(self, name: str) -> list[ast.Call]:
        """Calls of a function, also as module.function."""
        return [c for c in self._calls if name in (getattr(c.func, "id", ""), _attribute(c.func))]

    def latest(self, name: str, line: int) -> tuple[int, ast.expr] | None:
        """The latest assignment above a line."""
        above = [one for one in self._assigned.get(name, []) if one[0] < line]
        return max(above, key=lambda one: one[0], default=None)

    def value(self, node: ast.expr, line: int) -> Any:
        """The value of an expression, with what its names were assigned above the line."""
        if node not in self._known:
            names = {}
            for one in ast.walk(node):
                if isinstance(one, ast.Name) and (found := self.latest(one.id, line)):
                    value = self.value(found[1], found[0])
                    if isinstance(node, ast.Name) or not isinstance(value, list | dict):
                        names[one.id] = value
            self._known[node] = _value(node, names)
        return self._known[node]

    def add(self, values: dict[str, Any], name: str, key: ast.keyword, call: ast.Call) -> None:
        """Put a keyword of GRPOConfig or GRPOTrainer among the values."""
        if key.arg is None:
            values[f"**{ast.unparse(key.value)}"] = Unread("**", _WHY)
        elif key.arg in ("train_dataset", "eval_dataset"):
            self.add_data(values, key.arg, key.value, call.lineno)
        elif key.arg in ("reward_funcs", "peft_config"):
            values[key.arg] = ast.unparse(key.value)
        elif not (name == "GRPOTrainer" and key.arg == "args"):
            values[key.arg] = self.value(key.value, call.lineno)

    def add_data(self, values: dict[str, Any], key: str, node: ast.expr, line: int) -> None:
        """Follow a data set to its load_dataset(...)."""
        while True:
            if isinstance(node, ast.Name) and (found := self.latest(node.id, line)):
                line, node = found
            elif isinstance(node, ast.Subscript):
                values[f"{key}.split"] = self.value(node.slice, line)
                node = node.value
            elif isinstance(node, ast.Call) and _name(node.func) == "load_dataset":
                given = dict(zip(_DATA_ARGUMENTS, node.args, strict=False))
                given |= {str(one.arg): one.value for one in node.keywords}
                for name, one in given.items():
                    values[f"{key}.{name}"] = self.value(one, line)
                return
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                values[f"{key}.{node.func.attr}(...)"] = ast.unparse(node)
                node = node.func.value
            else:
                values[key] = Unread(ast.unparse(node), _WHY)
                return


def _attribute(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else _attribute(node)
