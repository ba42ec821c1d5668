"""Environments of an OpenEnv server, as episodes.

Runs in the environment's process, whose interpreter needs the package `openenv` (0.10.0 or later):
`expert.environments.python`. The fork server imports it before it forks.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from verification.environments.opening import import_client
from verification.environments.outcome_check import BadOutcome
from verification.environments.policy import EpisodeInput, Outcome, Policy
from verification.environments.text_game import MAX_TURNS, text_game_episode

_INVALID = "(code: VALIDATION_ERROR)"
"""How the client words an action that the server's schema refuses."""
_SCHEMA_TIMEOUT_S = 10
_NOT_TOLD = {"done", "reward"}
"""Fields of every observation's schema that its message has elsewhere."""


def open_env_episode(
    url: str,
    *,
    action: str | Callable[[str], Mapping[str, Any]],
    observation: str | Callable[[Mapping[str, Any]], str] = "",
    max_turns: int = MAX_TURNS,
    max_tokens: int | None = None,
) -> Callable[[EpisodeInput, Policy], Coroutine[Any, Any, Outcome]]:
    """Episode on a running OpenEnv server. Each episode has its own session; rewards are summed.

    The server is reset with the prompt's seed, and with the values of a prompt whose `entry` is a
    JSON object. It must allow as many sessions as conversations are open (`max_concurrent_envs`).

    url: such as "http://127.0.0.1:8000". action: field of the action that is the policy's text, or
    the action for a text. An action that the server's schema refuses, or that cannot be made
    (ValueError), ends the episode with reason "invalid_action". observation: field that the policy
    is told, or the text to tell; "": the whole observation as JSON. The rest is as for
    `text_game_episode`.

    Fields that the server's schemas lack are the user's fault: the load raises ValueError if the
    server answers by then, and else the episode. An episode whose every reward was null has none:
    it fails. The server sends null for NaN and infinity too.
    """

    async def episode(prompt: EpisodeInput, policy: Policy) -> Outcome:
        from openenv.core.generic_client import GenericEnvClient

        # The episode's own limits end it: expert.environments.turn_timeout_s.
        async with GenericEnvClient(base_url=url, message_timeout_s=None) as client:
            session = _Session(client, url, action, observation)
            play = text_game_episode(lambda: session, max_turns=max_turns, max_tokens=max_tokens)
            return await play(prompt, policy)

    def prepare() -> None:
        import_client("openenv.core.generic_client", "openenv, 0.10 or later,")
        if fault := _find_fault(_ask_schemas(url), action, observation):
            raise ValueError(fault)

    # For the fork server.
    episode.__dict__["prepare"] = prepare
    return episode


class _Session:
    """A session of the server as a text game."""

    def __init__(
        self,
        client: Any,
        url: str,
        action: str | Callable[[str], Mapping[str, Any]],
        observation: str | Callable[[Mapping[str, Any]], str],
    ) -> None:
        self._client, self._url = client, url
        self._action, self._observation = action, observation
        self._has_reward = False

    async def reset(self, seed: int, prompt: EpisodeInput) -> str:
        values = prompt.entry if isinstance(prompt.entry, dict) else {}
        result = await self._client.reset(**{"seed": seed, **values})
        return self._told(result.observation)

    async def step(self, text: str) -> tuple[str, float, bool, dict[str, str]]:
        """(observation, reward, whether the episode is over, details)."""
        try:
            made = {self._action: text} if isinstance(self._action, str) else self._action(text)
        except ValueError:
            return "", 0.0, True, {"reason": "invalid_action"}
        try:
            result = await self._client.step(dict(made))
        except RuntimeError as error:
            if _INVALID not in str(error):
                raise
            if fault := _find_fault(_ask_schemas(self._url), self._action, ""):
                raise ValueError(fault) from error
            return "", 0.0, True, {"reason": "invalid_action"}
        return self._told(result.observation), self._gained(result), result.done, {}

    def _gained(self, result: Any) -> Any:
        """The reward of a step. Raises BadOutcome where the episode ends without any."""
        self._has_reward |= result.reward is not None
        if result.done and not self._has_reward:
            raise BadOutcome(
                "the OpenEnv server ended the episode, and its reward was null in every step, as "
                "NaN and infinity are sent; expected a finite reward in one step or more"
            )
        if isinstance(result.reward, bool):  # OpenEnv's rewards may be.
            return float(result.reward)
        return 0.0 if result.reward is None else result.reward

    def _told(self, observation: Mapping[str, Any]) -> str:
        if not isinstance(self._observation, str):
            return self._observation(observation)
        if not self._observation:
            return json.dumps(observation, ensure_ascii=False)
        if self._observation not in observation:
            raise ValueError(_missing("observation", self._observation, observation))
        return str(observation[self._observation])


def _ask_schemas(url: str) -> Mapping[str, Any]:
    """The server's JSON schemas of action and observation; none if it does not answer."""
    address = url.rstrip("/") + "/schema"
    if address.startswith("ws"):
        address = "http" + address[2:]
    try:
        with urllib.request.urlopen(address, timeout=_SCHEMA_TIMEOUT_S) as answer:
            found = json.load(answer)
    except (OSError, http.client.HTTPException, ValueError) as error:
        sys.stderr.write(f"the fields of the OpenEnv server are not checked: {address}: {error}\n")
        return {}
    return found if isinstance(found, dict) else {}


def _find_fault(schemas: Mapping[str, Any], action: Any, observation: Any) -> str:
    """Why the server cannot take or tell the fields that are named, or ""."""
    if isinstance(action, str):
        schema = schemas.get("action") or {}
        fields = schema.get("properties", {})
        if schema.get("additionalProperties") is False and action not in fields:
            return _missing("action", action, fields)
        if others := sorted({*schema.get("required", ())} - {action}):
            return (
                f"an action of the OpenEnv server needs the fields {others} too: give action= a "
                "function that makes the action of a text"
            )
    for kind in ("reset_observation", "observation"):
        fields = {*(schemas.get(kind) or {}).get("properties", {})} - _NOT_TOLD
        # A schema without fields of its own is the base of what the server sends.
        has_own = bool(fields - {"metadata"})
        if observation and isinstance(observation, str) and has_own and observation not in fields:
            return _missing("observation", observation, fields)
    return ""


def _missing(kind: str, name: str, fields: Iterable[str]) -> str:
    return (
        f"the {kind} of the OpenEnv server has no field {name!r}; it has {sorted(fields)}: name "
        f"one of these as {kind}=, or give it a function"
    )
