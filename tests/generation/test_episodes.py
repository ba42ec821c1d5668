"""Conversations of real environments with a scripted engine: rows, failures, limits."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from generation.engine import Completion, EngineError
from generation.episodes import Environments, Episodes
from generation.health import Activity, EngineHealth
from generation.rollouts import Work
from megatron_rl.protocol.generator_messages import EngineActivity
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.rollout import find_bad_spans, given_ranges
from megatron_rl.protocol.types import (
    ChatMessage,
    Lease,
    Prompt,
    Rollout,
    RolloutFailed,
    Sampling,
    VersionSpan,
)
from tests.protocol.real_templates import open_model
from verification.environments import episode
from verification.environments.host import EnvironmentHost
from verification.environments.settings import EnvironmentSettings

GAMES = Path(__file__).parent
"""Folder of `episode_games.py`."""


class ScriptedEngine:
    """Answers by a function of the prompt's text, under a version that grows with each answer."""

    version = 0

    def __init__(self, renderer: Renderer, answer: Callable[[str], str], *, slow: str = "") -> None:
        self.renderer, self.answer, self.slow = renderer, answer, slow
        self.seen: list[list[int]] = []
        self.asked: list[Sampling] = []

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """One answer."""
        text = self.renderer.tokenizer.decode(prompt_ids)
        if self.slow and self.slow in text:
            await asyncio.sleep(3600)
        ids = self.renderer.encode(self.answer(text))[: sampling.max_new_tokens]
        if is_whole := len(ids) < sampling.max_new_tokens:
            ids.append(self.renderer.end_id)
        self.seen.append([*prompt_ids, *ids])
        self.asked.append(sampling)
        self.version += 1
        spans = [VersionSpan(self.version, 0, len(ids))]
        logprobs = [-0.01 * len(self.seen)] * len(ids)
        yield Completion(indices[0], ids, logprobs, spans, "stop" if is_whole else "length")


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return open_model(tmp_path_factory.mktemp("qwen"), "qwen2.5")


@asynccontextmanager
async def opened(
    folder: Path, engine: ScriptedEngine, game: str, graded: frozenset[str] = frozenset()
) -> AsyncIterator[tuple[Episodes, Activity]]:
    settings = EnvironmentSettings(
        paths=(str(GAMES),), log_path=str(folder / "log"), start_timeout_s=30, turn_timeout_s=10
    )
    activity = Activity()
    work = Work(engine, engine.renderer, EngineHealth(60, counts_passes=False), activity)
    async with EnvironmentHost(settings) as host:
        targets = {"sums": f"episode_games:{game}"}
        yield Episodes(work, Environments(targets, host, graded_tasks=graded)), activity


def lease_of(indices: int, most: int = 400, answer: str = "5") -> Lease:
    prompt = Prompt("p", "sums", [ChatMessage("user", "begin")], answer)
    return Lease(3, prompt, list(range(indices)), Sampling(most, 1.0))


def play(
    folder: Path,
    engine: ScriptedEngine,
    game: str,
    *,
    indices: int = 1,
    most: int = 400,
    answer: str = "5",
    graded: frozenset[str] = frozenset(),
) -> list[Rollout | RolloutFailed]:
    async def run() -> list[Rollout | RolloutFailed]:
        async with opened(folder, engine, game, graded) as (episodes, activity):
            lease = lease_of(indices, most, answer)
            found = [one async for one in episodes.rollouts(lease)]
            assert episodes.pop_active() in ([3], []) and activity.running == 0
            assert episodes.add_to(EngineActivity()).conversations == 0
            return found

    return asyncio.run(run())


def rows_of(rollout: Rollout) -> list[list[int]]:
    whole = np.concatenate([rollout.prompt_ids, rollout.token_ids]).tolist()
    edges = [0, *rollout.row_starts, len(whole)]
    return [whole[start:end] for start, end in zip(edges, edges[1:], strict=False)]


def test_rows_are_what_the_engine_saw_and_only_its_tokens_are_learnt(
    tmp_path: Path, renderer: Renderer
) -> None:
    words = iter(["one", "two  \n", "three 🙂"])
    engine = ScriptedEngine(renderer, lambda _: next(words))
    [rollout] = play(tmp_path, engine, "count")
    assert isinstance(rollout, Rollout) and rollout.score is not None
    assert rows_of(rollout) == [engine.seen[-1]]
    assert find_bad_spans(rollout.spans, len(rollout.token_ids)) == ""
    learnt = [rollout.token_ids[span.start : span.end].tolist() for span in rollout.spans]
    assert learnt == [
        [*renderer.encode(word), renderer.end_id] for word in ("one", "two  \n", "three 🙂")
    ]
    assert [span.version for span in rollout.spans] == [1, 2, 3]
    given = [rollout.token_ids[start:end].tolist() for start, end in given_ranges(rollout.spans)]
    assert "heard one" in renderer.decode(given[0]) and "heard two" in renderer.decode(given[1])
    assert all(not rollout.logprobs[start:end].any() for start, end in given_ranges(rollout.spans))
    said = [(turn.follows, turn.given[0].content, turn.text) for turn in rollout.conversation]
    assert said == [
        (-1, "begin", "one"), (0, "heard one", "two  \n"), (1, "heard two", "three 🙂")
    ]  # fmt: skip
    ranges = [(turn.start, turn.end) for turn in rollout.conversation]
    assert ranges == [(span.start, span.end) for span in rollout.spans]
    before = [turn.before for turn in rollout.conversation]
    assert before == [len(rollout.prompt_ids) + span.start for span in rollout.spans]
    times = [at for turn in rollout.conversation for at in (turn.asked_s, turn.replied_s)]
    assert times == sorted(times)
    assert rollout.turns == 3 and rollout.score.reward == 0.5
    assert rollout.score.parts == {"turns": 0.2, "environment": 0.3}


def test_branches_and_new_conversations_are_rows_of_one_rollout(
    tmp_path: Path, renderer: Renderer
) -> None:
    engine = ScriptedEngine(renderer, lambda text: str(len(text)))
    [rollout] = play(tmp_path, engine, "branches")
    assert isinstance(rollout, Rollout)
    first, *later = engine.seen
    assert sorted(rows_of(rollout)) == sorted(later) and len(later) == 3
    # The first reply stands in two rows, and is learnt in one.
    assert [row[: len(first)] == first for row in rows_of(rollout)].count(True) == 2
    assert len(rollout.spans) == 4 and sorted(s.version for s in rollout.spans) == [1, 2, 3, 4]
    asked = [(turn.follows, turn.given[-1].content) for turn in rollout.conversation]
    assert asked == [(-1, "begin"), (0, "left"), (0, "right"), (-1, "a summary")]


def test_a_fork_of_a_fork_shares_all_that_was_said(tmp_path: Path, renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer, lambda text: str(len(text)))
    [rollout] = play(tmp_path, engine, "forks_a_fork")
    assert isinstance(rollout, Rollout) and len(engine.seen) == 6
    # Each of the six replies follows the one before it, in whatever chat that was.
    for before, after in zip(engine.seen, engine.seen[1:], strict=False):
        assert after[: len(before)] == before
    assert rows_of(rollout) == [engine.seen[-1]]


def test_a_reply_that_nobody_waits_for_leaves_no_trace(tmp_path: Path, renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer, lambda _: "yes", slow="begin")
    [rollout] = play(tmp_path, engine, "gives_up")
    assert isinstance(rollout, Rollout) and rollout.score is not None
    assert rows_of(rollout) == engine.seen and len(engine.seen) == 1
    assert rollout.score.reason == "gave_up_"


class StubbornEngine(ScriptedEngine):
    """A reply that was given up takes a while to end."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """One answer."""
        try:
            async for one in super().generate(prompt_ids, sampling, indices):
                yield one
        except asyncio.CancelledError:
            await asyncio.sleep(1.0)
            raise


def test_a_reply_that_ends_after_its_rollout_leaves_no_trace(
    tmp_path: Path, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "CANCEL_TIMEOUT_S", 0.1)
    engine = StubbornEngine(renderer, lambda _: "yes", slow="begin")

    async def run() -> Rollout | RolloutFailed:
        async with opened(tmp_path, engine, "gives_up") as (episodes, activity):
            [found] = [one async for one in episodes.rollouts(lease_of(1))]
            assert activity.running == 1
            async with asyncio.timeout(30):
                while activity.running:
                    await asyncio.sleep(0.01)
            return found

    rollout = asyncio.run(run())
    assert isinstance(rollout, Rollout) and rows_of(rollout) == engine.seen
    assert len(engine.seen) == 1


def test_replies_at_once_wait_for_the_room_that_another_one_keeps(
    tmp_path: Path, renderer: Renderer
) -> None:
    engine = ScriptedEngine(renderer, lambda _: "a reply")
    [rollout] = play(tmp_path, engine, "wide")
    assert isinstance(rollout, Rollout) and rollout.score is not None
    assert sorted(rows_of(rollout)) == sorted(engine.seen) and len(engine.seen) == 5
    assert (rollout.score.reason, rollout.finish_reason) == ("correct", "stop")


def test_open_conversations_are_counted_by_what_they_wait_for(
    tmp_path: Path, renderer: Renderer
) -> None:
    """Of two that had a reply, one asks for another, and the environment of the other works."""
    words = iter(["rest", "ask"])
    engine = ScriptedEngine(renderer, lambda _: next(words), slow="a slow question")

    async def reach(episodes: Episodes, engine: EngineActivity, wanted: EngineActivity) -> None:
        async with asyncio.timeout(30):
            while episodes.add_to(engine) != wanted:
                await asyncio.sleep(0.01)

    async def run() -> None:
        busy = EngineActivity(1.5, 2.5, 300, 1)
        async with opened(tmp_path, engine, "rests") as (episodes, activity):
            assert episodes.add_to(busy) == busy
            serving = asyncio.create_task(anext(episodes.rollouts(lease_of(2))))
            await reach(episodes, busy, EngineActivity(1.5, 2.5, 300, 1, 2, 2, 1))
            assert activity.running == 1
            serving.cancel()
            await reach(episodes, busy, EngineActivity(1.5, 2.5, 300, 1, 2, 0, 0))

    asyncio.run(run())


def test_rewards_of_replies_become_returns_in_the_order_of_tokens(
    tmp_path: Path, renderer: Renderer
) -> None:
    engine = ScriptedEngine(renderer, lambda text: "rr" if "right" in text else "a")
    [rollout] = play(tmp_path, engine, "rewards_turns")
    assert isinstance(rollout, Rollout)
    # Asked for: the first, "right", "left"; the rows: the first with "right", then "left".
    assert [(one.number, one.value) for one in rollout.turn_returns] == [
        (0, 7.0), (1, 6.0), (2, 4.0)
    ]  # fmt: skip
    spans = [span.end - span.start for span in rollout.spans]
    assert [one.tokens for one in rollout.turn_returns] == spans
    [failed] = play(tmp_path, engine, "rewards_turns", answer="6")
    assert isinstance(failed, RolloutFailed) and "1 turn_rewards of 3 replies" in failed.reason


class SlowEngine(ScriptedEngine):
    """Each answer takes a while."""

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, indices: list[int]
    ) -> AsyncIterator[Completion]:
        """One answer."""
        await asyncio.sleep(0.3)
        async for one in super().generate(prompt_ids, sampling, indices):
            yield one


def test_replies_that_wait_for_room_are_rewarded_in_the_order_of_asking(
    tmp_path: Path, renderer: Renderer
) -> None:
    """The third reply would have room at once, the second has none before the first has ended."""
    names = {"user\na<": "1", "user\nb<": "2", "user\nc<": "3"}
    engine = SlowEngine(renderer, lambda text: next(names[one] for one in names if one in text))
    [rollout] = play(tmp_path, engine, "sides")
    assert isinstance(rollout, Rollout)
    said = [renderer.decode(rollout.token_ids[s.start : s.end].tolist()) for s in rollout.spans]
    assert [one.value for one in rollout.turn_returns] == [float(word) for word in said]
    assert sorted(said) == ["1", "2", "3"]


def test_turns_of_several_chats_know_the_order_of_asking(
    tmp_path: Path, renderer: Renderer
) -> None:
    [rollout] = play(tmp_path, ScriptedEngine(renderer, lambda _: "some words"), "alternates")
    assert isinstance(rollout, Rollout)
    # Tokens are chat by chat; each second reply of a chat was asked for after both first ones.
    assert [one.asked_before for one in rollout.conversation] == [0, 2, 1, 3]
    assert [(one.number, one.value) for one in rollout.turn_returns] == [
        (0, 0.0), (2, 2.0), (1, 1.0), (3, 3.0)
    ]  # fmt: skip


@pytest.mark.parametrize("most", ["0", "-1"])
def test_a_reply_of_no_tokens_is_never_asked_of_the_engine(
    tmp_path: Path, renderer: Renderer, most: str
) -> None:
    engine = ScriptedEngine(renderer, lambda _: "some words")
    [rollout] = play(tmp_path, engine, "asks_for_nothing", answer=most)
    assert isinstance(rollout, Rollout) and rollout.score is not None
    assert rollout.score.reason == "out_of_tokens" and len(engine.asked) == 1


def test_first_messages_without_room_are_the_environments_failure(
    tmp_path: Path, renderer: Renderer
) -> None:
    [failed] = play(tmp_path, ScriptedEngine(renderer, lambda _: "x"), "opens_wide")
    assert isinstance(failed, RolloutFailed) and failed.fault == "bad_outcome"
    # One token for each of 100,000 "more", and a few of the template.
    assert "no room: the text has more than 4096 tokens" in failed.reason
    assert "generator.context_tokens" in failed.reason


def test_a_first_reply_that_was_given_up_is_no_environment_that_never_asked(
    tmp_path: Path, renderer: Renderer
) -> None:
    engine = ScriptedEngine(renderer, lambda _: "x", slow="begin")
    [failed] = play(tmp_path, engine, "stops_waiting")
    assert isinstance(failed, RolloutFailed) and failed.fault == "bad_outcome"
    assert "before the policy's first reply: it cancelled say" in failed.reason
    [failed] = play(tmp_path, engine, "never_asks")
    assert isinstance(failed, RolloutFailed)
    assert "it returned without a turn of the policy" in failed.reason


def test_no_room_for_another_reply_is_an_outcome(tmp_path: Path, renderer: Renderer) -> None:
    engine = ScriptedEngine(renderer, lambda _: "some words")
    [rollout] = play(tmp_path, engine, "endless", most=60)
    assert isinstance(rollout, Rollout) and rollout.score is not None
    assert (rollout.score.reward, rollout.score.reason) == (0.0, "out_of_tokens")
    assert len(rollout.token_ids) <= 60 and rollout.finish_reason == "length"
    assert rows_of(rollout) == [engine.seen[-1]]


def test_a_bug_of_the_environment_is_its_failure_and_no_reward(
    tmp_path: Path, renderer: Renderer
) -> None:
    engine = ScriptedEngine(renderer, lambda _: "x")
    found = play(tmp_path, engine, "breaks", indices=3)
    assert sorted(one.index for one in found if isinstance(one, RolloutFailed)) == [0, 1, 2]
    for one in found:
        assert isinstance(one, RolloutFailed) and one.fault == "exception"
        assert "a bug of the environment" in one.reason


def test_an_engine_that_fails_is_not_the_environments_fault(
    tmp_path: Path, renderer: Renderer
) -> None:
    def fail(_: str) -> str:
        raise EngineError("out of memory")

    with pytest.raises(EngineError, match="out of memory"):
        play(tmp_path, ScriptedEngine(renderer, fail), "count", indices=2)


def test_a_called_function_answers_in_the_form_of_the_template(
    tmp_path: Path, renderer: Renderer
) -> None:
    def answer(text: str) -> str:
        if "<tool_response>" in text:
            return text.partition("<tool_response>\n")[2].partition("\n</tool_response>")[0]
        return '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

    engine = ScriptedEngine(renderer, answer)
    [rollout] = play(tmp_path, engine, "adds", most=300)
    assert isinstance(rollout, Rollout) and rollout.score is not None
    assert (rollout.score.reward, rollout.turns) == (1.0, 2)
    assert '"name": "add"' in renderer.decode(rollout.prompt_ids.tolist())
    assert rows_of(rollout) == [engine.seen[-1]]


def test_the_last_reply_is_graded_where_the_task_has_a_comparison(
    tmp_path: Path, renderer: Renderer
) -> None:
    def answer(text: str) -> str:
        if "<tool_response>" in text:
            return "\\boxed{5}"
        return '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'

    engine = ScriptedEngine(renderer, answer)
    [rollout] = play(tmp_path, engine, "graded", graded=frozenset({"sums"}))
    assert isinstance(rollout, Rollout) and rollout.score is None
    assert rollout.to_grade == rollout.graded_text == "\\boxed{5}"
    assert rollout.text.startswith("<tool_call>") and rows_of(rollout) == [engine.seen[-1]]
    assert rollout.prompt_tail.endswith("<|im_start|>assistant\n")
    [spelled] = play(tmp_path, engine, "spells", graded=frozenset({"sums"}))
    assert isinstance(spelled, Rollout) and spelled.to_grade == "half of \\ud83d"
    [failed] = play(tmp_path, engine, "graded")
    assert isinstance(failed, RolloutFailed) and failed.fault == "bad_outcome"
    assert "its task has no reward.tasks.NAME.compare" in failed.reason
