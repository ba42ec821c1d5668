"""Runs in environments: `examples/agents/run.sh`, the tiny model with a tool or a search."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.protocol.rollout import given_ranges
from megatron_rl.protocol.rollout_files import RecordedSpan

pytestmark = [pytest.mark.slow(110), pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(
    scope="module",
    params=[
        "lookup",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("search", "calculate")),
    ],
)
def example(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def run_dir(example: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "run"
    command = ["bash", "examples/agents/run.sh", example, "--run-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of all trained conversations, in the order of steps."""
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    return [line for path in files for line in read_jsonl(path)]


def test_policy_learns_to_use_the_result_of_its_tool(example: str, run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.3
    # Slow programs: weights change within most conversations, which keep their KV cache.
    assert summary["logprob_gap_mean"] < (5e-3 if example == "calculate" else 1e-3)


@pytest.mark.exhaustive
def test_a_step_is_repeated_without_its_environment(run_dir: Path) -> None:
    rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if "train/loss" in row]
    # Not those of the cold start, which has more steps.
    last = max(row["step"] for row in rows if row["source"] == "trainer")
    # Without the folder of the environment in PYTHONPATH.
    command = [sys.executable, "-m", "megatron_rl.cli.main", "replay", run_dir, "--step", last]
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 of 1 steps equal the recorded ones in all their figures" in done.stdout


def told(example: str, entry: Any, call: str) -> list[str]:
    """What the tool may say to a call; []: it is not known here."""
    if example == "lookup":
        return [entry.get(call, "none")]
    if example == "calculate":
        product = re.fullmatch(r"([1-9][0-9]*)\*([1-9][0-9]*)", call)
        return [str(int(product[1]) * int(product[2]))] if product else []
    words = set(re.findall(r"\w+", call))
    return [one["text"] for one in entry if words & set(one["text"].split())] or ["none"]


def test_results_of_the_tool_are_holes_of_each_conversation(example: str, run_dir: Path) -> None:
    entries = {
        prompt["id"]: json.loads(prompt.get("entry", "null"))
        for prompt in read_jsonl(run_dir / "tasks" / "prompts.jsonl")
    }
    called = 0
    for record in records(run_dir):
        text, spans = record["text"], [span[1:] for span in record["spans"]]
        sampled = sum(end - start for start, end in spans)
        if not text.startswith("="):
            assert sampled == record["tokens"]
            continue
        call, _, rest = text[1:].partition("<eos>")
        # Given after the call: the token that closes it, if the policy did not write it, the
        # result, a colon. Each character of the tiny model's text is a token.
        results = [f"{one}:" for one in told(example, entries[record["prompt_id"]], call)]
        if not results:
            continue
        result = next(one for one in results if rest.startswith(one))
        holes = [
            (end, start)
            for (_, end), (start, _) in zip(spans, spans[1:], strict=False)
            if end < start
        ]
        called += 1
        assert len(holes) == 1
        assert holes[0][1] - holes[0][0] - len(result) in (0, 1)
        assert sampled == record["tokens"] - (holes[0][1] - holes[0][0])
        assert record["environment_s"] > 0
    assert called > 1000


def test_replies_are_counted_while_conversations_are_open(run_dir: Path) -> None:
    spans = [
        [RecordedSpan(*span) for span in line["spans"]]
        for path in (run_dir / "rollouts").glob("*.jsonl")
        for line in read_jsonl(path)
        if line.get("spans")
    ]
    recorded = sum(1 + len(given_ranges(one)) for one in spans)
    rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if "generator/turns" in row]
    # The last heartbeat is up to two seconds older than the last reply.
    assert sum(row["generator/turns"] for row in rows) == pytest.approx(recorded, rel=0.05)
    for row in rows:
        waiting, held = (
            row["generator/conversations_in_environment"],
            row["generator/conversations"],
        )
        # A conversation of this environment asks for one reply at a time.
        assert held - waiting == row["generator/running"] and held <= 64


def test_no_conversation_is_lost(run_dir: Path) -> None:
    rows = read_jsonl(run_dir / "metrics.jsonl")
    dropped = {
        name
        for row in rows
        for name, value in row.items()
        if name.startswith(("queue/groups_dropped_", "queue/completions_dropped_")) and value
    }
    assert dropped <= {"queue/groups_dropped_zero_variance", "queue/groups_dropped_not_needed"}
    assert all(row.get("train/skipped_steps", 0) == 0 for row in rows)
