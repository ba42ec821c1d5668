"""Rehearsals of small models with planted faults, many in one process (`plants.py`)."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.rehearsal.rehearse import Options, Rehearsal, conclude, write_request

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = Options(choice="all", microbatches=3, mean_tokens=24)
TINY_STEP = ("train.microbatch_tokens=64", "generator.context_tokens=64", "model.dtype=bfloat16",
             "sampling.max_new_tokens=32",
             "train.prompts_per_batch=8")  # fmt: skip


def config_of(model: Path, *overrides: str) -> Config:
    path = model / "run.toml"
    path.write_text(f'[model]\npath = "{model}"\n')
    return load_config(path, list(overrides))


def rehearse_cases(
    folder: Path, cases: Mapping[str, tuple[Config, Options]]
) -> dict[str, Rehearsal]:
    """Rehearsals by name; the part of a name before a hyphen is its fault in PLANTS."""
    for name, (cfg, options) in cases.items():
        (folder / name).mkdir()
        write_request(folder / name, cfg, options)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.plants", str(folder)],
        cwd=ROOT, env=environment, check=True, timeout=280,
    )  # fmt: skip
    return {name: conclude(folder / name, *case) for name, case in cases.items()}
