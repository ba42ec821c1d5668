"""Work that heartbeats report: seconds idle and busy, and leases that are not stuck."""

import asyncio
from pathlib import Path

from generation.episodes import Environments, Episodes
from generation.health import Activity, EngineHealth
from generation.rollouts import Work
from megatron_rl.config.tree import QueueConfig
from megatron_rl.protocol.generator_messages import EngineActivity
from megatron_rl.protocol.types import ChatMessage, GeneratorReady, Prompt, Sampling
from megatron_rl.rollout_queue.admission import LeaseRules
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.leases import Leases
from tests.generation.test_episodes import GAMES, ScriptedEngine
from tests.protocol.real_templates import open_model
from verification.environments.host import EnvironmentHost
from verification.environments.settings import EnvironmentSettings


def test_idle_counts_from_the_first_version_and_only_without_work() -> None:
    activity = Activity()
    activity.start(10.0)
    activity.start(11.0)  # later announcements do not restart the clock
    activity.change(13.0, 2)
    activity.change(14.0, -1, tokens=30)
    activity.change(15.5, -1, tokens=12)
    assert activity.report(16.0) == EngineActivity(3.5, 2.5, 42, 0)
    # Sums since the start, so that a heartbeat that is lost loses nothing.
    assert activity.report(17.0) == EngineActivity(4.5, 2.5, 42, 0)


def test_nothing_counts_before_the_engine_could_serve() -> None:
    assert Activity().report(99.0) == EngineActivity()


def test_a_lease_that_waits_for_a_place_is_not_stuck(tmp_path: Path) -> None:
    """One place and two leases: the engine never answers the first, and only that one expires."""
    renderer = open_model(tmp_path, "qwen2.5")
    engine = ScriptedEngine(renderer, lambda _: "x", slow="begin")
    targets = {"sums": "episode_games:count"}
    queue = Leases(QueueConfig(heartbeat_timeout_s=10, lease_timeout_s=40), environments=targets)
    queue.announce("g", GeneratorReady(2, 0, session=1), now=0.0)
    prompts = [Prompt(str(n), "sums", [ChatMessage("user", "begin")], "5") for n in range(2)]
    groups = [Group(n, prompt, Sampling(400, 1.0), 1, 0) for n, prompt in enumerate(prompts)]
    rules = LeaseRules(0, max_staleness=0, is_strict=False)
    issued = [queue.issue(rules, lambda: groups.pop(0), 0.0) for _ in range(2)]
    leases = [one[1] for one in issued if one is not None]
    settings = EnvironmentSettings(
        paths=(str(GAMES),), log_path=str(tmp_path / "log"), start_timeout_s=30, max_episodes=1
    )
    work = Work(engine, renderer, EngineHealth(60, counts_passes=False), Activity())

    async def run() -> None:
        async with EnvironmentHost(settings) as host:
            episodes = Episodes(work, Environments(targets, host))
            playing = [asyncio.ensure_future(anext(episodes.rollouts(one))) for one in leases]
            async with asyncio.timeout(30):
                while not work.activity.running:
                    await asyncio.sleep(0.01)
            for now in range(2, 60, 2):
                active = episodes.pop_active()
                queue.announce("g", GeneratorReady(2, 0, 1, leases=[0, 1], active=active), now)
                queue.expire(now)
                if now == 40:
                    assert queue.pop_cancels() == []
            for task in playing:
                task.cancel()
            await asyncio.wait(playing)
            assert episodes.pop_active() == []

    asyncio.run(run())
    assert {cancel.lease_id for _, cancel in queue.pop_cancels()} == {0}
