"""The files in examples/sweeps: all their variants load, and say what their comments do."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.sweep.plan import Plan, make_plan
from megatron_rl.sweep.sweep_file import load_sweep
from tools import make_skills

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = ROOT / "examples" / "sweeps"


def shipped(name: str, tmp_path: Path) -> Plan:
    return make_plan(load_sweep(SWEEPS / f"{name}.toml"), tmp_path)


@pytest.mark.parametrize("name", [path.stem for path in sorted(SWEEPS.glob("*.toml"))])
def test_all_variants_of_a_shipped_sweep_load_and_differ(name: str, tmp_path: Path) -> None:
    plan = shipped(name, tmp_path)
    assert plan.sweep.name == name
    is_study = name in ("transfer", "cold_start_or_rl", "distilled")
    assert plan.sweep.base.name == ("tiny_skills.toml" if is_study else "tiny.toml")
    assert plan.same_configurations == []
    assert len(plan.runs) == len(plan.variants) * 3 >= 9


def test_the_sweep_of_concurrency_keeps_its_ratios_and_its_groups(tmp_path: Path) -> None:
    runs = {run.variant: run.config for run in shipped("concurrency", tmp_path).runs}
    for name, config in runs.items():
        batch = config.train.prompts_per_batch * config.train.group_size
        in_flight = config.generator.max_running * config.generator.replicas
        assert float(name.removeprefix("ratio_")) == in_flight / batch
        assert config.train.steps * config.train.prompts_per_batch == 480
        # So many may be open that the engine is full.
        assert (config.queue.max_staleness + 1) * batch >= in_flight


def test_variants_of_transfer_differ_in_the_mixture_alone(tmp_path: Path) -> None:
    runs = {run.variant: run.config for run in shipped("transfer", tmp_path).runs}
    weights = {name: [one.weight for one in config.prompts] for name, config in runs.items()}
    assert weights == {"both": [1, 1], "math_only": [1, 0], "code_only": [0, 1]}
    for config in runs.values():
        assert [one.name for one in config.prompts] == ["math", "code"]
        assert config.sft.steps == 0 and config.train == runs["both"].train


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("cold_start_or_rl", {"rl_only": (0, 16), "sft_only": (60, 0), "sft_rl": (60, 16)}),
        ("distilled",
         {"distilled": (60, 0), "distilled_twice": (120, 0), "distilled_rl": (60, 16)}),
    ],
)  # fmt: skip
def test_studies_of_stages_differ_in_their_steps_alone(
    name: str, steps: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    runs = {run.variant: run.config for run in shipped(name, tmp_path).runs}
    assert {name: (c.sft.steps, c.train.steps) for name, c in runs.items()} == steps
    for config in runs.values():
        # The skill that is held back is no source of prompts, and is evaluated.
        assert [one.name for one in config.eval.sets] == ["math", "code", "instructions"]
        assert "instructions" not in {one.name for one in config.prompts}


@pytest.mark.parametrize("name", ["transfer", "cold_start_or_rl", "distilled"])
def test_the_script_makes_every_file_that_a_study_names(name: str, tmp_path: Path) -> None:
    script = (SWEEPS / "tiny.sh").read_text()
    assert "START=$PWD/runs/sweep-start\n" in script and "skills=$START/skills " in script
    made = {f"{one}.jsonl" for one in make_skills.make(make_skills.Counts(), seed=0)}
    made |= {Path(word).name for word in re.findall(r'--out "\$skills/([^"]+)"', script)}
    for run in shipped(name, tmp_path).runs:
        sources = [*run.config.prompts, *(one.prompts for one in run.config.eval.sets)]
        files = [source.path for source in sources]
        files += [run.config.sft.dataset] if run.config.sft.steps else []
        for file in files:
            assert file is not None and file.parent == ROOT / "runs/sweep-start/skills"
            assert file.name in made


@pytest.mark.parametrize("name", [path.stem for path in sorted(SWEEPS.glob("*.toml"))])
def test_a_dry_run_prints_the_command_of_each_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    file = str(SWEEPS / f"{name}.toml")
    assert cli.main(["sweep", file, "--dry-run", "--sweep-dir", str(folder)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if " run --config " in line]
    assert len(lines) == len(shipped(name, tmp_path).runs) and not folder.exists()


def test_the_off_policy_sweep_is_the_whole_grid() -> None:
    sweep = load_sweep(SWEEPS / "off_policy.toml")
    assert sweep.grid == {
        "algorithm.preset": ["magistral", "aipo", "tis", "icepop", "cispo", "gspo"],
        "queue.max_staleness": [0, 1, 2, 4, 8],
    }
    assert "train.minibatches=4" in sweep.overrides


@pytest.mark.parametrize("arguments", [[], ["nowhere.toml"]])
def test_the_script_prints_its_usage_before_it_installs_anything(arguments: list[str]) -> None:
    script = SWEEPS / "tiny.sh"
    done = subprocess.run(
        ["bash", str(script), *arguments], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "examples/sweeps/FILE.toml" in done.stderr and "Exit status" in done.stderr
