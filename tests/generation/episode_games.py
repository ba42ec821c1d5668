"""Environments of `test_episodes.py`, loaded by their name."""

import asyncio

from verification.environments import EpisodeInput, Outcome, Policy, ToGrade, tools_episode


async def count(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chat = policy.chat(prompt.messages)
    for _ in range(3):
        reply = await chat.say()
        chat.add("user", f"heard {reply.content}")
    return Outcome(0.5, "counted", {"turns": 0.2})


async def hears(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """Three turns; each gives the entry's number of words."""
    chat = policy.chat(prompt.messages)
    for _ in range(3):
        await chat.say(max_tokens=2)
        chat.add("user", "word " * prompt.entry)
    return Outcome(1.0, "correct")


async def branches(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chat = policy.chat(prompt.messages)
    await chat.say()
    other = chat.fork()
    chat.add("user", "left")
    other.add("user", "right")
    await asyncio.gather(chat.say(), other.say())
    summary = policy.chat([{"role": "user", "content": "a summary"}])
    await summary.say()
    return Outcome(1.0, "correct")


async def gives_up(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chat = policy.chat(prompt.messages)
    asyncio.ensure_future(chat.say(max_tokens=50))
    await asyncio.sleep(0.05)
    other = policy.chat([{"role": "user", "content": "quick"}])
    await other.say()
    return Outcome(0.0, "gave up!")


async def stops_waiting(prompt: EpisodeInput, policy: Policy) -> Outcome:
    try:
        await asyncio.wait_for(policy.chat(prompt.messages).say(), 0.2)
    except asyncio.TimeoutError:  # noqa: UP041  Another class before Python 3.11.
        pass
    return Outcome(0.0, "slow")


async def never_asks(prompt: EpisodeInput, policy: Policy) -> Outcome:
    return Outcome(1.0, "correct")


async def forks_a_fork(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chat = policy.chat(prompt.messages)
    for word in ("first", "second", "third"):
        await chat.say()
        chat = chat.fork()
        chat.add("user", word)
        await chat.say()
        chat.add("user", f"{word} again")
    return Outcome(1.0, "correct")


async def sides(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chats = [policy.chat([{"role": "user", "content": name}]) for name in ("a", "b", "c")]
    rooms = zip(chats, (300, 100, 20), strict=True)
    await asyncio.gather(*(chat.say(max_tokens=room) for chat, room in rooms))
    return Outcome(1.0, "x", turn_returns=[1.0, 2.0, 3.0])


async def asks_for_nothing(prompt: EpisodeInput, policy: Policy) -> None:
    chat = policy.chat(prompt.messages)
    await chat.say()
    chat.add("user", "more")
    await chat.say(max_tokens=int(prompt.answer))


async def opens_wide(prompt: EpisodeInput, policy: Policy) -> None:
    await policy.chat([{"role": "user", "content": "more " * 100000}]).say()


async def spells(prompt: EpisodeInput, policy: Policy) -> ToGrade:
    await policy.chat(prompt.messages).say()
    return ToGrade("half of \ud83d")


async def wide(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chats = [policy.chat([{"role": "user", "content": f"chat {n}"}]) for n in range(5)]
    await asyncio.gather(*(chat.say() for chat in chats))
    return Outcome(1.0, "correct")


async def rewards_turns(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chat = policy.chat(prompt.messages)
    await chat.say()
    other = chat.fork()
    chat.add("user", "left")
    other.add("user", "right")
    await other.say()
    await chat.say()
    return Outcome(7.0, "x", turn_rewards=[1.0, 2.0, 4.0] if prompt.answer == "5" else [7.0])


async def endless(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chat = policy.chat(prompt.messages)
    while True:
        await chat.say()
        chat.add("user", "more")


async def rests(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chat = policy.chat(prompt.messages)
    if (await chat.say()).content == "rest":
        await asyncio.sleep(3600)
    chat.add("user", "a slow question")
    await chat.say()


async def breaks(prompt: EpisodeInput, policy: Policy) -> Outcome:
    await policy.chat(prompt.messages).say()
    raise ValueError("a bug of the environment")


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


graded = tools_episode([add])
adds = tools_episode([add], reward=lambda prompt, run: float(run.text == prompt.answer))


async def alternates(prompt: EpisodeInput, policy: Policy) -> Outcome:
    chats = [policy.chat([{"role": "user", "content": name}]) for name in ("a", "b")]
    for _ in range(2):
        for chat in chats:
            await chat.say()
            chat.add("user", "more")
    return Outcome(1.0, "x", turn_returns=[0.0, 1.0, 2.0, 3.0])
