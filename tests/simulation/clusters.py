"""Small simulated clusters whose figures can be worked out by hand."""

from typing import Any

from megatron_rl.config.tree import Config
from megatron_rl.simulation.cluster import Cluster, Span
from megatron_rl.simulation.engine import EngineModel
from megatron_rl.simulation.machines import (
    ClusterModel,
    TrainerModel,
    VerifierModel,
    WeightSyncModel,
)  # fmt: skip
from megatron_rl.simulation.outcome import Outcome
from megatron_rl.simulation.workload import LogNormalLengths, PassRates, Workload

TOKENS, PROMPT = 100, 10
NEVER_ZERO_VARIANCE = PassRates(1e6, 1e6)
"""Of groups of 16: one in 32768."""


def constant(tokens: int = TOKENS, rates: PassRates = NEVER_ZERO_VARIANCE) -> Workload:
    """Completions of one length."""
    return Workload(LogNormalLengths(tokens, 0.0), PROMPT, rates)


def config_of(*, groups: int = 8, size: int = 16, staleness: int = 2, **sections: Any) -> Config:
    """A configuration with batches of `groups` groups of `size`; strict."""
    values: dict[str, Any] = {
        "train": {
            "prompts_per_batch": groups,
            "group_size": size,
            "microbatch_tokens": 4096,
            "batch_timeout_s": 1e6,
        },
        "queue": {"max_staleness": staleness, "strict_staleness": True},
        "generator": {"replicas": 4, "max_running": 32, "context_tokens": 2048},
        "sampling": {"max_new_tokens": 1000},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Config.model_validate(values)


def model_of(
    *,
    iteration_s: float = 0.1,
    token_s: float = 1e-3,
    sync: WeightSyncModel | None = None,
    verifier: VerifierModel | None = None,
    max_running: int = 32,
    **more: Any,
) -> ClusterModel:
    """Engines whose iterations take one time whatever they hold; no prefill."""
    return ClusterModel(
        EngineModel(iteration_s, 0.0, 0.0, 0.0, max_running=max_running, kv_tokens=10**6),
        TrainerModel(token_s=token_s),
        sync or WeightSyncModel(0.0),
        verifier or VerifierModel(100),
        **more,
    )


def simulated(
    config: Config, model: ClusterModel, workload: Workload | None = None, **span: Any
) -> Outcome:
    """A run."""
    return Cluster(config, model, workload or constant(), Span(**span)).run()
