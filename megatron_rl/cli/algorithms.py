"""`megatron-rl algorithms`: the presets of `[algorithm]`, their parts, needs and sources."""

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.cli.command_line.command import command
from megatron_rl.cli.command_line.parameters import Json
from megatron_rl.cli.command_line.printing import say
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.presets import PRESETS


@dataclass(frozen=True)
class AlgorithmsOptions:
    json: Json = False


@command("algorithms", "List the presets of the objective: parts, needs, sources.")
def algorithms(options: AlgorithmsOptions, console: Console) -> int:
    rows = [describe(name) for name in PRESETS]
    say(console, *([json.dumps(rows, indent=2)] if options.json else map(_text, rows)))
    return 0


def _text(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{part} {value}" for part, value in row["parts"].items())
    needs = ", ".join(row["needs"]) or "one pass through the model"
    return (
        f"{row['preset']}\n    {row['use']}\n    parts   {parts}\n    needs   {needs}\n"
        f"    source  {row['source']}"
    )


def describe(name: str) -> dict[str, Any]:
    """A preset's parts; `needs`: passes through the model before the pass with gradients."""
    # A preset that demands a reference cannot be built without one.
    given: dict[str, Any] = {"preset": name}
    if name == "distill":
        given["reference"] = {"policy": "FOLDER"}
    cfg = AlgorithmConfig.model_validate(given)
    return {
        "preset": name,
        "parts": _parts(cfg),
        "needs": _needs(cfg),
        "use": PRESETS[name].use,
        "source": PRESETS[name].source,
        "values": cfg.model_dump(mode="json"),
    }


def _parts(cfg: AlgorithmConfig) -> dict[str, str]:
    """Part -> name, without parts that are off."""
    policy_loss = cfg.policy_loss.name
    if policy_loss in ("clipped", "cispo"):
        low, high = cfg.policy_loss.eps_low, cfg.policy_loss.eps_high
        policy_loss += f" {cfg.policy_loss.level} -{low:g} +{high:g}"
    found = {
        "advantage_estimator": cfg.advantage_estimator.name,
        "normalization": cfg.normalization.name,
        "aggregation": cfg.aggregation.name,
        "policy_loss": policy_loss,
    }
    if cfg.correction.name != "none":
        found["correction"] = f"{cfg.correction.name} at {cfg.correction.high:g}"
    if cfg.shaping.name != "none":
        found["shaping"] = f"{cfg.shaping.name}, baseline {cfg.shaping.baseline}"
    if cfg.kl.placement != "none":
        found["kl"] = f"{cfg.kl.estimator} in the {cfg.kl.placement}, {cfg.kl.coefficient:g}"
    return found | {"zero-variance groups": cfg.zero_variance_groups}


def _needs(cfg: AlgorithmConfig) -> list[str]:
    objective = find_objective(cfg)
    needs = {
        "own logprobs before the batch": objective.needs_proximal,
        f"reference ({cfg.reference.policy})": objective.needs_reference,
        "logprobs of whole groups": objective.needs_groups,
    }
    return [need for need, is_needed in needs.items() if is_needed]
