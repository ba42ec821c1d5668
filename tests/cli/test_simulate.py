"""`megatron-rl simulate`: what it prints, what it compares, what it refuses."""

import json
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.config.gpus import GPUS
from megatron_rl.simulation.hardware import MEMORY_BYTES_PER_S
from megatron_rl.simulation.variants import parse_sweep
from megatron_rl.simulation.workload import LogNormalLengths, PassRates, Workload
from tests.plan.test_plan import LLAMA_8B
from tests.simulation.test_calibration import TRUTH, record, setting

SMALL = (
    "parallel.tensor=4", "parallel.sequence=true", "parallel.distributed_optimizer=true",
    "parallel.data=2", "generator.replicas=8", "generator.context_tokens=2048",
    "generator.kv_tokens=100000", "sampling.max_new_tokens=1024", "train.prompts_per_batch=8",
    "verifier.answers.workers=1",
    "train.group_size=8", "train.microbatch_tokens=8192", "model.recompute=full",
)  # fmt: skip
SHORT = ("--steps", "3", "--warm-up", "3")


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{tmp_path / "model"}"\n')
    return path


def called(config_path: Path, *arguments: str) -> int:
    return cli.main(["simulate", str(config_path), *arguments, *SHORT, *SMALL])


def test_json_has_the_figures(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(config_path, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["trainer_gpus"] == 8 and found["engine_gpus"] == 8
    parts = found["compute_s"] + found["wait_s"] + found["stall_s"]
    assert found["step_s"] == pytest.approx(parts, rel=1e-6)
    assert 0 <= found["trainer_idle"] <= 1 and 0 <= found["generator_idle"] <= 1
    assert found["staleness_max"] >= found["staleness_mean"] >= 0
    # 16 GB to 8 engines at 25 GB/s, in 240 rounds and one more for each further engine; 0.1 s.
    assert found["sync_s"] == pytest.approx(16.06e9 / 25e9 * 247 / 240 + 0.1, rel=0.01)


def test_a_prompt_has_300_tokens_or_what_the_context_leaves(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prompt_of(*given: str) -> str:
        capsys.readouterr()
        assert cli.main(["simulate", str(config_path), "--json", *SHORT, *SMALL, *given]) == 0
        return capsys.readouterr().out

    # Of the context of 2048 tokens.
    by_default = prompt_of("sampling.max_new_tokens=1948")
    assert by_default == prompt_of("sampling.max_new_tokens=1948", "--prompt-tokens", "100")
    assert by_default != prompt_of("sampling.max_new_tokens=1948", "--prompt-tokens", "50")
    assert prompt_of() == prompt_of("--prompt-tokens", "300")


def test_a_folder_is_slower_and_may_overlap(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {}
    for overlap in ((), ("expert.weights.overlap=true",), ("--overlap",)):
        assert called(config_path, "--json", "weights.method=folder", *overlap) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["sync_s"] == pytest.approx(16.06e9 / 2e9 + 0.1, rel=0.02)
        steps[overlap] = found["step_s"]
    assert steps["expert.weights.overlap=true",] == steps["--overlap",] != steps[()]


def test_splits_are_compared_and_the_best_is_the_shortest(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plots = tmp_path / "plots"
    arguments = ("--json", "--gpus", "16", "--sweep", "split=auto", "--plots", str(plots))
    assert called(config_path, *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    splits = {run["setting"]["split"]: run for run in found["runs"]}
    # A replica of the trainer takes 4 GPUs, and an engine one at least.
    assert set(splits) <= {"4", "8", "12"} and len(splits) >= 2
    assert all(run["trainer_gpus"] + run["engine_gpus"] == 16 for run in splits.values())
    shortest = min(run["step_s"] for run in splits.values())
    assert splits[found["best"]["split"]]["step_s"] <= 1.01 * shortest
    for name in ("steps.png", "shares.png"):
        assert (plots / name).read_bytes().startswith(b"\x89PNG")


def test_text_names_who_waits(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert called(config_path, "--sweep", "queue.max_staleness=0,2") == 0
    text = capsys.readouterr().out
    assert "max_staleness=0" in text and "best: max_staleness=2" in text
    assert "the trainer computes" in text


SHARED = (
    "generator.colocate=true", "weights.method=folder", "generator.release_memory=true",
    "weights.kv_cache=recompute",
)  # fmt: skip


def test_turns_on_the_trainers_gpus_take_the_sum(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(config_path, "--json", *SHARED) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["trainer_gpus"], found["engine_gpus"]) == (8, 0)
    # A second to give memory back and one to take it, around the rest.
    parts = found["compute_s"] + found["wait_s"] + found["stall_s"]
    assert found["step_s"] == pytest.approx(parts, rel=1e-6)
    assert found["sync_s"] == pytest.approx(1.0 + 16.06e9 / 2e9 + 0.1, rel=0.02)
    folder = config_path.with_name("folder.toml")
    folder.write_text('[weights]\nmethod = "folder"\n')
    assert called(config_path, "--json", "--config", str(folder)) == 0
    apart = json.loads(capsys.readouterr().out)
    assert found["compute_s"] == pytest.approx(apart["compute_s"] + 1.0, rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--sweep", "split"), "expected key=value"),
        (("--sweep", "nonsense=1"), "one of split"),
        (("--gpus", "16", "--sweep", "split=6"), "split=6 of 16 GPUs is not possible"),
        (("--sweep", "tp=3"), "does not divide"),
        (("--sweep", "dead=few"), "dead='few'"),
        (("--sweep", "mfu=0"), "mfu='0'"),
        (SHARED[:2], "release_memory=true in a simulation"),
        ((*SHARED, "--sweep", "split=4"), "engines have no GPUs of theirs"),
        (("--steps", "0"), "--steps 0"),
        (("--turns", "0"), "--turns 0"),
        (("--prompt-tokens", "1025"), "more than the 1024 that generator.context_tokens leaves"),
        (("--given-share", "2"), "--given-share must be between 0 and 1"),
        (("--zero-variance-share", "1"), "zero-variance-share"),
        (("--calibrate", "/nowhere"), "holds no run"),
    ],
)
def test_bad_input_says_what_to_do(
    config_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    arguments: tuple[str, ...],
    words: str,
) -> None:
    assert cli.main(["simulate", str(config_path), *SMALL, *arguments]) == 2
    assert words in caplog.text + capsys.readouterr().err


def test_every_known_gpu_has_its_bandwidth() -> None:
    assert set(MEMORY_BYTES_PER_S) == set(GPUS)


def test_a_sweep_is_read() -> None:
    assert parse_sweep("queue.max_staleness=0, 1,2") == ("queue.max_staleness", ["0", "1", "2"])


def test_few_places_are_doubted_after_a_run_of_one_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one_length = Workload(LogNormalLengths(100, 0.0), 20, PassRates(1e6, 1e6))
    record(tmp_path, setting(staleness=0), TRUTH, one_length)
    fitted = ["simulate", str(tmp_path / "config.toml"), "--calibrate", str(tmp_path), "--json"]
    assert cli.main([*fitted, "--sweep", "generator.max_running=32,8"]) == 0
    told = capsys.readouterr()
    assert "warning: max_running=8: its engines decode 8 completions at a time" in told.err
    assert "warning: max_running=32" not in told.err
    assert len(json.loads(told.out)["runs"]) == 2
