"""The whole system: `quickstart.sh --tiny` on this machine, and a run that is stopped midway."""

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from generation.sglang_command import KEY_FILE
from megatron_rl.config.files import load_config
from megatron_rl.protocol.metrics import read_jsonl

pytestmark = [pytest.mark.slow(180), pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parent.parent.parent
SUMMARY_KEYS = {
    "engine", "engine_version", "megatron_core_version", "trainer_world_size", "tp", "pp", "dp",
    "model_parameters", "steps", "rollouts_trained", "groups_dropped_zero_variance", "eval_n",
    "accuracy_before", "accuracy_after", "accuracy_se_before", "accuracy_se_after",
    "reward_first10", "reward_last10", "rollouts_spanning_versions", "staleness_mean",
    "staleness_max", "logprob_gap_mean", "weight_sync_s_median", "generator_idle_fraction",
    "trainer_idle_fraction", "wall_s", "hf_export",
}  # fmt: skip


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """Processes whose command line, or that of an ancestor, names the run folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(run_dir) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("tiny") / "run"
    command = ["bash", "examples/quickstart.sh", "--tiny", "--run-dir", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return run_dir, json.loads((run_dir / "summary.json").read_text())


def test_sampled_accuracy_rises(finished: tuple[Path, dict[str, Any]]) -> None:
    _, summary = finished
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.3
    assert summary["accuracy_after"] >= 0.6


def test_summary_is_whole_and_true_to_the_run(finished: tuple[Path, dict[str, Any]]) -> None:
    run_dir, summary = finished
    assert SUMMARY_KEYS <= summary.keys()
    assert (summary["engine"], summary["tp"], summary["trainer_world_size"]) == ("sglang", 2, 2)
    assert summary["rollouts_spanning_versions"] > 0
    assert summary["staleness_max"] <= summary["max_staleness"]
    rows = read_jsonl(run_dir / "metrics.jsonl")
    trained = sum(row.get("queue/rollouts_trained", 0) for row in rows)
    assert summary["rollouts_trained"] == trained == summary["steps"] * 256
    assert sum(row.get("train/skipped_steps", 0) for row in rows) == 0
    steps = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    assert len(steps) == summary["steps"]
    assert len(steps[0].read_text().splitlines()) == 256


def test_generators_and_trainer_agree_on_logprobs(finished: tuple[Path, dict[str, Any]]) -> None:
    # Where no completion spans versions the caches are fresh, and only rounding is left.
    run_dir, _ = finished
    gaps = [
        row["train/logprob_gap"]
        for row in read_jsonl(run_dir / "metrics.jsonl")
        if row.get("train/logprob_gap_tokens") and not row["queue/rollouts_spanning_versions"]
    ]
    assert gaps and max(gaps) < 1e-4


def test_exported_model_loads_in_transformers(finished: tuple[Path, dict[str, Any]]) -> None:
    _, summary = finished
    model = AutoModelForCausalLM.from_pretrained(summary["hf_export"], dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == summary["model_parameters"]


def test_finished_run_given_again_says_so_and_changes_nothing(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    run_dir, _ = finished
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}
    command = ["bash", "examples/quickstart.sh", "--tiny", "--run-dir", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert f"the run in {run_dir} has ended: it is complete after step 30" in done.stderr
    after = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}
    assert after == before


def test_finished_run_leaves_no_process(finished: tuple[Path, dict[str, Any]]) -> None:
    run_dir, _ = finished
    assert processes_of(run_dir) == []


def test_the_run_and_examples_with_rewards_are_replayed(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    examples = [
        {"prompt": f"{n}{n + 1}{n + 2}", "response": f"{n + 2}{n + 1}{n}", "reward": n % 2}
        for n in (1, 2, 3, 4)
    ]
    (tmp_path / "sft.jsonl").write_text("\n".join(map(json.dumps, examples)))
    run_dir = tmp_path / "offline"
    command = [
        *run_command(finished[0], run_dir), "train.steps=2", "algorithm.preset=agro",
        "expert.algorithm.shaping.temperature=0.1", "algorithm.zero_variance_groups=keep",
        # Nothing is sampled, by the engine that starts soonest.
        "replay.share=1", "generator.engine=hf",
        f'replay.runs=["{finished[0]}"]', f'replay.datasets=["{tmp_path}/sft.jsonl"]',
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [row for row in training_rows(run_dir) if "train/loss" in row]
    # Every group of 30 steps and of the zero-variance ones between, and four of one trace each.
    recorded = [*(finished[0] / "rollouts").glob("[sd]*_0*.jsonl")]
    lines = sum(len(path.read_text().splitlines()) for path in recorded)
    assert [row["queue/replay_groups"] for row in rows] == [lines / 16 + 4] * 2
    assert [row["queue/replayed_groups"] for row in rows] == [16] * 2
    # The first update is made from the reference itself: nothing differs from it yet.
    assert rows[0]["train/reference_k1"] == pytest.approx(0, abs=1e-6)
    assert 0 < rows[0]["train/grad_norm"] and rows[1]["train/reference_k3"] > 0
    # Nothing was sampled.
    assert sum(path.stat().st_size for path in (run_dir / "rollouts").iterdir()) == 0


@pytest.mark.exhaustive
def test_a_run_that_trains_while_weights_travel_agrees_with_itself(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = tmp_path / "overlapped"
    command = [
        *run_command(finished[0], run_dir), "train.steps=8", "eval.prompts=100",
        "expert.weights.overlap=true", "weights.method=folder",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [row for row in training_rows(run_dir) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row["weight_sync/generators"] == 1 for row in rows)
    assert sum(row.get("weight_sync/damaged_parcels", 0) for row in rows) == 0
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["staleness_max"] <= summary["max_staleness"] == 1
    # Versions of records, exported model and metrics fit each other.
    audit = [*command[:3], "audit", str(run_dir)]
    done = subprocess.run(audit, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_outlives_its_roles_and_when_stopped_saves_its_step_and_leaves_no_process(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "stopped"
    command = run_command(finished[0], run_dir)
    run = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        wait_for_a_step(run_dir, run)
        kill_a_role("verifier", "verification.worker", run_dir, run)
        kill_a_role("queue", "megatron_rl.rollout_queue.server", run_dir, run)
        kill_a_role("trainer", "megatron_rl.trainer.torchrun", run_dir, run)
        assert_closed_doors(run_dir, run)
        children = psutil.Process(run.pid).children(recursive=True)
        assert len(children) >= 6  # queue, generator, SGLang's own, verifier, torchrun, two ranks
        assert not loads_torch("generation.worker", run)
        run.send_signal(number)
        output, _ = run.communicate(timeout=200)
        assert run.returncode == 128 + number
        # What ends with the launcher, such as Python's tracker of its child, needs a moment.
        psutil.wait_procs(children, timeout=60)
        assert not any(child.is_running() and not is_zombie(child) for child in children)
    finally:
        if run.poll() is None:
            run.kill()
            run.wait(60)
    # The restarted queue continued: each group was trained on once.
    trained = [
        (record["group"], record["index"])
        for path in (run_dir / "rollouts").glob("step_*.jsonl")
        for record in read_jsonl(path)
    ]
    assert len(set(trained)) == len(trained) > 0
    assert "the queue continues after its death" in (run_dir / "logs/queue.log").read_text()
    # No step is lost, though the configuration asks for no checkpoint so early.
    steps = [row["step"] for row in training_rows(run_dir) if "train/loss" in row]
    [checkpoint] = (run_dir / "checkpoints").iterdir()
    assert checkpoint.name == f"step_{steps[-1]:06d}" and (checkpoint / "COMPLETE").exists()
    resumes = f"The same command resumes the run after step {steps[-1]} of 10000, from {checkpoint}"
    assert resumes in output.replace("\n", " ")


def run_command(finished: Path, run_dir: Path) -> list[str]:
    """A run without end, from the finished run's cold start."""
    tasks = finished / "tasks"
    return [
        str(ROOT / ".venv/bin/python"), "-m", "megatron_rl.cli.main", "run",
        "--config", "examples/tiny.toml", "--run-dir", str(run_dir),
        f"model.path={finished / 'hf' / 'cold_start'}",
        f"prompts.0.path={tasks / 'prompts.jsonl'}",
        "sft.steps=0", "train.steps=10000", "eval.prompts=0", "checkpoint.every_steps=5000",
    ]  # fmt: skip


def loads_torch(module: str, run: subprocess.Popen) -> bool:
    """Whether the process of a role has torch's libraries."""
    [role] = [child for child in psutil.Process(run.pid).children() if module in child.cmdline()]
    return "libtorch" in Path(f"/proc/{role.pid}/maps").read_text()


def assert_closed_doors(run_dir: Path, run: subprocess.Popen) -> None:
    """Sockets listen on loopback alone, folder and configuration are private, the label secret."""
    doctor = [str(ROOT / ".venv/bin/python"), "-m", "megatron_rl.cli.main", "doctor"]
    deadline = time.monotonic() + 90
    while True:
        before = listeners_of(run)
        done = subprocess.run(
            [*doctor, "--listening", str(run_dir), "--json"],
            cwd=ROOT, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        there, rows = listeners_of(run), json.loads(done.stdout)
        needs = {row["what"]: row["needs"] for row in rows}
        # Roles that were killed are starting again: their sockets come and go meanwhile.
        if there == before and "weights for generators" in needs:
            break
        assert time.monotonic() < deadline, f"listeners keep changing, or one is missing: {needs}"
    told = {(row["pid"], row["address"], row["port"]) for row in rows if row["kind"] == "tcp"}
    assert there == told and {address for _, address, _ in there} == {"127.0.0.1"}
    assert needs["SGLang's HTTP"] == "API key" and needs["queue for verifiers"] == "label"
    assert needs["weights for generators"] == "label" and "torchrun's store" in needs
    assert "unknown" not in needs
    assert_secrets_stay(run_dir, tree_of(run))


def tree_of(run: subprocess.Popen) -> list[psutil.Process]:
    return [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]


def listeners_of(run: subprocess.Popen) -> set[tuple[int, str, int]]:
    """Process, address and port, by psutil's table of the whole host."""
    pids = {process.pid for process in tree_of(run)}
    return {
        (one.pid, one.laddr.ip, one.laddr.port)
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.pid in pids
    }


def assert_secrets_stay(run_dir: Path, tree: list[psutil.Process]) -> None:
    """Label and engine's key are in private files, and in no command line, variable or log."""
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    label = load_config(run_dir / "config.toml").ports.label
    words = [word for process in tree for word in process.cmdline()]
    [key_file] = {Path(word) for word in words if word.endswith(KEY_FILE)}
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    key = key_file.read_text().removeprefix("api-key: ").strip()
    assert (len(label), len(key)) == (32, 64)
    told = [*words, *(value for process in tree for value in process.environ().values())]
    assert not any(secret in word for secret in (label, key) for word in told)
    holders = {key_file} | {
        path
        for path in run_dir.rglob("*")
        if path.is_file() and any(one.encode() in path.read_bytes() for one in (label, key))
    }
    # The queue's state has the configuration of each stage.
    ledger = {*(run_dir / "ledger").iterdir()}
    assert holders - ledger == {key_file, run_dir / "config.toml"}
    private = holders | ledger
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert len([*(run_dir / "logs").iterdir()]) > 5


def wait_for_a_step(run_dir: Path, run: subprocess.Popen) -> None:
    deadline = time.monotonic() + 150
    while not any("train/loss" in row for row in training_rows(run_dir)):
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)


def kill_a_role(kind: str, module: str, run_dir: Path, run: subprocess.Popen) -> None:
    """Returns when another one was started and steps have followed."""
    [role] = [child for child in psutil.Process(run.pid).children() if module in child.cmdline()]
    role.kill()
    deadline = time.monotonic() + 100
    while True:
        rows = read_jsonl(run_dir / "metrics.jsonl")
        restarted = [n for n, row in enumerate(rows) if f"launch/{kind}_restarts" in row]
        if restarted and sum("train/loss" in row for row in rows[restarted[0] :]) > 2:
            break
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)


def training_rows(run_dir: Path) -> list[dict[str, Any]]:
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [row for row in rows if row["source"] == "trainer"]


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
