"""Programs with an unmodified openai client hold the conversations of a run."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from generation import proxy, proxy_session
from generation.engine import EngineError
from generation.proxy_session import BURST_REQUESTS
from megatron_rl.config.thinking import HOUSE_TAGS
from megatron_rl.protocol.render import Renderer
from megatron_rl.protocol.types import Rollout, RolloutFailed
from tests.generation.proxy_site import TWO_CALLS, Site, learnt_of, rendered, texts_of
from tests.protocol.real_templates import open_model
from verification.environments.settings import EnvironmentSettings


def settings(folder: Path, **values: Any) -> EnvironmentSettings:
    return EnvironmentSettings(
        paths=(str(Path(__file__).parent),), log_path=str(folder / "log"), **values
    )


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return open_model(tmp_path_factory.mktemp("model"), "qwen2.5")


@pytest.fixture(scope="module")
def site(renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(renderer, settings(tmp_path_factory.mktemp("site")))
    yield site
    site.close()


def done(found: Any) -> Rollout:
    assert isinstance(found, Rollout), found
    assert found.score is not None and found.score.reason == "done"
    return found


def without_times(rollout: Rollout) -> Any:
    turns = [msgspec.structs.replace(one, asked_s=0, replied_s=0) for one in rollout.conversation]
    values = msgspec.structs.asdict(rollout)
    arrays = {name: one.tolist() for name, one in values.items() if isinstance(one, np.ndarray)}
    return values | arrays | {"conversation": turns, "first_token_s": 0.0, "environment_s": 0.0}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("by_client", "qwen2.5"),
        ("by_stream", "qwen2.5"),
        ("by_client", "llama3.2"),
        ("by_client", "ministral3"),
    ],
)
def test_a_client_gives_the_rows_of_the_same_loop_by_chat(
    site: Site, renderer: Renderer, tmp_path: Path, name: str, model: str
) -> None:
    site.take(renderer if model == "qwen2.5" else open_model(tmp_path, model))
    expected = done(site.play("by_chat"))
    found = done(site.play(name))
    assert without_times(found) == without_times(expected)
    assert len(found.spans) == 3 and found.row_starts == []
    assert learnt_of(found, site.engine.renderer) == site.engine.texts[-3:]
    site.take(renderer)


def test_an_edited_history_is_a_row_with_the_edited_text_given(
    site: Site, renderer: Renderer
) -> None:
    rollout = done(site.play("edited"))
    first, second, third = learnt_of(rollout, renderer)
    assert texts_of(rollout, renderer) == [
        rendered(renderer, "question", first, "again", second),
        rendered(renderer, "question", "as edited", "again", third),
    ]


def test_a_history_replaced_by_a_summary_is_another_row(site: Site, renderer: Renderer) -> None:
    rollout = done(site.play("compacted"))
    first, second, third, fourth = learnt_of(rollout, renderer)
    assert texts_of(rollout, renderer) == [
        rendered(renderer, "question", first, "question", second),
        rendered(renderer, f"summary: {second}", third, "question", fourth),
    ]


def test_sub_agents_at_once_share_the_room_and_learn_their_common_reply_once(
    site: Site, renderer: Renderer
) -> None:
    # None of them limits its replies, so each may take all the room that is left.
    rollout = done(site.play("sub_agents"))
    texts = texts_of(rollout, renderer)
    first = learnt_of(rollout, renderer)[0]
    assert len(rollout.spans) == 1 + 4 * 2 and len(texts) == 4
    begins = {rendered(renderer, "question", first, f"part {number}") for number in range(4)}
    assert {text[: len(next(iter(begins)))] for text in texts} == begins
    assert rollout.finish_reason == "stop"


def test_replies_at_once_are_not_cut_by_the_room_that_others_only_might_need(site: Site) -> None:
    rollout = done(site.play("narrow", max_new_tokens=200))
    assert rollout.finish_reason == "stop" and len(rollout.token_ids) > 100


def test_a_request_that_is_sent_again_gets_the_first_answer(site: Site) -> None:
    rollout = done(site.play("retried"))
    # One slow reply, and one for each of two idempotency keys.
    assert len(site.engine.prompts) == len(rollout.spans) == 3


def test_tool_calls_are_returned_with_ids_and_answered_token_by_token(
    site: Site, renderer: Renderer
) -> None:
    rollout = done(site.play("with_tools"))
    [text] = texts_of(rollout, renderer)
    assert text.count(TWO_CALLS) == 1 and len(rollout.spans) == 2
    results = text.partition(TWO_CALLS)[2]
    assert results.index("fig is a fruit") < results.index("plum is a fruit")
    assert '"name": "look_up"' in text[: text.index("call look_up")]  # The tool is offered.


def test_thoughts_are_apart_and_stay_in_the_row(site: Site, tmp_path: Path) -> None:
    thinker = open_model(tmp_path, "qwen2.5")
    thinker.tags = HOUSE_TAGS
    normal = site.engine.renderer
    site.take(thinker)
    rollout = done(site.play("thinks"))
    site.take(normal)
    [text] = texts_of(rollout, thinker)
    assert len(rollout.spans) == 2 and text.count("<think>\nhm\n</think>") == 2


def test_a_rendered_history_has_the_thoughts_that_the_template_keeps(
    site: Site, tmp_path: Path
) -> None:
    thinker = open_model(tmp_path, "qwen3")
    thinker.tags, thinker.history = HOUSE_TAGS, "template"
    normal = site.engine.renderer
    site.take(thinker)
    assert without_times(site.play("by_client")) == without_times(site.play("by_chat"))
    rollout = done(site.play("thinks"))
    site.take(normal)
    first, second = texts_of(rollout, thinker)
    assert first.count("<think>\nhm\n</think>") == second.count("<think>\nhm\n</think>") == 1
    assert second.index("<think>") > second.index("it thinks again")


def test_calls_that_cannot_be_made_are_seen(site: Site, renderer: Renderer) -> None:
    rollout = done(site.play("with_faulty_calls"))
    *_, called = texts_of(rollout, renderer)
    given = called.partition(TWO_CALLS)[2]
    assert "Error: look_up: call one tool at a time" in given
    assert given.index("Error") < given.index("found")


@pytest.mark.parametrize("history", ["keep", "template"])
def test_a_fault_is_seen_by_all_later_turns(
    site: Site, renderer: Renderer, tmp_path: Path, history: str
) -> None:
    other = open_model(tmp_path, "qwen2.5")
    other.history = history
    calls = [
        f'<tool_call>\n{{"name": "look_up", "arguments": {arguments}}}\n</tool_call>\n'
        for arguments in ('{"word": "fig"}', "{}")
    ]
    site.take(other, ["".join(calls), "it is a fruit", "bye"])
    done(site.play("answers_calls"))
    _, second, third = site.engine.rows
    site.take(renderer)
    # The third turn continues the second one token by token.
    assert third[: len(second)] == second
    given = other.tokenizer.decode(third)
    assert given.count("Error: look_up") == 1
    assert given.index("Error") < given.index("fig is a") < given.index("thanks")


def test_a_key_ends_with_its_episode_and_opens_no_other(
    site: Site, renderer: Renderer, tmp_path: Path
) -> None:
    async def both() -> list[Any]:
        entries = [{"folder": str(tmp_path), "own": own, "other": 3 - own} for own in (1, 2)]
        return await asyncio.gather(*(site.rollout("keys", entry) for entry in entries))

    one, two = map(done, site.wait(both()))
    assert len(one.spans) == 1
    # The other's history is no history of this episode: all of it is given.
    theirs = learnt_of(one, renderer)[0]
    own, reply = learnt_of(two, renderer)
    assert texts_of(two, renderer) == [
        rendered(renderer, "secret 2", own),
        rendered(renderer, "secret 1", theirs, "question", reply),
    ]


def test_10_000_malformed_requests_disturb_nobody(site: Site) -> None:
    async def both() -> list[Any]:
        flood = asyncio.ensure_future(
            site.rollout("malformed", {"strange": 9_000, "requests": 2_000})
        )
        loops = []
        while not flood.done():
            loops.append(await site.rollout("by_client"))
        return [await flood, *loops]

    process = psutil.Process()
    before = process.memory_info().rss
    flood, *loops = site.wait(both())
    assert isinstance(flood, RolloutFailed) and flood.fault == "flood"
    assert "flood: it went on after 1000 of its requests were refused" in flood.reason
    expected = without_times(done(site.play("by_chat")))
    assert loops and all(without_times(done(loop)) == expected for loop in loops)
    assert process.memory_info().rss - before < 30 << 20


def test_bytes_that_are_no_requests_and_idle_connections_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "STRANGER_TIMEOUT_S", 0.2)
    done(site.play("raw"))


def test_requests_that_come_too_fast_are_told_to_wait(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Even a slow machine sends more.
    monkeypatch.setattr(proxy_session, "REQUESTS_PER_S", 2)
    rollout = done(site.play("malformed", {"strange": 0, "requests": 320}))
    assert rollout.score is not None and len(rollout.spans) == 1
    parts = rollout.score.parts
    assert parts["400"] + parts["429"] == 320 and BURST_REQUESTS <= parts["400"] < 300


def test_a_history_without_room_is_an_outcome(site: Site) -> None:
    found = site.play("too_long")
    assert isinstance(found, Rollout) and found.score is not None
    assert (found.score.reward, found.score.reason) == (0.0, "out_of_tokens")
    assert found.finish_reason == "length"
    caught = site.play("too_long", "catches")
    assert isinstance(caught, RolloutFailed) and "of its own" in caught.reason


def test_fields_that_cannot_be_honoured_are_refused(site: Site) -> None:
    function = {"type": "function", "function": {"name": "f"}}
    refused = [
        {"n": 2}, {"logprobs": True}, {"top_logprobs": 3},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"1": 5}}, {"stop": ["\n"]}, {"best_of": 2}, {"max_tokens": 0},
        {"max_tokens": True}, {"tools": [{"type": "web_search"}]},
        {"tools": [function], "tool_choice": "required"}, {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ]  # fmt: skip
    taken = [
        {"n": 1, "temperature": 0.0, "top_p": 0.1, "seed": 5, "user": "me", "logprobs": None},
        {"stop": "END", "response_format": {"type": "text"}, "presence_penalty": 1},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"max_tokens": 100, "max_completion_tokens": 5},
    ]
    found = site.play("refused", {"refused": refused, "taken": taken}, stop=("END",))
    assert [span.end - span.start for span in done(found).spans] == [5] * len(taken)


def test_a_failure_of_the_engine_is_none_of_the_environment(site: Site) -> None:
    with pytest.raises(EngineError, match="it cannot do this prompt"):
        site.play("unlucky")


def test_replies_that_nobody_awaits_are_left_out(site: Site) -> None:
    rollout = done(site.play("hasty"))
    assert len(site.engine.prompts) == 3 and len(rollout.spans) == 1


def test_the_environments_clock_stands_still_during_replies_and_runs_on(
    renderer: Renderer, tmp_path: Path
) -> None:
    site = Site(renderer, settings(tmp_path, turn_timeout_s=1.5))
    try:
        hung = site.play("hangs")
        assert isinstance(hung, RolloutFailed) and "turn_timeout_s" in hung.reason
        # It outlived a reply of 1.8 s.
        assert len(site.engine.texts) == 1
    finally:
        site.close()
