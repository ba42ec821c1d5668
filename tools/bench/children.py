"""Runs the sub-processes of benchmarks; makes their models and the peers' virtual environments.

Every sub-process runs in ROOT with a deadline and a log file, and ends with the benchmark.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config
from megatron_rl.launcher.ports import find_free
from megatron_rl.protocol.metrics import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
HOST = "127.0.0.1"
MODEL_TIMEOUT_S = 900.0
TRL_PINS = Path(__file__).with_name("requirements-trl.txt")
VLLM_PINS = ROOT / "requirements" / "vllm.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
Job, Result = TypeVar("Job", bound=msgspec.Struct), TypeVar("Result")
_END_GRACE_S = 30.0
_TAIL_LINES = 20
_INSTALL_TIMEOUT_S = 1200.0


class ChildFailed(RuntimeError):
    """A command failed or took too long; the text names it and shows the end of its log."""


@contextlib.contextmanager
def background(
    command: Sequence[object], *, log: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """Run a command in ROOT during the block, with its output in `log`.

    The block's end sends SIGTERM, so that the command can end its own children, then SIGKILL.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | (environment or {}),
            cwd=ROOT,
        )
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(_END_GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def run_child(
    command: Sequence[object],
    *,
    log: Path,
    timeout_s: float,
    environment: dict[str, str] | None = None,
) -> None:
    """Run a command in ROOT to its end, with its output in `log`. Raises ChildFailed."""
    problem = f"still ran after {timeout_s:.0f} s"
    with background(command, log=log, environment=environment) as child:
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(timeout_s)
            problem = f"ended with exit code {code}" if code else ""
    if problem:
        tail = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        words = " ".join(map(str, command))
        raise ChildFailed("\n".join([f"{words}\n{problem}. The end of {log}:", *tail]))


def run_job(
    python: str | Path,
    module: str,
    job: dict[str, Any],
    *,
    path: Path,
    timeout_s: float,
    environment: dict[str, str],
) -> list[dict[str, Any]]:
    """Run `python -m module JOB.json`; returns the rows that it wrote. Raises ChildFailed.

    path: file name without suffix of the job (.json), its log (.log) and its rows (.jsonl).
    """
    rows = path.with_suffix(".jsonl").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".json").write_text(json.dumps(job | {"rows": str(rows)}, indent=1))
    command = [python, "-m", module, path.with_suffix(".json")]
    log = path.with_suffix(".log")
    run_child(command, log=log, timeout_s=timeout_s, environment=environment)
    return read_jsonl(rows)


def write_job(config: Config, job: msgspec.Struct) -> Path:
    """Write config.toml and the job of its processes into the run's folder; returns the folder."""
    folder = config.run.dir
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(dump_toml(config))
    (folder / "job.json").write_bytes(msgspec.json.encode(job))
    return folder


def read_job(kind: type[Job]) -> tuple[Config, Job]:
    """Configuration and job of `write_job` in the folder on this process's command line."""
    parser = argparse.ArgumentParser(description="process of a benchmark, started by it")
    parser.add_argument("folder", type=Path, help="written by children.write_job")
    folder = parser.parse_known_args()[0].folder
    job = msgspec.json.decode((folder / "job.json").read_bytes(), type=kind)
    return load_config(folder / "config.toml"), job


def run_ranks(
    module: str,
    folder: Path,
    result: type[Result],
    *,
    ranks: int,
    timeout_s: float,
    environment: dict[str, str] | None = None,
) -> Result:
    """Run a module under torchrun on the folder of `write_job`. Raises ChildFailed.

    result: type of the result.json that rank 0 writes. environment: None: `rank_environment`.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    command += ["--master-addr", HOST, "--master-port", find_free(HOST), "-m", module, folder]
    environment = rank_environment() if environment is None else environment
    run_child(command, log=folder / "ranks.log", timeout_s=timeout_s, environment=environment)
    return msgspec.json.decode((folder / "result.json").read_bytes(), type=result)


def environment(*, threads: int = 1) -> dict[str, str]:
    """Variables of a sub-process: `threads` threads, this tree's modules, no GPU, no hub."""
    path = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def rank_environment() -> dict[str, str]:
    """`environment` of ranks and generators, which end with their parent."""
    return environment() | {"MEGATRON_RL_LAUNCHED": "1"}


def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct in bfloat16, made on first use. Raises ChildFailed."""
    folder = CACHE / "smollm2-135m-instruct"
    run_tool("convert_smollm2", folder, log=CACHE / "bench" / "convert_smollm2.log")
    return folder


def run_tool(name: str, *arguments: object, log: Path) -> None:
    """Run `python -m tools.NAME`. Raises ChildFailed."""
    command = [sys.executable, "-m", f"tools.{name}", *arguments]
    run_child(command, log=log, timeout_s=MODEL_TIMEOUT_S)


def llama(
    vocab: int, hidden: int, ffn: int, layers: int, heads: tuple[int, int], **more: int
) -> dict[str, Any]:
    """Arguments of LlamaConfig; heads: (queries, keys and values)."""
    return {
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
    } | more


SMOLLM2 = llama(49_152, 576, 1536, 30, (9, 3))
"""Sizes of SmolLM2-135M."""
TINY = llama(64, 192, 384, 4, (6, 2), head_dim=32)
"""Sizes of tools.make_tiny_model."""


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a random Llama as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)


def make_venv(folder: Path, pins: Path) -> Path:
    """The interpreter of an environment with exactly the pinned packages. Raises ChildFailed.

    The pins include all dependencies and torch's CPU build. An existing environment is kept.
    """
    folder = folder.absolute()
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = fingerprint(folder, pins)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    logs = folder.with_name(f"{folder.name}-log")
    venv = [sys.executable, "-m", "venv", folder]
    run_child(venv, log=logs / "venv.log", timeout_s=_INSTALL_TIMEOUT_S)
    # --no-deps: the pins include all dependencies.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    pip += ["--no-compile", "--progress-bar", "off", "--retries", "2", "--no-deps"]
    torch = torch_pin(pins)
    try:
        run_child([*pip, torch], log=logs / "torch.log", timeout_s=_INSTALL_TIMEOUT_S)
    except ChildFailed:
        # A mirror may have the CPU build too, so its own index comes second.
        from_index = [*pip, "--index-url", TORCH_CPU_INDEX, torch]
        run_child(from_index, log=logs / "torch-index.log", timeout_s=_INSTALL_TIMEOUT_S)
    run_child([*pip, "-r", pins], log=logs / "pins.log", timeout_s=_INSTALL_TIMEOUT_S)
    stamp.write_text(wanted)
    return python


def fingerprint(folder: Path, pins: Path) -> str:
    """Hash of the pins, the interpreter and the folder: an environment cannot move."""
    text = f"{pins.read_text()}\n{sys.version}\n{sys.base_prefix}\n{folder.resolve()}"
    return hashlib.sha256(text.encode()).hexdigest()


def torch_pin(pins: Path) -> str:
    return next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
