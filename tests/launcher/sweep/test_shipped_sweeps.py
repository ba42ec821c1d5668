"""The files in examples/sweeps: all their variants load, and say what their comments do."""

import subprocess
from pathlib import Path

import pytest

from megatron_rl.launcher.sweep.plan import Plan, make_plan
from megatron_rl.launcher.sweep.sweep_file import load_sweep

SWEEPS = Path(__file__).resolve().parents[3] / "examples" / "sweeps"


def shipped(name: str, tmp_path: Path) -> Plan:
    return make_plan(load_sweep(SWEEPS / f"{name}.toml"), tmp_path)


@pytest.mark.parametrize("name", [path.stem for path in sorted(SWEEPS.glob("*.toml"))])
def test_all_variants_of_a_shipped_sweep_load_and_differ(name: str, tmp_path: Path) -> None:
    plan = shipped(name, tmp_path)
    assert plan.sweep.name == name and plan.sweep.base.name == "tiny.toml"
    assert plan.same_configurations == []
    assert len(plan.runs) == len(plan.variants) * 3 >= 9


def test_the_sweep_of_concurrency_keeps_its_ratios_and_its_groups(tmp_path: Path) -> None:
    runs = {run.variant: run.config for run in shipped("concurrency", tmp_path).runs}
    for name, config in runs.items():
        batch = config.train.groups_per_batch * config.train.group_size
        in_flight = config.generator.max_running * config.generator.replicas
        assert float(name.removeprefix("ratio_")) == in_flight / batch
        assert config.train.steps * config.train.groups_per_batch == 480
        # So many may be open that the engine is full.
        assert (config.queue.max_staleness + 1) * batch >= in_flight


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
        ["bash", str(script), *arguments], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "examples/sweeps/FILE.toml" in done.stderr and "Exit status" in done.stderr
