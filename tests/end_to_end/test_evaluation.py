"""`megatron-rl eval` with real processes: interrupted, gone on with, and compared."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.evaluation.figures import maj_at_k
from megatron_rl.evaluation.samples import of_records
from megatron_rl.protocol.rollout_files import read_records
from tests.end_to_end.commands import launched

pytestmark = [pytest.mark.slow(60), pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parent.parent.parent
FEW, MANY = 40, 160
# A random model writes single characters: some are right by chance, many are the same.
CONFIG = """
[model]
path = "{folder}/model"
dtype = "float32"
[generator]
engine = "hf"
max_running = 32
kv_tokens = 4096
context_tokens = 64
[sampling]
max_new_tokens = 24
[render]
system_prompt = ""
[reward]
length_margin_tokens = 2
[reward.tasks.character]
format_check = "none"
compare = "exact"
[eval]
temperature = 1.0
samples = 1
[[eval.sets]]
name = "few"
samples = 8
temperature = 0.8
max_new_tokens = 1
prompts = {{path = "{folder}/few.jsonl"}}
[[eval.sets]]
name = "many"
samples = 2
prompts = {{path = "{folder}/many.jsonl"}}
[expert.eval]
timeout_s = 120
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, sets and configuration."""
    folder = tmp_path_factory.mktemp("eval")
    make = [sys.executable, "-m", "tools.make_tiny_model", str(folder / "model")]
    subprocess.run(make, cwd=ROOT, check=True, timeout=200)
    for name, count in (("few", FEW), ("many", MANY)):
        rows = [
            {"task": "character", "question": f"{n}=", "answer": str(n % 10)} for n in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "run.toml").write_text(CONFIG.format(folder=folder))
    return folder


def left_after(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that still run so long later; the kernel takes a moment to end what was killed."""
    deadline = time.monotonic() + limit_s
    while (left := list(filter(is_alive, processes))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_an_evaluation_goes_on_where_it_was_interrupted(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    arguments = ["--config", folder / "run.toml", "--run-dir", results]
    few, many = (results / "rollouts" / f"eval_model.{name}.jsonl" for name in ("few", "many"))
    with launched("eval", folder / "model", *arguments) as run:
        deadline = time.monotonic() + 200
        while len(lines(many)) < 20:
            assert run.poll() is None and time.monotonic() < deadline, run.stdout.read()
            time.sleep(0.05)
        children = psutil.Process(run.pid).children(recursive=True)
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT, output
    assert left_after(children, 5.0) == []
    assert not (results / "eval.json").exists()
    earlier, done = lines(few), len(lines(many))
    assert len(earlier) == 8 * FEW and 20 <= done < 2 * MANY

    with launched("eval", folder / "model", *arguments) as run:
        output, _ = run.communicate(timeout=180)
    assert run.returncode == 0, output
    assert f"{MANY - done // 2} problems are missing" in output
    # What was there is there, and nothing came twice.
    assert lines(few) == earlier
    records = list(read_records(many))
    assert len({(r.prompt_id, r.index) for r in records}) == len(records) == 2 * MANY
    check_report(results, few)

    with launched("eval", folder / "model", *arguments) as run:
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 0 and "nothing is generated" in output and "maj@8" in output
    with launched("eval", "--compare", results, results, "--json") as run:
        output, _ = run.communicate(timeout=200)
    compared = json.loads(output)["sets"]
    assert {name: (s["problems"], s["difference"], s["p"]) for name, s in compared.items()} == {
        "few": (FEW, 0.0, 1.0), "many": (MANY, 0.0, 1.0),
    }  # fmt: skip


@pytest.mark.exhaustive
def test_a_dead_queue_ends_an_evaluation_and_nothing_is_left(folder: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    with launched("eval", "--config", folder / "run.toml", "--run-dir", results) as run:
        deadline = time.monotonic() + 200
        while not lines(results / "rollouts" / "eval_model.few.jsonl"):
            assert run.poll() is None and time.monotonic() < deadline, run.stdout.read()
            time.sleep(0.05)
        children = psutil.Process(run.pid).children(recursive=True)
        [queue] = [
            child
            for child in psutil.Process(run.pid).children()
            if "megatron_rl.rollout_queue.server" in child.cmdline()
        ]
        queue.kill()
        output, _ = run.communicate(timeout=200)
    assert run.returncode == 1 and "queue-model ended with signal 9" in output, output
    assert left_after(children, 5.0) == []
    assert not (results / "eval.json").exists()


def check_report(results: Path, few: Path) -> None:
    """eval.json says what the records say, counted here anew."""
    found = json.loads((results / "eval.json").read_text())["sets"]["few"]
    assert (found["temperature"], found["max_new_tokens"], found["samples"]) == (0.8, 1, 8)
    assert (found["problems"], found["missing_problems"], found["without_classes"]) == (FEW, 0, 0)
    rows = [json.loads(line) for line in lines(few)]
    right = sum(row["reason"] == "correct" for row in rows)
    assert found["accuracy"]["value"] == pytest.approx(right / len(rows))
    # Two wrong answers of a problem are of one class just where they are the same character.
    for a in rows[:64]:
        for b in rows[:64]:
            if a["prompt_id"] == b["prompt_id"] and min(a["answer_class"], b["answer_class"]) > 0:
                assert (a["answer_class"] == b["answer_class"]) == (a["text"] == b["text"])
    votes = [maj_at_k(p.classes, p.is_correct, 8) for p in of_records(read_records(few))]
    assert found["maj_at"]["8"]["value"] == pytest.approx(sum(votes) / FEW)
