"""Holds the conversations of leases whose task has an environment.

Used by the generator. The environment runs in a process of its own and asks for one reply after the
other (`verification/environments/host.py`); each reply is one request of the engine. While the
environment works, the conversation holds no slot of the engine. Token ids never leave this process.

| a conversation waits for | meanwhile |
|---|---|
| one of `environments.max_episodes` places | its lease waits, and counts as active |
| its environment, or the judge | nothing of it is in the engine; its lease counts as active |
| the engine's reply | the environment's clock stands still |
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from generation.conversation import OUT_OF_TOKENS, ConversationTree, OutOfTokens, Turn
from generation.engine import Completion, EngineError
from generation.histories import Histories, Place
from generation.judge_client import open_judge
from generation.outcomes import earned_by, read_entry, turns_of
from generation.proxy import Proxy, open_proxy
from generation.rollouts import Work
from megatron_rl.config.tree import Config
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.chat_template import Turn as Message
from megatron_rl.protocol.control_tokens import TooManyTokens
from megatron_rl.protocol.generator_messages import EngineActivity
from megatron_rl.protocol.rollout import TurnReturn, narrow_choices
from megatron_rl.protocol.tool_calls import ParsedReply
from megatron_rl.protocol.types import Lease, Rollout, RolloutFailed, escaped, sendable
from verification.environments.episode import Judge
from verification.environments.host import EnvironmentHost
from verification.environments.policy import (
    Call,
    EpisodeInput,
    Outcome,
    PolicyLimit,
    Reply,
    Say,
    ToGrade,
)  # fmt: skip
from verification.environments.settings import EnvironmentFailed, environment_settings


class Exchange(NamedTuple):
    """The messages that a turn answered, and the parts of its reply."""

    messages: list[Message]
    turn: Turn
    found: ParsedReply


@dataclass
class Chat:
    """One conversation of an episode."""

    tools: list[dict[str, Any]]
    exchanges: list[Exchange] = field(default_factory=list)
    shared: int = 0
    """The first exchanges, which are those of the chat that it was forked from."""


class Episode:
    """One rollout: chats of an environment with the policy."""

    def __init__(self, lease: Lease, index: int, owner: "Episodes") -> None:
        sampling = lease.sampling
        self.lease, self._index, self._owner = lease, index, owner
        self.histories = owner.histories
        self._tree = ConversationTree(
            completion_tokens=sampling.max_new_tokens,
            context_tokens=owner.renderer.context_tokens,
        )
        self._chats: dict[int, Chat] = {}
        self._began_at = self._changed_at = time.monotonic()
        self._replying = 0
        self._reply_ended = asyncio.Event()
        self._next_turn = asyncio.Lock()
        self._environment_s = 0.0
        self._first_at = -1.0
        self._no_reply = "it returned without a turn of the policy"
        """Why the conversation has no reply, as long as it has none."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a reply."""
        return self.lease.sampling.stop

    @property
    def is_in_environment(self) -> bool:
        """Whether it waits for its environment or a place for it, and not for the engine."""
        return self._replying == 0

    async def answer(self, say: Say) -> Reply:
        """One turn of the policy. Raises PolicyLimit, EnvironmentFailed, EngineError."""
        chat = self._chat_of(say)
        parent = chat.exchanges[-1].turn if chat.exchanges else None
        messages = self.histories.with_ids(say.messages)
        try:
            place = self.place(parent, self._earlier(chat), messages, chat.tools)
            turn = await self.take_turn(place, say.max_tokens)
        except OutOfTokens as error:
            raise PolicyLimit(OUT_OF_TOKENS) from error
        except RenderError as error:
            # The same messages would fail with every engine: the environment is at fault.
            raise EnvironmentFailed(str(error), "exception") from error
        found, reply = self.histories.read(turn, chat.tools), turn.reply
        chat.exchanges.append(Exchange(messages, turn, found))
        assert reply is not None
        return Reply(
            self._owner.renderer.decode(reply.token_ids), found.content, found.reasoning,
            [Call(*call) for call in found.calls], found.faults,
            reply.finish_reason, self._tree.room_behind(turn),
        )  # fmt: skip

    async def take_turn(self, place: Place, max_tokens: int | None) -> Turn:
        """A turn with its reply. Raises OutOfTokens, EngineError.

        It waits while other replies of the episode keep room that this one needs.
        """
        parent, given, asked = place
        # Turns stand in the order of asking: environments reward them in it.
        async with self._next_turn:
            while self._replying and self._tree.room_for(parent, given) < (max_tokens or 1):
                await self._reply_ended.wait()
            try:
                turn = self._tree.open(parent, given, max_tokens)
            except OutOfTokens as error:
                self._note_no_room(error)
                raise
            self._no_reply = (
                "it returned before the policy's first reply: it cancelled say, as "
                "asyncio.wait_for does, or did not await it"
            )
            self._count(+1)
            turn.asked, turn.asked_at = asked, self._changed_at
        try:
            reply = await self._owner.sample(self.lease, self._index, turn, self._tree)
        except BaseException:
            # The environment no longer waits for it.
            self._tree.discard(turn)
            raise
        else:
            self._tree.close(turn, reply)
        finally:
            self._count(-1)
            turn.replied_at = self._changed_at
            self._reply_ended.set()
            self._reply_ended = asyncio.Event()
        if self._first_at < 0:
            self._first_at = reply.first_token_at
        return turn

    def _earlier(self, chat: Chat) -> Iterator[Message]:
        """The messages of a conversation, with the replies."""
        for given, turn, found in chat.exchanges:
            yield from given
            yield self.histories.message(turn, found)

    def _chat_of(self, say: Say) -> Chat:
        if say.chat not in self._chats:
            if say.tools and (refusal := self.histories.parser.refusal):
                raise EnvironmentFailed(refusal, "exception")
            chat = Chat(say.tools)
            if say.parent is not None:
                parent = self._chats[say.parent]
                earlier = parent.exchanges[: parent.shared + say.parent_turns]
                chat = Chat(parent.tools, earlier, len(earlier))
            self._chats[say.chat] = chat
        return self._chats[say.chat]

    def place(
        self,
        parent: Turn | None,
        earlier: Iterable[Message],
        messages: list[Message],
        tools: list[dict[str, Any]],
    ) -> Place:
        """As `Histories.place`, for the episode's task. Raises RenderError, OutOfTokens."""
        # A turn that is discarded gives its room back.
        room = self._owner.renderer.context_tokens
        room = room if self._replying else self._tree.room_behind(parent)
        try:
            return self.histories.place(
                parent, earlier, messages, tools, task=self.lease.prompt.task, room=room
            )
        except TooManyTokens as error:
            refusal = OutOfTokens(
                f"a reply has no room: {error}; shorten the messages, or raise "
                "sampling.max_new_tokens or generator.context_tokens"
            )
            self._note_no_room(refusal)
            raise refusal from error

    def _note_no_room(self, error: OutOfTokens) -> None:
        self._tree.is_cut = True
        self._no_reply = f"its first reply has no room: {error}"

    def _count(self, replies: int) -> None:
        """Count replies that the engine samples, and the time without any."""
        now = time.monotonic()
        if not self._replying:
            self._environment_s += now - self._changed_at
        self._replying += replies
        self._changed_at = now

    def end(self, end: Outcome | ToGrade) -> Rollout:
        """The rollout. Raises EnvironmentFailed if the environment never got a reply."""
        self._tree.discard_open()
        if not self._tree.turns:
            raise EnvironmentFailed(self._no_reply, "bad_outcome")
        self._count(0)
        rows, renderer = self._tree.rows(), self._owner.renderer
        asked, to_grade, score, returns = rows.prompt_ids, None, None, list[TurnReturn]()
        if isinstance(end, Outcome):
            score, returns = earned_by(end, self._tree.turns, rows.replies)
        elif self.lease.prompt.task in self._owner.graded_tasks:
            # The policy can spell half of a surrogate pair.
            asked, to_grade = self._tree.turns[-1].prompt, escaped(end.text)
        else:
            reason = "it returned a text to grade, and its task has no reward.tasks.NAME.compare"
            raise EnvironmentFailed(reason, "bad_outcome")
        return Rollout(
            lease_id=self.lease.lease_id,
            index=self._index,
            prompt_ids=np.array(rows.prompt_ids, np.int32),
            token_ids=np.array(rows.token_ids, np.int32),
            logprobs=np.array(rows.logprobs, np.float32),
            spans=rows.spans,
            expert_choices=narrow_choices(rows.expert_choices),
            finish_reason=rows.finish_reason,
            text=renderer.decode(rows.token_ids),
            prompt_tail=renderer.tail(asked),
            first_token_s=max(-1.0, self._first_at - self._began_at),
            score=score,
            to_grade=to_grade,
            row_starts=rows.row_starts,
            turn_returns=returns,
            environment_s=self._environment_s,
            conversation=turns_of(
                rows, self._tree.turns, decode=renderer.decode, began_at=self._began_at
            ),
        )  # fmt: skip


class Episodes:
    """All episodes of a generator."""

    def __init__(self, work: Work, environments: "Environments") -> None:
        """Raises InputError for a chat template that cannot continue a conversation."""
        self.targets = environments.targets
        """Environment of each task that has one."""
        self.graded_tasks = environments.graded_tasks
        self._engine, self.renderer, self._health, self._activity = work
        self._host, self._proxy = environments.host, environments.proxy
        self._judge = environments.judge
        self._active: set[int] = set()
        self._open: set[Episode] = set()
        self._replies = 0
        """Finished replies since the start."""
        if self.targets:
            self.histories = Histories(self.renderer)

    def pop_active(self) -> list[int]:
        """Leases whose conversations ended a turn since the last call, or are in an environment."""
        waiting = {episode.lease.lease_id for episode in self._open if episode.is_in_environment}
        active, self._active = self._active | waiting, set()
        return sorted(active)

    def add_to(self, activity: EngineActivity) -> EngineActivity:
        """The activity of the engine, with the figures of conversations."""
        return msgspec.structs.replace(
            activity,
            turns=self._replies,
            conversations=len(self._open),
            in_environment=sum(episode.is_in_environment for episode in self._open),
        )

    async def rollouts(self, lease: Lease) -> AsyncIterator[Rollout | RolloutFailed]:
        """The rollouts of a lease, as each ends; failures of environments and of the engine.

        Closing the iterator ends the other conversations.
        """
        tasks = [asyncio.create_task(self._run(lease, index)) for index in lease.indices]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, lease: Lease, index: int) -> Rollout | RolloutFailed:
        prompt = lease.prompt
        episode = Episode(lease, index, self)
        given = EpisodeInput(
            prompt.id, prompt.task, msgspec.to_builtins(prompt.messages), prompt.answer,
            read_entry(prompt.entry),
            lease.sampling.seed,
        )  # fmt: skip
        self._open.add(episode)
        try:
            return episode.end(await self._play(episode, given))
        except EnvironmentFailed as error:
            reason = sendable(f"the environment failed: {error}")
            return RolloutFailed(lease.lease_id, index, reason, fault=error.kind)
        finally:
            self._open.remove(episode)

    async def _play(self, episode: Episode, given: EpisodeInput) -> Outcome | ToGrade:
        """How an episode ended. Raises EnvironmentFailed, EngineError."""
        assert self._host is not None, "no environments were opened"
        run = partial(self._host.run, judge=self._judge)
        target = self.targets[given.task]
        if self._proxy is None:
            return await run(target, given, episode.answer)
        async with self._proxy.serve(episode) as session:
            given = replace(given, url=self._proxy.url, key=session.key)
            return await session.watch(run(target, given, episode.answer, clock=session.clock))

    async def sample(
        self, lease: Lease, index: int, turn: Turn, tree: ConversationTree
    ) -> Completion:
        """The engine's reply of a turn. Raises EngineError."""
        sampling = msgspec.structs.replace(
            lease.sampling,
            max_new_tokens=turn.most_tokens,
            choices_from=turn.choices_from,
            is_turn=True,
        )
        if seeds := lease.sampling.draw_seeds:
            own = seeds[lease.indices.index(index)] + tree.turns.index(turn)
            sampling = msgspec.structs.replace(sampling, draw_seeds=(own,))
        self._activity.change(time.monotonic(), 1)
        tokens = 0
        try:
            async with aclosing(self._engine.generate(turn.prompt, sampling, [index])) as answers:
                async for completion in answers:
                    tokens = len(completion.token_ids)
                    self._health.note_progress()
                    self._active.add(lease.lease_id)
                    self._replies += 1
                    return completion
        finally:
            self._activity.change(time.monotonic(), -1, tokens)
        raise EngineError("the engine ended a request without an answer")


class Environments(NamedTuple):
    """The environments of a run, and what runs them."""

    targets: Mapping[str, str]
    """Environment of each task that has one, as package.module:name."""
    host: EnvironmentHost | None = None
    proxy: Proxy | None = None
    judge: Judge | None = None
    graded_tasks: frozenset[str] = frozenset()
    """Those whose environments may return a text for the verifier."""


@asynccontextmanager
async def open_environments(
    config: Config, name: str, scorer: str = ""
) -> AsyncIterator[Environments]:
    """The environments of a run, until the block ends.

    name: of the process that starts them. scorer: address of the scorer's node; "": this one.
    """
    log_path = config.run.dir / "logs" / f"environments-{name}.log"
    settings = environment_settings(config.environments, log_path)
    if not config.reward.environments:
        yield Environments({})
        return
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(EnvironmentHost(settings))
        proxy = await stack.enter_async_context(open_proxy(settings))
        judge = None
        if config.judge_folder is not None:
            judge = (await stack.enter_async_context(open_judge(config, name, scorer))).ask
        tasks = config.reward.tasks.items()
        graded = frozenset(name for name, task in tasks if task.environment and task.compare)
        yield Environments(config.reward.environments, host, proxy, judge, graded)


def capacity_of(config: Config) -> int:
    """Completions that a generator takes at once: conversations may wait for environments."""
    running = config.generator.max_running
    return max(running, config.environments.max_episodes) if config.reward.environments else running
