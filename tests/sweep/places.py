"""Sweeps of two variants for tests, run by `child.py`.

`python -m tests.sweep.places FILE DIR` runs one as the command does.
"""

import sys
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.sweep import run_here
from megatron_rl.protocol.process import run_main
from megatron_rl.sweep.plan import Plan, PlannedRun, make_plan
from megatron_rl.sweep.sweep_file import load_sweep

CHILD = Path(__file__).with_name("child.py")
SWEEP = """
name = "rates"
base = "base.toml"
seeds = [0, 1]
metrics = ["accuracy_after"]
timeout_s = 60

[[variants]]
name = "low"
overrides = ["optimizer.lr=0.25"]

[[variants]]
name = "high"
overrides = ["optimizer.lr=0.5"]
"""


def write_sweep(folder: Path, text: str = SWEEP) -> Path:
    """The file of a sweep, and its base beside it."""
    (folder / "base.toml").write_text("[train]\nsteps = 3\n")
    path = folder / "rates.toml"
    path.write_text(text)
    return path


def plan_of(folder: Path, text: str = SWEEP, *overrides: str) -> Plan:
    """The plan of a sweep in `folder`, whose runs go to folder/sweep."""
    (folder / "sweep").mkdir(exist_ok=True)
    return make_plan(load_sweep(write_sweep(folder, text)), folder / "sweep", overrides)


def child_command(run: PlannedRun) -> list[str]:
    """What stands for `megatron-rl run`."""
    return [sys.executable, str(CHILD), *run.arguments]


def main(file: Path, sweep_dir: Path) -> int:
    """Exit code of the sweep."""
    plan = make_plan(load_sweep(file), sweep_dir)
    codes: list[int] = []
    code = run_main("sweep", lambda: codes.append(run_here(plan, Console(), child_command)))
    return code or codes[0]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
