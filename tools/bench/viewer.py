"""Response times of the viewer: `python -m tools.bench.viewer [--quick]`.

100,000 random rollouts (`--quick`: 20,000) of 1.5 kB, in the files of a run. The last line is JSON,
with medians of 5: `index_s`, `cold_page_ms` (the very first page, once), `first_page_ms`,
`filter_ms` (the slowest filter), `bare_ms` (its search in SQLite alone), `peak_mb` (resident memory
of the server's process). Pages and filters are requested over HTTP.
"""

import asyncio
import contextlib
import json
import random
import resource
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from megatron_rl.observe.viewer.index import Index
from megatron_rl.observe.viewer.server import Viewer, serve
from tools.bench.measuring import parser, report, timed

ROLLOUTS, QUICK = 100_000, 20_000
GROUP, GROUPS_A_STEP = 16, 64
REPEATS = 5
WORDS = "the sum of two numbers is first then carry so we get answer because even prime".split()
FILTERS: dict[str, dict[str, Any]] = {
    "reason": {"equals": {"reason": "correct"}},
    "range": {"least": {"tokens": 200}, "most": {"reward": 0.5}},
    "text": {"search": "carry carry carry"},
    "text that none has": {"search": "zebra"},
}


def write_run(folder: Path, count: int) -> None:
    """Write files of steps with random records."""
    draw = random.Random(0)
    (folder / "rollouts").mkdir()
    per_step = GROUP * GROUPS_A_STEP
    for step in range(-(-count // per_step)):
        lines = [
            json.dumps(_record(draw, step, place))
            for place in range(min(per_step, count - step * per_step))
        ]
        path = folder / "rollouts" / f"step_{step:06d}.jsonl"
        path.write_text("\n".join(lines) + "\n")


def _record(draw: random.Random, step: int, place: int) -> dict[str, Any]:
    is_right = draw.random() < 0.5
    tokens = int(draw.lognormvariate(5, 0.6))
    return {
        "prompt_id": f"p{draw.randrange(5000)}", "group": step * GROUPS_A_STEP + place // GROUP,
        "index": place % GROUP, "task": draw.choice(["math", "code", "exact"]),
        "problem": " ".join(draw.choices(WORDS, k=20)), "language": "en",
        "text": " ".join(draw.choices(WORDS, k=250)), "answer": "7",
        "reward": 1.0 if is_right else 0.1, "parts": {"correct": 0.9 * is_right, "format": 0.1},
        "reason": "correct" if is_right else draw.choice(["wrong_answer", "no_boxed"]),
        "tokens": tokens, "versions": [max(0, step - draw.randrange(3))], "finish_reason": "stop",
        "seed": 0, "prompt_tail": "", "spans": [[step, 0, tokens]], "generator": "generator-0",
    }  # fmt: skip


async def median_ms(call: Callable[[], Awaitable[object]]) -> float:
    """Median of REPEATS calls in milliseconds."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        await call()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


async def measure(address: str) -> dict[str, float]:
    """Milliseconds of the first page and of each filter, over HTTP."""
    async with aiohttp.ClientSession() as session:

        async def get(path: str, **query: str) -> Any:
            async with session.get(address + path, params=query) as answer:
                assert answer.status == 200, await answer.text()
                return await answer.json()

        async def first() -> None:
            await get("api/run")
            await get("api/rows")

        started = time.perf_counter()
        await first()
        found = {"cold": 1e3 * (time.perf_counter() - started), "first": await median_ms(first)}
        for name, wanted in FILTERS.items():
            text = json.dumps(wanted)
            found[name] = await median_ms(lambda text=text: get("api/rows", filter=text))
            total = (await get("api/rows", filter=text))["total"]
            print(f"{name:20s} {found[name]:8.1f} ms, {total} rollouts", flush=True)
        return found


def bare_ms(database: Path) -> float:
    """Milliseconds of a search without matches in SQLite alone."""
    asked = "select id from texts where text like '%zebra%' or problem like '%zebra%'"
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        times_s = [timed(lambda: connection.execute(asked).fetchall()) for _ in range(REPEATS)]
    return 1e3 * statistics.median(times_s)


async def run(folder: Path) -> dict[str, float]:
    """Index the rollouts, serve them and measure."""
    database = folder / "index.sqlite"
    started = time.perf_counter()
    with Index(folder, database) as index:
        count = index.refresh()
        index_s = time.perf_counter() - started
        print(f"{count} rollouts indexed in {index_s:.1f} s", flush=True)
        ending, address = asyncio.Event(), asyncio.get_running_loop().create_future()
        viewer = Viewer(index, None, name="bench")
        serving = asyncio.create_task(serve(viewer, 0, address.set_result, ending))
        found = await measure(await address)
        ending.set()
        await serving
    return {
        "index_s": index_s,
        "cold_page_ms": found.pop("cold"),
        "first_page_ms": found.pop("first"),
        "filter_ms": max(found.values()),
        "bare_ms": bare_ms(database),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Print each figure, then all as JSON."""
    is_quick = parser(__doc__, quick=f"{QUICK} rollouts").parse_args().quick
    count = QUICK if is_quick else ROLLOUTS
    with tempfile.TemporaryDirectory() as name:
        write_run(Path(name), count)
        figures = asyncio.run(run(Path(name)))
    report({"rollouts": count} | figures)


if __name__ == "__main__":
    main()
