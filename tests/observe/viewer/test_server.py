import asyncio
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megatron_rl.config.thinking import ThinkTags
from megatron_rl.observe.viewer.index import Index
from megatron_rl.observe.viewer.server import Viewer, serve
from tests.chromium import browse, needs_chromium, open_page
from tests.observe.report.runs import HOSTILE, LONG_LINE
from tests.observe.viewer.made_up import record, write

TAGS = ThinkTags(open="[T]", close="[/T]")


CONVERSATION = [
    {"start": 0, "end": 2, "follows": -1, "given": [{"role": "user", "content": "<b>7?"}],
     "text": "call", "asked_s": 0.25, "replied_s": 1.0, "before": 2},
    {"start": 5, "end": 7, "follows": 0, "text": "<i>eight", "asked_s": 2.0, "replied_s": 3.0,
     "before": 7, "given": [{"role": "tool", "name": "add", "content": "8"}]},
]  # fmt: skip


SHOWN = (
    "user<b>7?|policy | reply 1, version 3, 2 tokens, 0.25 to 1 scall"
    "|tool add8|policy | reply 2, version 4, 2 tokens, 2 to 3 s<i>eight"
)


@contextmanager
def served(run_dir: Path, database: Path) -> Iterator[str]:
    """The viewer's address, while it is served by a thread."""
    addresses: list[str] = []
    loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def main() -> None:
        ending = asyncio.Event()
        loops.append((asyncio.get_running_loop(), ending))
        with Index(run_dir, database) as index:
            index.refresh()
            await serve(Viewer(index, None, name="run", tags=TAGS), 0, addresses.append, ending)

    thread = Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        for _ in range(1000):
            if addresses or not thread.is_alive():
                break
            thread.join(0.02)
        yield addresses[0]
    finally:
        loop, ending = loops[0]
        loop.call_soon_threadsafe(ending.set)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "run" / "rollouts"
    rows = [record(0, i, reward=float(i), text=f"answer {i}") for i in range(70)]
    rows[0] |= {"text": HOSTILE, "problem": HOSTILE, "reason": "wrong_answer"}
    rows[1] |= {"text": LONG_LINE}
    rows[3] |= {"text": "[T]one <b>[/T]two"}
    rows[4] |= {"text": "three[/T]four", "prompt_tail": "x[T]\n"}
    rows[5] |= {"text": "five [T]six"}
    rows[7] |= {"text": "whole", "spans": [[3, 0, 2], [4, 5, 7]], "conversation": CONVERSATION}
    write(folder / "step_000000.jsonl", rows)
    with served(tmp_path / "run", tmp_path / "x.sqlite") as found:
        yield found


def get(url: str, **headers: str) -> HTTPResponse:
    request = urllib.request.Request(url, headers=headers)
    return urllib.request.urlopen(request, timeout=60)


def rows(address: str, **query: Any) -> dict[str, Any]:
    with get(f"{address}api/rows?{urllib.parse.urlencode(query)}") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def refused(url: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(url, **headers)
    assert caught.value.headers["Content-Security-Policy"].startswith("default-src 'none'")
    return caught.value.code


def test_only_who_knows_the_token_is_answered(address: str) -> None:
    assert address.startswith("http://127.0.0.1:")
    root, token = address.rstrip("/").rsplit("/", 1)
    assert len(token) >= 32
    for path in ("", "/", f"/{token[:-1]}/", "/api/run", f"/x{token}/api/rows", "/%2e%2e/"):
        assert refused(root + path) == 404
    # A name elsewhere that leads here (DNS rebinding) gets nothing.
    assert refused(address, Host="evil.example") == 404
    with get(address) as answer:
        headers = dict(answer.headers)
    policy = headers["Content-Security-Policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers


def test_bad_questions_are_answered_with_what_is_wrong(address: str) -> None:
    for query in ("order=text", "limit=0", "limit=999999", "offset=-1", "limit=x", "filter={"):
        assert refused(f"{address}api/rows?{query}") == 400
    assert refused(f'{address}api/rows?filter={{"x":1}}') == 400
    assert refused(f"{address}api/rollout/9999") == 404
    assert refused(f"{address}index.py") == 404
    assert refused(f"{address}nothing.js") == 404


def test_rows_and_a_rollout_come_as_json(address: str) -> None:
    found = rows(address, filter=json.dumps({"least": {"reward": 68}}), order="reward", falling=1)
    assert found["total"] == 2
    assert [row["reward"] for row in found["rows"]] == [69.0, 68.0]
    with get(f"{address}api/rollout/{found['rows'][0]['id']}") as answer:
        whole = json.load(answer)
    assert whole["record"]["text"] == "answer 69" and len(whole["group"]) == 70
    assert whole["tokens"] is None and "tokenizer" in whole["why_no_tokens"]


@needs_chromium
def test_a_browser_shows_hostile_texts_as_text(address: str, tmp_path: Path) -> None:
    document, complaints = open_page(address, tmp_path / "profile")
    assert complaints == []
    assert "<title>run: rollouts</title>" in document
    assert "1 to 50 of 70 rollouts" in document and document.count("<tr") == 51
    assert "&lt;script&gt;document.title = 'owned'&lt;/script&gt;" in document
    assert "<img" not in document and "onerror=" not in document.split("&lt;img")[0]


async def walk(address: str, profile: Path) -> None:
    total = "document.getElementById('total').textContent"
    chosen = "[...document.querySelectorAll('#rows tr')].findIndex(r => r.className === 'chosen')"
    text = "document.getElementById('text').textContent"
    async with browse(address, profile) as page:
        await page.until(f"{total} === '1 to 50 of 70 rollouts'")
        await page.press("n")
        await page.until(f"{total} === '51 to 70 of 70 rollouts'")
        await page.press("p")
        await page.until(f"{total} === '1 to 50 of 70 rollouts'")
        for key in "jjk":
            await page.press(key)
        assert await page.value(chosen) == 1
        await page.press("Enter")
        await page.until(f"{text}.length === {len(LONG_LINE)}")
        await page.press("j")
        await page.until(f"{text} === 'answer 2'")
        await page.press("]")
        await page.until(f"{text} === '[T]one <b>[/T]two'")
        dimmed = "document.querySelector('#text .thoughts').textContent"
        assert await page.value(dimmed) == "one <b>"
        for shown in ("three", "six"):
            await page.press("]")
            await page.until(f"{dimmed} === '{shown}'")
        await page.press("]")
        await page.until(f"{text} === 'answer 6'")
        await page.press("]")
        parts = "[...document.querySelectorAll('#text > div')].map(one => one.textContent)"
        await page.until(f"{parts}.join('|') === {json.dumps(SHOWN)}")
        await page.press("m")
        await page.until(f"{text} === 'whole'")
        await page.press("Escape")
        assert await page.value("document.getElementById('detail').hidden")
        await page.press("/")
        await page.write("ANSWER 6")
        # 6 and 60 to 69.
        await page.until(f"{total} === '1 to 11 of 11 rollouts'")
        await page.press("Escape")
        await page.press("Enter")
        await page.until(f"{text} === 'answer 6'")
        await page.press("c")
        assert "colour by (c): logprob" in await page.value(
            "document.getElementById('colours').textContent"
        )
        assert page.complaints == []


@needs_chromium
def test_filters_and_keys_work_in_a_browser(address: str, tmp_path: Path) -> None:
    asyncio.run(walk(address, tmp_path / "profile"))
