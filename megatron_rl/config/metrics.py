"""The section `[metrics]`: who else gets the rows of metrics.jsonl. Part of the tree."""

from typing import Literal

from pydantic import Field, PositiveFloat

from megatron_rl.config.section import Section


class MetricsConfig(Section):
    """Exports of metrics to other programs. `RUN/metrics.jsonl` is always written."""

    tensorboard: bool = False
    """Write TensorBoard event files to RUN/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; offline: in RUN/wandb, for `wandb sync`. Needs the package wandb:
    `pip install wandb`, or the extra of that name."""
    wandb_project: str = Field(default="megatron-rl", min_length=1)
    """Project at Weights & Biases."""
    wandb_entity: str = ""
    """User or team at Weights & Biases; "": the account's default."""
    wandb_name: str = ""
    """Name of the run at Weights & Biases; "": that of the run folder."""
    wandb_group: str = ""
    """Group of runs at Weights & Biases, such as the seeds of one experiment; "": none."""
    wandb_tags: list[str] = []
    """Tags of the run at Weights & Biases."""
    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint http://HOST:PORT/metrics; 0: none."""
    prometheus_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint. It has no access control: anybody who reaches it can
    read the metrics."""
    poll_s: PositiveFloat = 2.0
    """Seconds between two reads of metrics.jsonl."""

    @property
    def is_on(self) -> bool:
        """Whether any export is set."""
        return self.tensorboard or self.wandb != "off" or self.prometheus_port > 0
