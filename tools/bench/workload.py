"""What all variants train on: the tiny model after one cold start, and the sorting task.

Used by tools.bench.end_to_end, once before anything is timed.
"""

import json
import sys
from pathlib import Path

from tools.bench.children import run_child
from tools.bench.variants import (
    ROOT,
    TIMED_OVERRIDES,
    Workload,
    run_cli,
    with_steps,
    write_peer_prompts,
)

CONFIG = ROOT / "examples" / "tiny.toml"
_TOOL_TIMEOUT_S = 300.0


def make_workload(work_dir: Path, *, steps: int) -> Workload:
    """Model, tasks, cold start and the peer's prompts, in `work_dir`. Raises ChildFailed."""
    model, tasks = work_dir / "model", work_dir / "tasks"
    _run_tool("make_tiny_model", [model], work_dir)
    _run_tool("make_tasks", ["sort", tasks], work_dir)
    data = [
        _path_override("prompts.0.path", tasks / "prompts.jsonl"),
        _path_override("sft.dataset", tasks / "sft.jsonl"),
    ]
    cold_start = work_dir / "cold_start"
    run_cli(
        CONFIG,
        [*data, _path_override("model.path", model), "train.steps=0", "eval.prompts=0"],
        run_dir=cold_start,
    )
    start = _path_override("model.path", cold_start / "hf" / "cold_start")
    peer_prompts = work_dir / "peer_prompts.jsonl"
    workload = with_steps(Workload(CONFIG, (*data, start, *TIMED_OVERRIDES), peer_prompts), steps)
    write_peer_prompts(workload.config, peer_prompts)
    return workload


def _run_tool(name: str, arguments: list[str | Path], work_dir: Path) -> None:
    command = [sys.executable, "-m", f"tools.{name}", *arguments]
    run_child(command, log=work_dir / f"{name}.log", timeout_s=_TOOL_TIMEOUT_S, cwd=ROOT)


def _path_override(key: str, path: Path) -> str:
    return f"{key}={json.dumps(str(path.resolve()))}"
