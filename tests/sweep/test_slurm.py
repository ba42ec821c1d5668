"""Batch scripts by their text, and submission to programs that stand for Slurm's."""

import subprocess
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.sweep.slurm import ROOT
from tests.sweep.places import SWEEP, plan_of

SETTINGS = """
[slurm]
nodes = 4
gpus_per_node = 8
time = "12:00:00"
gpu = "h200"
options = ["--partition=big", "--comment=of two words"]
"""
PLACES = ("model.path=models/m", "prompts.0.path=p.jsonl")
# Standing for Slurm: they note what they were asked.
SBATCH = '#!/bin/sh\necho "$1" >>"{folder}/submitted"\necho "Submitted batch job 7"\n'
SQUEUE = '#!/bin/sh\necho "$@" >"{folder}/asked"\necho sweep.low.seed-0\n'
REFUSE = "#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n"


def prepare(folder: Path) -> list[str]:
    """Writes the sweep; the arguments of the command but the last."""
    plan_of(folder, SWEEP)
    (folder / "rates.toml").write_text(SWEEP + SETTINGS)
    (folder / "base.toml").write_text("[train]\nsteps = 3\n[[prompts]]\n")
    place = ["--sweep-dir", str(folder / "sweep")]
    return ["sweep", str(folder / "rates.toml"), *place, *PLACES, "--slurm"]


def put_programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    for name, text in programs.items():
        path = folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(folder=folder))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")


def test_a_script_asks_for_the_settings_and_starts_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main([*prepare(tmp_path), "--dry-run"]) == 0
    scripts = capsys.readouterr().out.split("#!/usr/bin/env bash\n")[1:]
    assert len(scripts) == 4
    folder = tmp_path / "sweep" / "high" / "seed-1"
    lines = scripts[3].splitlines()
    assert lines[:10] == [
        "#SBATCH --job-name=sweep.high.seed-1",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --exclusive",
        "#SBATCH --mem=0",
        "#SBATCH --time=12:00:00",
        f"#SBATCH --output={folder}/logs/slurm-%j.log",
        "#SBATCH --partition=big",
        "#SBATCH '--comment=of two words'",
    ]
    assert lines[10] == "set -euo pipefail" and lines[11] == f"cd {ROOT}"
    assert lines[13] == (
        f"exec bash {ROOT}/examples/launch.sh {tmp_path}/base.toml --run-dir {folder} --gpu h200 "
        "model.path=models/m "
        "prompts.0.path=p.jsonl optimizer.lr=0.5 run.seed=1"
    )
    assert not folder.exists()
    path = tmp_path / "script.sh"
    path.write_text(scripts[3])
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)


def test_without_gpus_none_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = prepare(tmp_path)
    path = tmp_path / "rates.toml"
    path.write_text(path.read_text().replace("gpus_per_node = 8", "gpus_per_node = 0"))
    assert cli.main([*arguments, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text.count("#SBATCH --nodes=4") == 4 and "gpus-per-node" not in text


def test_jobs_that_slurm_knows_are_not_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    put_programs(tmp_path, monkeypatch, sbatch=SBATCH, squeue=SQUEUE)
    assert cli.main(prepare(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "low seed 0: waits or runs" in text
    assert "high seed 0: Submitted batch job 7" in text
    submitted = (tmp_path / "submitted").read_text().splitlines()
    folders = [tmp_path / "sweep" / name for name in ("high/seed-0", "low/seed-1", "high/seed-1")]
    assert submitted == [str(folder / "job.sh") for folder in folders]
    # Slurm writes its log there.
    assert all((folder / "logs").is_dir() for folder in folders)
    assert (tmp_path / "asked").read_text().startswith("--noheader --user=")


def test_what_slurm_refuses_is_shown_and_leaves_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    put_programs(tmp_path, monkeypatch, sbatch=REFUSE, squeue=SQUEUE)
    assert cli.main(prepare(tmp_path)) == 1
    assert capsys.readouterr().out.count("failed: sbatch: error: invalid partition") == 3


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (ROOT, "sbatch is not on PATH"),
        (ROOT / "tests", "submit from the root of the repository"),
    ],
)
def test_what_slurm_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    where: Path, words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(where)
    put_programs(tmp_path, monkeypatch, other="")
    assert cli.main(prepare(tmp_path)) == 2
    assert words in caplog.text


def test_prompts_without_a_file_are_left_to_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    arguments = [word for word in prepare(tmp_path) if not word.startswith("prompts.0")]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "--prompts" not in capsys.readouterr().out
