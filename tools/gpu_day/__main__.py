"""Runs the tests of docs/gpu-evidence.md, files with many rows per minute first.

    python -m tools.gpu_day [--minutes M] [--out FOLDER] [--only WORD ...]

Each file of tests runs in a sub-process. A test that fails, hangs or crashes its process costs only
its own rows: the file continues after it. Results are written at once to FOLDER:

| file | content |
|---|---|
| day.md | machine and versions; rows to paste into the page; failures |
| record.jsonl | a line at the beginning and at the end of each test |
| log.txt | output of the tests |

After M minutes the run ends and prints the table so far.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from tools.gpu_day.rows import Outcome, Row, read_rows, table
from tools.gpu_day.runs import Day, run_file

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gpu-evidence.md"
ORDER = (
    "tests/gpu/test_collectives_cuda.py",
    "tests/gpu/test_exchange_cuda.py",
    "tests/gpu/test_settings_cuda.py",
    "tests/gpu/test_backend_cuda.py",
    "tests/gpu/test_checkpoint_cuda.py",
    "tests/gpu/test_convert_cuda.py",
    "tests/gpu/test_families_cuda.py",
    "tests/gpu/test_chain_cuda.py",
    "tests/gpu/test_overlap_cuda.py",
    "tests/gpu/test_sglang_cuda.py",
    "tests/gpu/test_scorer_cuda.py",
    "tests/gpu/test_release_cuda.py",
    "tests/generation/test_release_memory.py",
    "tests/generation/test_overlap_schedule.py",
    "tests/generation/test_expert_choices.py",
    "tests/generation/test_engine_contract.py",
    "tests/generation/test_deterministic_engine.py",
    # The last files take minutes: a large model, waits for watchdogs, engines of two ranks.
    "tests/gpu/test_numerics_cuda.py",
    "tests/gpu/test_tensor_overlap_cuda.py",
    "tests/gpu/test_groups_cuda.py",
    "tests/gpu/test_engine_ranks_cuda.py",
)
"""Files in order; tests/tools/test_gpu_day.py checks that each row's file is included."""

PACKAGES = ("torch", "nvidia-nccl-cu13", "transformer-engine", "megatron-core", "sglang")
_TIMEOUT_S = 30.0


def main() -> int:
    """Command line. Exit code 1: a test failed or hung."""
    options = _parse()
    rows = [row for row in read_rows(PAGE.read_text()) if row.path]
    files = [path for path in ORDER if any(word in path for word in options.only or [""])]
    options.out.mkdir(parents=True, exist_ok=True)
    day = Day(
        record=options.out / "record.jsonl",
        log=options.out / "log.txt",
        test_s=options.test_s,
        ends_at=time.monotonic() + 60 * options.minutes,
    )
    host = f"{hardware()}, {versions()}"
    print(host)
    outcomes: dict[str, Outcome] = {}
    for path in files:
        for test, outcome in run_file(day, path):
            outcomes[test] = outcome
            print(
                f"{outcome.result:<8}{outcome.seconds:6.1f} s  {test}  {outcome.text}", flush=True
            )
        (options.out / "day.md").write_text(summary(rows, outcomes, host))
    print(summary(rows, outcomes, host))
    return int(any(o.result in ("failed", "hung") for o in outcomes.values()))


def summary(rows: list[Row], outcomes: dict[str, Outcome], host: str) -> str:
    date = datetime.now(UTC).date().isoformat()
    failed = [
        f"- {test}: {outcome.result}: {outcome.text}"
        for test, outcome in outcomes.items()
        if outcome.result in ("failed", "hung")
    ]
    left = [f"- {row.claim}" for row in rows if not any(row.takes(test) for test in outcomes)]
    return "\n".join(
        [
            *(f"{host}\n", table(rows, outcomes, hardware(), date)),
            *("\nFailed or hung:", *(failed or ["- none"])),
            *("\nNot reached:", *(left or ["- none"]), ""),
        ]
    )


def hardware() -> str:
    """GPUs and driver, such as "1 x NVIDIA H100 80GB HBM3, driver 580.65.06"."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"no GPU ({type(error).__name__} of nvidia-smi)"
    gpus = Counter(line.strip().replace(", ", ", driver ") for line in said.splitlines())
    return "; ".join(f"{count} x {gpu}" for gpu, count in gpus.items())


def versions() -> str:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=120.0, help="time limit (%(default)s)")
    parser.add_argument(
        "--test-s", type=float, default=300.0, help="deadline of each test in seconds (%(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-day"), help="output folder")
    parser.add_argument(
        "--only", nargs="+", default=[], help="files whose path has one of the words"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
