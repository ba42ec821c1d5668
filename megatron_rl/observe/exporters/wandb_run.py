"""Weights & Biases: one W&B run per run folder, resumed with it."""

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import wandb

from megatron_rl.config.tree import MetricsConfig
from megatron_rl.observe.exporters.follow import Row, numbers, set_suffix
from megatron_rl.protocol.whole_file import write_whole

ID_FILE = "megatron_rl_run_id"
_TIMEOUT_S = 60
_ONLY_WRITERS = ("trainer", "queue", "launch")
"""Roles whose metric groups no other role writes."""


class WandbRun:
    """Sends rows; the x axis of a metric is the step of its role."""

    def __init__(
        self, folder: Path, cfg: MetricsConfig, *, default_name: str, config: dict[str, Any]
    ) -> None:
        """folder: OUT/wandb; config: the resolved tree. Raises wandb.Error."""
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=cfg.wandb_project,
            # None leaves the choice to variables such as WANDB_ENTITY.
            entity=cfg.wandb_entity or None,
            group=cfg.wandb_group or None,
            tags=cfg.wandb_tags or None,
            name=cfg.wandb_name or default_name,
            id=_id_of(folder),
            resume="allow",
            dir=str(folder.parent),
            mode=cfg.wandb,
            config=config,
            settings=wandb.Settings(
                init_timeout=_TIMEOUT_S,
                console="off",
                silent=True,
                # Sends no data about the machine or its git repositories.
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,
            ),
        )
        self._sent_before: dict[str, float] = dict(self._run.summary.get("sent_times", {}))
        """Time of the last row of each role that an earlier exporter process has sent."""
        self._sent = dict(self._sent_before)
        self._sources: set[str] = set()
        self._groups: set[str] = set()

    def add(self, rows: list[Row]) -> None:
        """Send rows, except rows that an earlier exporter process has sent."""
        for row in rows:
            source, step, written_at = row["source"], row["step"], row["time"]
            values = numbers(row)
            # By time, because a resumed run repeats steps, whose new rows are to be sent.
            if not values or written_at <= self._sent_before.get(source, 0.0):
                continue
            suffix = set_suffix(row)
            sent: dict[str, Any] = {name_of(source, k) + suffix: v for k, v in values.items()}
            self._define(source, sent)
            self._run.log(sent | {f"step/{source}": step})
            self._sent[source] = written_at
        # Each time, because the exporter may be killed.
        self._run.summary["sent_times"] = dict(self._sent)

    def _define(self, source: str, names: Iterable[str]) -> None:
        if source not in self._sources:
            self._run.define_metric(f"step/{source}", hidden=True)
            self._sources.add(source)
        # By group, because roles share none: "train/*" is over the trainer's steps.
        for group in {name.partition("/")[0] for name in names} - self._groups:
            self._run.define_metric(f"{group}/*", step_metric=f"step/{source}")
            self._groups.add(group)

    def close(self) -> None:
        """Send remaining rows and close the W&B run."""
        self._run.finish()
        # wandb's service process may write the file after finish() has returned.
        wandb.teardown()


def name_of(source: str, metric: str) -> str:
    """W&B name of a metric: as in metrics.jsonl, with the role as prefix if roles share the name.

    The cold start writes `train/*`, like the trainer.
    """
    if source in _ONLY_WRITERS:
        return metric
    group, _, name = metric.partition("/")
    return f"{source}/{name if (source, group) == ('sft', 'train') else metric}"


def _id_of(folder: Path) -> str:
    """W&B id of this run folder, the same for a resumed run."""
    path = folder / ID_FILE
    if not path.exists():
        write_whole(path, uuid.uuid4().hex[:12])
    return path.read_text()
