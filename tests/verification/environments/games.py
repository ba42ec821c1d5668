"""Well-behaved environments. Loaded by its path, under other interpreters too: Python 3.9."""

import asyncio
import os
import random
import sys
import time

from verification.environments import Outcome, PolicyLimit, text_game_episode, tools_episode


async def guess(prompt, policy):  # noqa: ANN001, ANN201
    """Six guesses of a number, with feedback."""
    secret = int(prompt.answer)
    chat = policy.chat(prompt.messages)
    for turn in range(6):
        reply = await chat.say(max_tokens=64)
        number = int(reply.text)
        if number == secret:
            return Outcome(1 - 0.1 * turn, reason="correct", parts={"turns": turn + 1})
        chat.add("user", "higher" if number < secret else "lower")
    return Outcome(0.0, reason="out_of_turns")


class Countdown:
    """Each turn's number is taken from the seed; the game ends at 0 or below."""

    def reset(self, seed):  # noqa: ANN001, ANN201
        """Start at the seed."""
        self.left = seed
        return f"{seed} left"

    def step(self, text):  # noqa: ANN001, ANN201
        """Take a number away."""
        self.left -= int(text)
        return f"{self.left} left", 0.25, self.left <= 0


class Told:
    """Returns what the entry evaluates to."""

    def reset(self, prompt):  # noqa: ANN001, ANN201
        """Read the entry."""
        self.step_ = prompt.entry
        return ""

    def step(self, text):  # noqa: ANN001, ANN201
        """As told."""
        return eval(self.step_)


class Gymnasium(Countdown):
    """The same with Gymnasium's values, async, and a limit of three turns."""

    async def reset(self, *, seed=None, options=None):  # noqa: ANN001, ANN201
        """Start at the seed."""
        self.turns = 0
        return super().reset(seed), {}

    async def step(self, text):  # noqa: ANN001, ANN201
        """Take a number away."""
        await asyncio.sleep(0)
        self.turns += 1
        text, reward, is_done = super().step(text)
        return text, reward, is_done, self.turns == 3, {"reason": "won"} if is_done else {}


class TextArena:
    """The same in the form of textarena, whose observations hold all that was said."""

    def reset(self, num_players, seed=None):  # noqa: ANN001, ANN201
        """Start at the seed."""
        self.game = Countdown()
        self.said = self.game.reset(seed)
        self.turns = 0

    def get_observation(self):  # noqa: ANN201
        """All that was said."""
        return 0, self.said

    def step(self, text):  # noqa: ANN001, ANN201
        """Take a number away."""
        seen, _, is_done = self.game.step(text)
        self.said += f"\n{seen}"
        return is_done, {}

    def close(self):  # noqa: ANN201
        """Rewards and details by player."""
        return {0: -1}, {0: {"invalid_move": self.game.left < 0}}


async def crowd(prompt, policy):  # noqa: ANN001, ANN201
    """A hundred chats at once."""
    replies = await asyncio.gather(*(policy.chat([]).say() for _ in range(100)))
    return Outcome(float(len({reply.text for reply in replies})), "talked")


short_countdown = text_game_episode(Countdown, max_turns=2, max_tokens=5)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


async def divide(a: float, b: float = 2.0) -> float:
    """Divide."""
    return a / b


def _is_right(prompt, run):  # noqa: ANN001, ANN202
    return float(run.text == prompt.answer)


calculator = tools_episode([add, divide], reward=_is_right, max_turns=4, max_result_chars=60)


class Shop:
    """Tools with state."""

    def reset(self, prompt):  # noqa: ANN001, ANN201
        """Open."""
        self.bought = [prompt.answer]

    def buy(self, item: str) -> list:
        """Buy an item."""
        self.bought.append(item)
        return self.bought

    def leave(self) -> None:
        """Leave the shop."""
        sys.exit("left \ud83d")  # Half of a surrogate pair, as a policy may spell it.


async def _count(prompt, run):  # noqa: ANN001, ANN202
    return Outcome(len(run.state.bought), "closed", {"calls": len(run.calls)})


shop = tools_episode(Shop, reward=_count)


class Moved(Shop):
    """As it was written for TRL's environment_factory."""

    def reset(self, **kwargs):  # noqa: ANN003, ANN201
        """Open."""
        self.bought = [kwargs["item"]] * kwargs["count"]
        return f"You have {kwargs['answer']}."


class Named(Shop):
    """Names what it needs of the prompt."""

    def reset(self, count, seed=0, *, shelf="top"):  # noqa: ANN001, ANN201
        """Open."""
        self.bought = [shelf] * (count + seed)


class Odd(Shop):
    """Gets the prompt by whatever name."""

    def reset(self, task=None):  # noqa: ANN001, ANN201
        """Open."""
        self.bought = [task.answer]
        return ""


moved, named, odd = (tools_episode(made, reward=_count) for made in (Moved, Named, Odd))


async def debate(prompt, policy):  # noqa: ANN001, ANN201
    """Two chats at once, then a fork of one, which goes on from before the other's next turn."""
    sides = [policy.chat([{"role": "system", "content": name}]) for name in "ab"]
    first, second = await asyncio.gather(*(side.say() for side in sides))
    sides[0].add("user", second.text)
    fork = sides[0].fork()
    again = fork.fork()
    await sides[0].say()
    sides[0].add("user", "only here")
    fork.add("user", "only in the fork")
    again.add("tool", "only in the other", name="look")
    replies = [await fork.say(max_tokens=3), await again.say(), await again.say()]
    return Outcome(0.5, " ".join(reply.text for reply in (first, second, *replies)))


async def limited(prompt, policy):  # noqa: ANN001, ANN201
    """Goes on after a limit, with the message that waited."""
    chat = policy.chat(prompt.messages)
    try:
        await chat.say()
    except PolicyLimit as limit:
        return Outcome(0.25, f"caught {limit.reason}", {"later": len((await chat.say()).text)})
    return Outcome(1.0, "unlimited")


async def two_limits(prompt, policy):  # noqa: ANN001, ANN201
    """Leaves limits of two chats at once to the host."""
    chats = [policy.chat(prompt.messages) for _ in range(2)]
    if sys.version_info >= (3, 11):  # noqa: UP036
        async with asyncio.TaskGroup() as group:
            for chat in chats:
                group.create_task(chat.say())
    else:
        await asyncio.gather(*(chat.say() for chat in chats))


async def sleep(prompt, policy):  # noqa: ANN001, ANN201
    """Blocks its process for some seconds, then takes a turn; as often as the entry says."""
    chat = policy.chat(prompt.messages)
    for seconds in prompt.entry:
        time.sleep(seconds)
        await chat.say()
    return Outcome(1.0, "slept")


async def look(prompt, policy):  # noqa: ANN001, ANN201
    """Its surroundings."""
    where = f"{sys.version_info[:2]} {sys.prefix} {policy.url} {policy.key}"
    return Outcome(random.random(), where, {"has": "SECRET" in os.environ})
