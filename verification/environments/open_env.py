"""Environments of an OpenEnv server, as episodes.

Runs in the environment's process, whose interpreter needs the package `openenv` (0.10.0 or later):
`expert.environments.python`. The fork server imports it before it forks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from verification.environments.opening import import_client
from verification.environments.policy import EpisodeInput, Outcome, Policy
from verification.environments.text_game import MAX_TURNS, text_game_episode

_INVALID = "(code: VALIDATION_ERROR)"
"""How the client words an action that the server's schema refuses."""


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
    """

    async def episode(prompt: EpisodeInput, policy: Policy) -> Outcome:
        from openenv.core.generic_client import GenericEnvClient

        # The episode's own limits end it: expert.environments.turn_timeout_s.
        async with GenericEnvClient(base_url=url, message_timeout_s=None) as client:
            session = _Session(client, action, observation)
            play = text_game_episode(lambda: session, max_turns=max_turns, max_tokens=max_tokens)
            return await play(prompt, policy)

    # For the fork server.
    prepare = partial(import_client, "openenv.core.generic_client", "openenv, 0.10 or later,")
    episode.__dict__["prepare"] = prepare
    return episode


class _Session:
    """A session of the server as a text game."""

    def __init__(
        self,
        client: Any,
        action: str | Callable[[str], Mapping[str, Any]],
        observation: str | Callable[[Mapping[str, Any]], str],
    ) -> None:
        self._client, self._action, self._observation = client, action, observation

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
            return "", 0.0, True, {"reason": "invalid_action"}
        return self._told(result.observation), float(result.reward or 0), result.done, {}

    def _told(self, observation: Mapping[str, Any]) -> str:
        if not isinstance(self._observation, str):
            return self._observation(observation)
        if not self._observation:
            return json.dumps(observation, ensure_ascii=False)
        return str(observation[self._observation])
