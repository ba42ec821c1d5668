"""Messages of rows as plain turns of text: contents in parts, messages written as JSON text.

Pure; used by all readers of rows.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from megatron_rl.data.tables.plain_values import BadTests, read_literal
from megatron_rl.protocol.prompt import NotText, text_of_parts

_ROLES = {"developer": "system"}
"""Roles of requests -> roles that chat templates know."""
_CALLS = ("tool_calls", "function_call")
_OFFERS = ("tools", "functions")
_TOOL_KEYS = {"function", "name", "type"}
"""A list of objects without any of these is a column of another meaning."""
_INSTEAD = (
    "An environment can offer tools (reward.tasks.NAME.environment, docs/agents.md), and SFT "
    "examples may have them (sft.dataset)"
)


class HasTools(NotText):
    """A row has tools or calls, which prompts cannot have."""

    reason = "tools"


def plain_turns(value: Any, *, drops_calls: bool = False) -> Any:
    """Messages with role and text content alone; any other value unchanged. Raises NotText.

    drops_calls: for a look at the text alone. Templates leave earlier thoughts out themselves.
    """
    turns = _from_json(value) if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns:
        return value
    if all(isinstance(turn, Mapping) and "role" in turn for turn in turns):
        for number, turn in enumerate(turns if not drops_calls else ()):
            if called := next((key for key in _CALLS if turn.get(key)), ""):
                raise HasTools(
                    f"message {number} has {called!r}, which prompts cannot have: write the call "
                    f"into its content as the model writes calls, or leave the row out. {_INSTEAD}"
                )
        return [_plain_turn(turn) for turn in turns]
    if all(isinstance(turn, Mapping) and "type" in turn for turn in turns):
        return [{"role": "user", "content": text_of_parts(turns)}]
    return value


def refuse_tools(fields: Mapping[str, Any]) -> None:
    """Raise HasTools for a row that offers tools."""
    request = fields.get("responses_create_params")
    for row in (fields, request if isinstance(request, Mapping) else {}):
        for key in _OFFERS:
            if _are_tools(row.get(key)):
                raise HasTools(
                    f"{key!r} offers tools, and prompts are rendered without tools: describe them "
                    f"in a system message and remove the key, or leave the row out. {_INSTEAD}"
                )


def _are_tools(value: Any) -> bool:
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return False
    tools = value if isinstance(value, list) else []
    # Hosted tools, as {"type": "web_search"}, have no other key.
    return any(isinstance(one, Mapping) and _TOOL_KEYS & one.keys() for one in tools)


def _from_json(text: str) -> Any:
    """The messages that a text holds as JSON, or as repr() writes them; None for other texts."""
    if not text.lstrip().startswith("[") or not ('"role"' in text or "'role'" in text):
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    try:
        return read_literal(text, "no literal")
    except BadTests:
        return None


def _plain_turn(turn: Mapping[str, Any]) -> dict[str, Any]:
    role = turn["role"]
    found = {"role": _ROLES.get(role, role) if isinstance(role, str) else role}
    if "content" in turn:
        found["content"] = _plain_content(turn["content"])
    return found


def _plain_content(content: Any) -> Any:
    if isinstance(content, Mapping):
        return text_of_parts([content])
    return text_of_parts(content) if isinstance(content, list) else content
