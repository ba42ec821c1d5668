"""Submits each run of a sweep as a Slurm job that calls examples/launch.sh.

Used by `megatron-rl sweep --slurm`. Waiting and running jobs are not submitted again.
"""

import getpass
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import megatron_rl
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.whole_file import PRIVATE_FOLDER
from megatron_rl.sweep.folders import FAILURE
from megatron_rl.sweep.plan import Plan, PlannedRun

ROOT = Path(megatron_rl.__file__).resolve().parent.parent
_LAUNCH = ROOT / "examples" / "launch.sh"
_ANSWER_S = 60.0


def check_launch() -> None:
    """Raise InputError when examples/launch.sh cannot be used."""
    if not _LAUNCH.exists():
        raise InputError(f"--slurm needs {_LAUNCH}: work in a clone of the repository")
    if Path.cwd().resolve() != ROOT:
        # launch.sh resolves relative paths of the configuration from the root.
        raise InputError(f"--slurm: submit from the root of the repository, {ROOT}")


def check_programs() -> None:
    """Raise InputError when Slurm's programs are not on PATH."""
    for program in ("sbatch", "squeue"):
        if shutil.which(program) is None:
            raise InputError(
                f"{program} is not on PATH: submit where Slurm is, or print the scripts with "
                "--slurm --dry-run"
            )


def job_name(plan: Plan, run: PlannedRun) -> str:
    """A name unique among the user's jobs; it begins with the sweep's folder."""
    return f"{plan.sweep_dir.name}.{run.variant}.seed-{run.seed}"


def script_of(plan: Plan, run: PlannedRun) -> str:
    slurm = plan.sweep.slurm
    options = [
        f"--job-name={job_name(plan, run)}",
        f"--nodes={slurm.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={slurm.gpus_per_node}"] if slurm.gpus_per_node else []),
        "--exclusive",
        "--mem=0",
        f"--time={slurm.time}",
        f"--output={run.run_dir}/logs/slurm-%j.log",
        *slurm.options,
    ]
    command = [
        "bash", str(_LAUNCH), str(run.base), "--run-dir", str(run.run_dir), "--gpu", slurm.gpu,
        *run.overrides,
    ]  # fmt: skip
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH {shlex.quote(option)}" for option in options),
        "set -euo pipefail",
        f"cd {shlex.quote(str(ROOT))}",
        f"export PYTHON={shlex.quote(sys.executable)}",
        f"exec {shlex.join(command)}",
    ]
    return "\n".join(lines) + "\n"


def jobs_of_user() -> set[str]:
    """Names of the user's waiting and running jobs. Raises InputError."""
    user = getpass.getuser()
    text = _ask(["squeue", "--noheader", f"--user={user}", "--format=%j"])
    return set(text.splitlines())


def submit(plan: Plan, run: PlannedRun) -> str:
    """Write the script of a run and submit it; returns sbatch's output. Raises InputError."""
    run.run_dir.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    (run.run_dir / "logs").mkdir(exist_ok=True)
    (run.run_dir / FAILURE).unlink(missing_ok=True)
    path = run.run_dir / "job.sh"
    path.write_text(script_of(plan, run))
    return _ask(["sbatch", str(path)]).strip()


def _ask(command: list[str]) -> str:
    """Output of a Slurm program. Raises InputError with its error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"{command[0]} has not answered after {_ANSWER_S:.0f} s") from error
    if done.returncode:
        raise InputError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
