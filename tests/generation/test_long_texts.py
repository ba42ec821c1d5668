"""Megabytes of text that a conversation has no room for take the time of the room, not theirs.

The event loop of a generator tokenizes them, and serves every other conversation meanwhile.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import Rollout
from tests.generation.proxy_site import Site
from tests.protocol.real_templates import open_model
from verification.environments.settings import EnvironmentSettings

MANY = 12
WORDS = 400_000
"""Of one text: 2 MB."""
ROOM = 24


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return open_model(tmp_path_factory.mktemp("model"), "qwen2.5")


@pytest.fixture
def encoded(renderer: Renderer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all texts that are tokenized from now on, in characters."""
    sizes: list[int] = []
    encode = renderer.encode

    def counted(text: str) -> list[int]:
        sizes.append(len(text))
        return encode(text)

    monkeypatch.setattr(renderer, "encode", counted)
    return sizes


def opened(renderer: Renderer, folder: Path, target: str) -> Iterator[Site]:
    settings = EnvironmentSettings(
        paths=(str(Path(__file__).parent),), log_path=str(folder / "log"),
        max_message_bytes=8 << 20,
    )  # fmt: skip
    site = Site(renderer, settings, target, patience_s=120.0)
    yield site
    site.close()


@pytest.fixture
def talks(renderer: Renderer, tmp_path: Path) -> Iterator[Site]:
    yield from opened(renderer, tmp_path, "episode_games:hears")


@pytest.fixture
def programs(renderer: Renderer, tmp_path: Path) -> Iterator[Site]:
    yield from opened(renderer, tmp_path, "proxied:hears")


async def together(site: Site, room: int, words: int = WORDS) -> list[Any]:
    """Rollouts of conversations with a long text each, and of one with a word."""
    long = [site.rollout("hears", words, max_new_tokens=room) for _ in range(MANY)]
    return await asyncio.gather(*long, site.rollout("hears", 1, max_new_tokens=200))


@pytest.mark.parametrize(("room", "most"), [(ROOM, 3_000), (4000, 40_000)])
def test_conversations_with_megabytes_end_for_the_price_of_their_room(
    talks: Site, encoded: list[int], room: int, most: int
) -> None:
    *long, other = talks.wait(together(talks, room))
    assert other.score.reason == "correct" and len(other.spans) == 3
    for one in long:
        assert isinstance(one, Rollout) and one.score is not None
        assert (one.score.reward, one.score.reason) == (0.0, "out_of_tokens")
        assert one.finish_reason == "length" and len(one.token_ids) == 2
    # Less than a hundredth of the texts, which have 24 million characters.
    assert sum(encoded) < MANY * most


@pytest.mark.parametrize("words", [50_000, WORDS])
def test_requests_with_megabytes_are_refused_for_the_price_of_the_context(
    programs: Site, encoded: list[int], words: int
) -> None:
    *long, other = programs.wait(together(programs, 4000, words))
    assert other.score.reason == "correct"
    for one in long:
        assert isinstance(one, Rollout) and one.score is not None
        assert one.score.reason == "out_of_tokens" and len(one.spans) == 1
    assert sum(encoded) < MANY * 40_000
