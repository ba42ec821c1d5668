"""Values of Python expressions, without running them. Used by `shell.py` and `script.py`."""

import ast
import operator
from typing import Any

from megatron_rl.config.foreign.settings import MAX_NUMBER, WHY, Unread

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def parsed(text: str) -> ast.expr | None:
    """The expression of a text; None: it is none."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def value_of(node: ast.expr, names: dict[str, Any]) -> Any:
    """The value of literals, of names, and of sums of numbers; else an Unread."""
    match node:
        case ast.Constant(value=value) if isinstance(value, str | int | float | None):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            found = [value_of(item, names) for item in items]
            return next((item for item in found if isinstance(item, Unread)), found)
        case ast.Dict(keys=keys, values=values) if all(keys):
            both = zip(filter(None, keys), values, strict=True)
            pairs = [(value_of(key, names), value_of(value, names)) for key, value in both]
            unread = [one for pair in pairs for one in pair if isinstance(one, Unread)]
            return unread[0] if unread else {str(key): value for key, value in pairs}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = value_of(operand, names)
            return -value if isinstance(value, int | float) else Unread(ast.unparse(node), WHY)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            pair = [value_of(left, names), value_of(right, names)]
            if pair[1] and all(
                isinstance(one, int | float) and abs(one) < MAX_NUMBER for one in pair
            ):
                return _OPERATORS[type(op)](*pair)
        case ast.Call(func=ast.Attribute(attr="from_pretrained"), args=[first, *_]):
            return value_of(first, names)
    return Unread(ast.unparse(node), WHY)
