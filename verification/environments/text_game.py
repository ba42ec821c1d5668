"""Text games of gem, Gymnasium's form, textarena, or of your own, as episodes.

Runs in the environment's process; standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from verification.environments.opening import (
    call_reset,
    check_call,
    end_reason,
    finished,
    opening,
)
from verification.environments.policy import EpisodeInput, Outcome, Policy

MAX_TURNS = 64


def text_game_episode(
    make: Callable[[], Any], *, max_turns: int = MAX_TURNS, max_tokens: int | None = None
) -> Callable[[EpisodeInput, Policy], Coroutine[Any, Any, Outcome]]:
    """Episode of a game: a new one per episode, whose rewards are summed.

    make: a class, or a function without arguments, that makes a game. Its `reset` may take `seed`
        and `prompt` by name, or the prompt as its only argument. `reset` returns an observation, or
        a pair of it and details. `step(text)` returns (observation, reward, done), or Gymnasium's
        five values. Both may be async. Details may name the end of the game: info["reason"];
        without a name, rewards of 1 or more in all are "correct", and others "game_over".
        Or a game of textarena for one player.
    max_turns: ends the game with reason "out_of_turns" and the rewards so far.
    Raises TypeError for a class or function that needs arguments.
    """
    check_call(make, getattr(make, "__name__", str(make)))

    async def episode(prompt: EpisodeInput, policy: Policy) -> Outcome:
        game = make()
        if hasattr(game, "get_observation"):
            game = _TextArena(game)
        observation = await finished(call_reset(game.reset, prompt))
        if isinstance(observation, tuple):
            observation = observation[0]
        chat = policy.chat(opening(prompt, str(observation)))
        reward = 0.0
        for _ in range(max_turns):
            reply = await chat.say(max_tokens=max_tokens)
            observation, gained, is_done, reason = _read_step(
                await finished(game.step(reply.content))
            )
            reward += gained
            if is_done:
                return Outcome(reward, reason or end_reason(reward, "game_over"))
            chat.add("user", str(observation))
        return Outcome(reward, "out_of_turns")

    return episode


class _TextArena:
    """A game of textarena for one player. It observes all that was said: the policy knows that."""

    def __init__(self, game: Any) -> None:
        self._game = game
        self._seen = ""

    def reset(self, seed: int) -> str:
        self._game.reset(num_players=1, seed=seed)
        return self._observe()

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        is_done, _ = self._game.step(text)
        if not is_done:
            return self._observe(), 0.0, False, False, {}
        rewards, details = self._game.close()
        named = {"reason": "invalid_move"} if details[0].get("invalid_move") else {}
        return "", rewards[0], True, False, named

    def _observe(self) -> str:
        text: str = self._game.get_observation()[1]
        new = text[len(self._seen) :] if text.startswith(self._seen) else text
        self._seen = text
        return new.strip()


def _read_step(step: Any) -> tuple[Any, float, bool, str]:
    """(observation, reward, whether the game is over, reason or "") of what `step` returned."""
    if not isinstance(step, tuple) or len(step) not in (3, 4, 5):
        raise TypeError(
            f"step returned {type(step).__name__} {step!r}: expected (observation, reward, done) "
            "or (observation, reward, terminated, truncated, info)"
        )
    observation, reward, is_done, *rest = step
    # float() would take "0.5", and True where the values are in another order.
    if isinstance(reward, bool) or not hasattr(reward, "__float__"):
        raise TypeError(
            f"step returned the reward {reward!r}, a {type(reward).__name__}: expected a number, "
            "second after the observation"
        )
    details = rest[-1] if rest and isinstance(rest[-1], dict) else {}
    is_truncated = len(rest) == 2 and bool(rest[0]) and not is_done
    reason = str(details.get("reason") or ("truncated" if is_truncated else ""))
    return observation, float(reward), bool(is_done) or is_truncated, reason
