"""A run folder as roles leave it, with hostile texts and numbers that are known."""

import json
from pathlib import Path
from typing import Any

from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.observe.report.material import Run, read_material

SECRET = "label-of-this-start"
HOSTILE = (
    "<script>document.title = 'owned'</script></textarea></pre></title><img src=x "
    "onerror=\"document.title='owned'\">\u202egnp.exe\u2066 & &lt;b&gt;"
)
LONG_LINE = "a" * 1_000_000


def step_row(step: int, at: float, **values: float) -> dict[str, Any]:
    """A row of the trainer; of names `__` stands for a slash."""
    named = {name.replace("__", "/"): value for name, value in values.items()}
    return {"time": at, "source": "trainer", "step": step, "train/loss": 0.1, **named}


def rollout(group: int, index: int, versions: list[int], **values: Any) -> dict[str, Any]:
    """A line of rollouts/*.jsonl."""
    times = {"leased": 100.0, "done": 101.0, "scored": 101.5, "trained": 102.0}
    return {
        "prompt_id": f"p{group}", "group": group, "index": index, "versions": versions,
        "tokens": 7, "reason": "correct", "reward": 1.0, "generator": "generator-0",
        "problem": "1 + 1", "text": "2", "answer": "2", "times": times, **values,
    }  # fmt: skip


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def leave_run(folder: Path) -> Path:
    """Two steps, an evaluation before and after, one generator."""
    (folder / "rollouts").mkdir(parents=True)
    overrides = [f"run.dir={folder}", f"expert.ports.label={SECRET}"]
    (folder / "config.toml").write_text(dump_toml(load_config(None, overrides)))
    common = {"train__update_s": 2.0, "weight_sync__s": 0.5}
    evaluated = {"source": "queue", "eval/accuracy_se": 0.1, "eval/seconds": 3.0, "eval/n": 4}
    rows = [
        {"time": 103.0, "step": 0, "label": "before", "eval/accuracy": 0.25, **evaluated},
        step_row(1, 110.0, wait__batch_s=1.5, rollout__reward=0.2, **common,
                 **{"reason__correct": 3, "reason__</script><b>": 1}),
        step_row(2, 114.0, wait__batch_s=1.0, rollout__reward=0.4, **common,
                 **{"queue__groups_dropped_zero_variance": 2}),
        {"time": 112.0, "source": "queue", "step": 1, "generator/busy_s": 6.0,
         "generator/idle_s": 2.0, "generator/reporting": 2},
        {"time": 120.0, "step": 2, "label": "after", "eval/accuracy": 0.75, **evaluated},
        {"time": 121.0, "step": 2, "label": "after.aime", "eval/accuracy": 0.5, **evaluated},
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text(lines(rows))
    first = [rollout(0, i, [0]) for i in range(3)]
    second = [rollout(1, 0, [0, 1]), rollout(1, 1, [1], tokens=9)]
    (folder / "rollouts" / "step_000000.jsonl").write_text(lines(first))
    (folder / "rollouts" / "step_000001.jsonl").write_text(lines(second) + '{"torn')
    before = [rollout(0, 0, [0]), rollout(1, 0, [0], problem=HOSTILE, text=HOSTILE, reason="wrong")]
    after = [rollout(0, 0, [2]), rollout(1, 0, [2], problem=HOSTILE, text=LONG_LINE)]
    (folder / "rollouts" / "eval_before.jsonl").write_text(lines(before))
    (folder / "rollouts" / "eval_after.jsonl").write_text(lines(after))
    return folder


def read(folder: Path) -> Run:
    return read_material(folder, load_config(folder / "config.toml"), folder.name)
