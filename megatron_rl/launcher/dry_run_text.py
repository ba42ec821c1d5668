"""Lines of `--dry-run` about what a command would start and write.

Used by the commands that start processes. Starts and writes nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.tree import Config
from megatron_rl.launcher.placement import ONE_NODE, Machines, NodeRoles
from megatron_rl.launcher.ports import port_names
from megatron_rl.protocol.exports import COLD_START, FINAL, SFT_BASELINE, candidate_name

NOTHING = "Dry run: nothing was started."


def run_lines(config: Config, machines: Machines = ONE_NODE) -> list[str]:
    """Phases, processes, ports, GPUs and files of a run. Raises InputError (GPUs)."""
    phases = []
    if config.sft.steps:
        phases.append(f"cold start of {config.sft.steps} steps")
    if config.train.steps:
        phases.append(f"{config.train.steps} steps of reinforcement learning")
    if config.sft.baseline and config.train.steps:
        phases.append("the SFT baseline")
    if config.eval.is_wanted:
        phases.append("evaluations")
    has_serving = bool(config.train.steps or config.eval.is_wanted)
    roles = machines.place(config)
    verifiers = len(roles) or machines.nodes or 1
    started = _processes(config, has_serving=has_serving, verifiers=verifiers)
    return [
        f"would do: {', then '.join(phases) or 'nothing'}",
        f"would start: {', '.join(started)}",
        places_line(roles),
        ports_line(config),
        *file_lines(config),
    ]


def evaluation_lines(
    config: Config, label: str, folder: Path, problems: int, missing: int
) -> list[str]:
    """Lines about an evaluation of `problems` problems; missing: problems without completions."""
    lines = [f"would evaluate {config.model.path} as {label!r}: {missing} of {problems} problems"]
    if missing:
        lines += [f"would start: {', '.join(_processes(config, has_serving=True))}"]
        lines += [places_line(ONE_NODE.place(config)), ports_line(config)]
    return [*lines, f"would write {folder}: config.toml, rollouts/, logs/, eval.json"]


def _processes(config: Config, *, has_serving: bool, verifiers: int = 1) -> list[str]:
    found = []
    if config.train.steps or config.sft.steps:
        found.append(_count(config.parallel.world_size, "trainer rank"))
    if has_serving:
        engine = f"generator ({config.generator.engine}, {config.generator.tensor_parallel} wide)"
        found += ["1 rollout queue", _count(config.generator.replicas, engine)]
        found.append(_count(verifiers, "verifier"))
    if config.has_scorer:
        found.append(f"1 scorer (sglang, {config.scorer.tensor_parallel} wide)")
    if config.metrics.is_on:
        found.append("1 process for metrics")
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 or what.endswith(')') else 's'}"


def places_line(nodes: Sequence[NodeRoles]) -> str:
    """GPUs of each role; nodes: roles by node, [] without GPUs."""
    if not nodes:
        return "on this node's CPU"
    told = [
        f"generator-{index} on {list(gpus)}" + (f" of node {number}" if len(nodes) > 1 else "")
        for number, roles in enumerate(nodes)
        for index, gpus in roles.engines.items()
    ]
    if scorer := nodes[0].scorer:
        where = f" of node {nodes[0].scorer_node}" if len(nodes) > 1 else ""
        told.append(f"scorer-0 on {list(scorer)}{where}")
    ranks = sum(roles.trainer_ranks for roles in nodes)
    if len(nodes) > 1:
        last = nodes[0].trainer_nodes - 1
        where = f"nodes 0 to {last}" if last else "node 0"
        told.insert(0, f"{ranks} trainer ranks on {where}")
        return f"on {len(nodes)} nodes: {'; '.join(told)}"
    return f"on the GPUs of this node: {'; '.join(told)}"


def ports_line(config: Config) -> str:
    ports, names = config.ports, port_names(config)
    fixed = [f"{name} {getattr(ports, name)}" for name in names if getattr(ports, name)]
    others = len(names) - len(fixed)
    text = ", ".join([*fixed, *([f"{others} free ones, chosen at the start"] if others else [])])
    return f"ports on {ports.host}: {text}"


def file_lines(config: Config) -> list[str]:
    """Folders and models that a run would write, with known sizes."""
    model_bytes = sum(path.stat().st_size for path in config.model.path.glob("*.safetensors"))
    exports = [COLD_START] * bool(config.sft.steps)
    exports += [candidate_name(step) for step in config.sft.candidates]
    exports += [FINAL] * bool(config.train.steps)
    exports += [SFT_BASELINE] * bool(config.sft.baseline and config.train.steps)
    lines = [
        f"would write {config.run.dir}: config.toml, metrics.jsonl, rollouts/, logs/, summary.json"
    ]
    if exports:
        each = f"{model_bytes / 1e9:.3g} GB each, as {config.model.path}"
        lines.append(f"would export to hf/: {', '.join(exports)} ({each})")
    if config.checkpoint.export_every_steps and config.train.steps:
        lines.append(
            f"would also export every {config.checkpoint.export_every_steps} steps to "
            f"hf/step_NNNNNN and keep {config.checkpoint.keep_last} of them"
        )
    if config.checkpoint.every_steps and config.train.steps:
        lines.append(
            f"would keep {config.checkpoint.keep_last} checkpoints, one every "
            f"{config.checkpoint.every_steps} steps, each several times the model's size"
        )
    return lines
