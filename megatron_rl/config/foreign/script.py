"""Reads the settings of a Python script of TRL, without running it. Used by `read.py`."""

import ast
from pathlib import Path
from typing import Any

from megatron_rl.config.errors import InputError
from megatron_rl.config.foreign.expression import value_of
from megatron_rl.config.foreign.settings import TRL, WHY, Foreign, Unread

PROGRAMS = ("environment_factory", "tools", "rollout_func")
"""Arguments of GRPOTrainer that are code for several turns."""
_DATA_ARGUMENTS = ("path", "name", "data_dir", "data_files", "split")


def trl_script(path: Path, text: str) -> Foreign:
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
            self._known[node] = value_of(node, names)
        return self._known[node]

    def add(self, values: dict[str, Any], name: str, key: ast.keyword, call: ast.Call) -> None:
        """Put a keyword of GRPOConfig or GRPOTrainer among the values."""
        if key.arg is None:
            values[f"**{ast.unparse(key.value)}"] = Unread("**", WHY)
        elif key.arg in ("train_dataset", "eval_dataset"):
            self.add_data(values, key.arg, key.value, call.lineno)
        elif key.arg in ("reward_funcs", "peft_config", *PROGRAMS):
            values[key.arg] = ast.unparse(key.value)
        elif not (name == "GRPOTrainer" and key.arg == "args"):
            values[key.arg] = self.value(key.value, call.lineno)
        elif not self._is_config(key.value, call.lineno):
            values["args"] = Unread(ast.unparse(key.value), WHY)

    def _is_config(self, node: ast.expr, line: int) -> bool:
        """Whether an expression is GRPOConfig(...), or a name of it."""
        found = self.latest(node.id, line) if isinstance(node, ast.Name) else None
        if found:
            node = found[1]
        return isinstance(node, ast.Call) and _name(node.func) == "GRPOConfig"

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
                values[key] = Unread(ast.unparse(node), WHY)
                return


def _attribute(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else _attribute(node)
