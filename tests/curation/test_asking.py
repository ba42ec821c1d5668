"""Translations asked of a server over HTTP: what it may do wrong, and that nothing gets lost."""

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest
from aiohttp import web

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.curation import asking, chat_endpoint
from megatron_rl.curation.asking import ask_all
from megatron_rl.curation.chat_endpoint import Endpoint
from megatron_rl.curation.translate import NAMES, Chosen, TranslateOptions, choose
from tests.curation.chat_server import MODEL, ChatServer, completion
from tests.curation.test_translate import PHRASES, case, honest, rows
from tests.end_to_end.commands import launched

pytestmark = pytest.mark.timeout(300)
CODE_OF = {name: code for code, name in NAMES.items()}


def translation(body: dict) -> str:
    """What an honest translator says to a question."""
    system, user = (message["content"] for message in body["messages"])
    language = system.partition("from English into ")[2].partition(".")[0]
    return honest(user, CODE_OF[language])


async def honestly(body: dict) -> web.StreamResponse:
    return completion(translation(body))


def chosen(count: int) -> list[Chosen]:
    return choose(rows(count), TranslateOptions(share=1.0))[0]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_FIRST_PAUSE_S", 0.01)


def endpoint(server: ChatServer, **values: float) -> Endpoint:
    return Endpoint(server.url, MODEL, **values)


def test_a_server_is_asked_once_for_each_and_by_so_many_at_once(tmp_path: Path) -> None:
    async def slowly(body: dict) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return completion(translation(body))

    items = chosen(40)
    with ChatServer(slowly) as server:
        found = ask_all(items, endpoint(server), tmp_path / "kept", attempts=3, at_once=5)
    assert server.at_once_max == 5 and len(server.questions) == 40
    assert {body["temperature"] for body in server.questions} == {0.0}
    assert {body["model"] for body in server.questions} == {MODEL}
    assert (found.tries, found.failed_tries, found.unanswered) == (40, {}, 0)
    for item in items:
        expected = honest(item.protected.text, item.language)
        assert found.texts[item.row.prompt.id, item.language] == expected


BAD = {
    "status_500": web.Response(status=500, text="no memory"),
    "status_429": web.Response(status=429),
    "malformed": [
        web.Response(text="<html>"), web.Response(body=b"\xff\xfe{"), web.Response(text="[]"),
        web.Response(text='{"choices": {}}'), web.Response(text='{"error": "x"}'),
        web.Response(text='{"choices": [{"message": {"content": 7}}]}'),
    ],
    "empty": [completion(None), completion("  "), web.Response(text='{"choices": []}'),
              completion("<think>hm</think>")],
    "cut_at_limit": completion("Un fermier", "length"),
    "answer_too_long": web.Response(body=b" " * (chat_endpoint.MAX_BODY_BYTES + 1)),
}  # fmt: skip


def bad_responses() -> list[tuple[str, web.Response]]:
    pairs = []
    for name, found in BAD.items():
        pairs += [(name, one) for one in (found if isinstance(found, list) else [found])]
    return pairs


@pytest.mark.parametrize(("failure", "response"), bad_responses())
def test_a_bad_answer_is_counted_and_asked_again_at_another_temperature(
    failure: str, response: web.Response, tmp_path: Path
) -> None:
    async def badly_first(body: dict) -> web.StreamResponse:
        if len(server.questions) == 1:
            return web.Response(status=response.status, body=response.body)
        return completion(translation(body))

    with ChatServer(badly_first) as server:
        found = ask_all(chosen(1), endpoint(server), tmp_path / "kept", attempts=3, at_once=1)
    assert found.failed_tries == {failure: 1} and found.tries == 2 and found.unanswered == 0
    assert [body["temperature"] for body in server.questions] == [0.0, 0.7]
    assert len(found.texts) == 1


def test_a_connection_that_breaks_is_counted(tmp_path: Path) -> None:
    async def hangs_up(body: dict) -> web.StreamResponse | None:
        return None if len(server.questions) == 1 else completion(translation(body))

    with ChatServer(hangs_up) as server:
        found = ask_all(chosen(1), endpoint(server), tmp_path / "kept", attempts=2, at_once=1)
    assert found.failed_tries == {"connection_lost": 1} and len(found.texts) == 1


def test_a_translation_that_loses_a_number_is_asked_for_again(tmp_path: Path) -> None:
    async def forgetful(body: dict) -> web.StreamResponse:
        text = translation(body)
        return completion(text.replace("⟦0⟧", "") if len(server.questions) < 3 else text)

    with ChatServer(forgetful) as server:
        found = ask_all(chosen(1), endpoint(server), tmp_path / "kept", attempts=3, at_once=1)
    assert found.failed_tries == {"refused: placeholder_lost": 2}
    [text] = found.texts.values()
    assert "⟦0⟧" in text


def test_tries_are_bounded_and_what_is_refused_is_not_asked_for_again(tmp_path: Path) -> None:
    async def stubbornly(body: dict) -> web.StreamResponse:
        return completion("Un fermier sans nombres, mais avec beaucoup de moutons.")

    items = chosen(3)
    with ChatServer(stubbornly) as server:
        for expected in (9, 9):
            found = ask_all(items, endpoint(server), tmp_path / "kept", attempts=3, at_once=2)
            assert len(server.questions) == expected
    assert (found.from_before, found.tries, len(found.texts)) == (3, 0, 3)


def test_a_server_that_is_silent_is_given_up_and_the_rest_is_kept(tmp_path: Path) -> None:
    async def breaks_down(body: dict) -> web.StreamResponse:
        if len(server.questions) > 10:
            await asyncio.sleep(600)
        return completion(translation(body))

    items, kept = chosen(40), tmp_path / "kept"
    with (
        ChatServer(breaks_down) as server,
        pytest.raises(InputError, match="20 times in a row, last: timeout.*same command"),
    ):
        ask_all(items, endpoint(server, timeout_s=1.0), kept, attempts=2, at_once=4)
    assert len(kept.read_text().splitlines()) == 10
    with ChatServer(honestly) as server:
        found = ask_all(items, endpoint(server), kept, attempts=2, at_once=4)
    assert (found.from_before, found.tries, len(found.texts)) == (10, 30, 40)


def test_a_request_that_a_server_away_has_not_answered_is_not_kept(tmp_path: Path) -> None:
    async def busy_with_one(body: dict) -> web.StreamResponse:
        is_first = body["messages"] == server.questions[0]["messages"]
        return web.Response(status=503) if is_first else completion(translation(body))

    items, kept = chosen(5), tmp_path / "kept"
    with ChatServer(busy_with_one) as server:
        found = ask_all(items, endpoint(server), kept, attempts=2, at_once=1)
    assert (found.unanswered, found.failed_tries, len(found.texts)) == (1, {"status_503": 2}, 4)

    # A request that the server refuses for good is not repeated.
    async def refuses(body: dict) -> web.StreamResponse:
        return web.Response(status=400)

    with ChatServer(refuses) as server:
        again = ask_all(items, endpoint(server), kept, attempts=3, at_once=1)
    assert (again.from_before, again.tries, again.unanswered) == (4, 1, 1)


def test_a_cut_line_and_another_text_are_asked_for_anew(tmp_path: Path) -> None:
    items, kept = chosen(6), tmp_path / "kept"
    with ChatServer(honestly) as server:
        ask_all(items, endpoint(server), kept, attempts=1, at_once=1)
        lines = kept.read_text().splitlines()
        changed = json.dumps(json.loads(lines[1]) | {"source": "another text"})
        kept.write_text("\n".join([lines[0], changed, *lines[2:5], lines[5][:20]]))
        found = ask_all(items, endpoint(server), kept, attempts=1, at_once=1)
    assert (found.from_before, found.tries, len(found.texts)) == (4, 2, 6)
    assert len(server.questions) == 8 and len(kept.read_text().splitlines()) == 7
    kept.write_text("no translations\n")
    with pytest.raises(InputError, match="kept:1: .*name another --out"):
        asking.read_kept(kept)


def test_thoughts_are_no_part_of_the_translation(tmp_path: Path) -> None:
    async def thinking(body: dict) -> web.StreamResponse:
        opening = "<think>" if len(server.questions) % 2 else ""
        return completion(f"{opening}It has ⟦0⟧.\n</think>\n\n{translation(body)}\n")

    with ChatServer(thinking) as server:
        found = ask_all(chosen(8), endpoint(server), tmp_path / "kept", attempts=1, at_once=1)
    assert found.failed_tries == {} and not any("think" in text for text in found.texts.values())


def test_an_address_without_a_server_or_the_model_is_refused_at_once(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with ChatServer(honestly) as server:
        with pytest.raises(InputError, match="--served-model other: .* serves translator"):
            ask_all(chosen(1), Endpoint(server.url, "other"), kept, attempts=1, at_once=1)
        with pytest.raises(InputError, match="answers 404 and no list of models"):
            ask_all(chosen(1), Endpoint(server.url[:-3], MODEL), kept, attempts=1, at_once=1)
    with pytest.raises(InputError, match="nothing answers at"):
        ask_all(chosen(1), endpoint(server), kept, attempts=1, at_once=1)
    with pytest.raises(InputError, match="expected an address such as"):
        Endpoint("127.0.0.1:30000", MODEL)
    assert not kept.exists()


def test_the_command_translates_by_the_server_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    lines = [{"id": f"p{i}", "question": case(i)[1], "answer": "7"} for i in range(30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setenv("THE_KEY", "secret")
    with ChatServer(honestly) as server:
        command = ["data", "translate", str(path), "--out", str(out), "--share", "1"]
        command += ["--endpoint", server.url, "--key-variable", "THE_KEY"]
        assert main(command) == 2  # No name of the model.
        command += ["--served-model", MODEL]
        assert main(command) == 0 and main(command) == 0
        assert len(server.questions) == 30 and set(server.keys) == {"Bearer secret"}
    report = json.loads((tmp_path / "o.jsonl.report.json").read_text())
    assert report["changed"] == {"translated": 30}
    assert report["figures"]["requests"] == {
        "from_before": 30, "tries": 0, "failed_tries": {}, "unanswered": 0,
    }  # fmt: skip
    for i, line in enumerate(out.read_text().splitlines()):
        row, (phrase, _, pieces) = json.loads(line), case(i)
        assert row["question"] == PHRASES[phrase][row["language"]].format(*pieces)
    assert "secret" not in "".join(path.read_text() for path in tmp_path.iterdir())


@pytest.mark.slow(15)
def test_an_interrupted_command_keeps_what_it_has(tmp_path: Path) -> None:
    path, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    lines = [{"id": f"p{i}", "question": case(i)[1], "answer": "7"} for i in range(30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = tmp_path / "o.jsonl.translations.jsonl"

    async def stops(body: dict) -> web.StreamResponse:
        if len(server.questions) > 12:
            await asyncio.sleep(600)
        return completion(translation(body))

    with ChatServer(stops) as server:
        command = ["data", "translate", path, "--out", out, "--share", "1", "--endpoint"]
        with launched(*command, server.url, "--served-model", MODEL, "--at-once", "2") as run:
            deadline = time.monotonic() + 100
            while len(server.questions) < 14:
                assert run.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            run.send_signal(signal.SIGINT)
            output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, output
    assert len(kept.read_text().splitlines()) == 12 and not out.exists()
