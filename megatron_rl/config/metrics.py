"""The section `[metrics]`: who else gets the rows of metrics.jsonl. Part of the tree."""

from typing import Literal

from pydantic import Field, PositiveFloat

from megatron_rl.config.section import Section


class MetricsConfig(Section):
    """Metrics for other programs; `RUN/metrics.jsonl` is always written."""

    tensorboard: bool = False
    """Event files in RUN/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; offline: in RUN/wandb, for `wandb sync`. Needs `pip install wandb`."""
    wandb_project: str = Field(default="megatron-rl", min_length=1)
    """Their project."""
    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """Port of http://HOST:PORT/metrics; 0: none."""
    prometheus_host: str = "127.0.0.1"
    """Address that it listens on. Whoever reaches it may read the metrics: it knows no keys."""
    poll_s: PositiveFloat = 2.0
    """Seconds between two looks at metrics.jsonl."""

    @property
    def is_on(self) -> bool:
        """Whether anything is asked for."""
        return self.tensorboard or self.wandb != "off" or self.prometheus_port > 0
