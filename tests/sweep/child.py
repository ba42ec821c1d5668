"""Stands for `megatron-rl run` in tests: leaves a run folder as that does, within a second.

Files beside the folders of the variants say what a variant's child does: `fail-VARIANT` makes it
fail, `hang-VARIANT` makes it wait for SIGTERM. Its accuracy is optimizer.lr + run.seed / 100.
"""

import json
import signal
import sys
import time
from pathlib import Path

from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.launcher.run_folder import check_run_folder

CALLS = "calls.txt"
"""File beside the folders of the variants: each start and each end in good order."""
HANG_S = 100.0


def main(arguments: list[str]) -> None:
    """arguments: of megatron-rl."""
    assert (arguments[0], arguments[1], arguments[3]) == ("run", "--config", "--run-dir")
    base, run_dir = Path(arguments[2]), Path(arguments[4])
    config = load_config(base, [*arguments[5:], f"run.dir={run_dir}"])
    check_run_folder(config)
    variant, sweep_dir = run_dir.parent.name, run_dir.parent.parent
    note(sweep_dir, f"start {variant} {config.run.seed}")
    (run_dir / "config.toml").write_text(dump_toml(config))
    if (sweep_dir / f"fail-{variant}").exists():
        print("Traceback of many lines")
        sys.exit("megatron-rl: the model folder m is no model")
    if (sweep_dir / f"hang-{variant}").exists():
        hang(sweep_dir, variant)
    summary = {
        "steps": config.train.steps,
        "accuracy_after": config.optimizer.lr + config.run.seed / 100,
        "wall_s": {"total": 2.5},
    }
    (run_dir / "summary.json").write_text(json.dumps(summary))


def hang(sweep_dir: Path, variant: str) -> None:
    """Wait for SIGTERM, and end in good order."""

    def end(number: int, frame: object) -> None:
        note(sweep_dir, f"ended {variant}")
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    note(sweep_dir, f"hanging {variant}")
    time.sleep(HANG_S)


def note(sweep_dir: Path, line: str) -> None:
    """Append a line to the file of calls."""
    with (sweep_dir / CALLS).open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
