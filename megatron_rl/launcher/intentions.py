"""What a command would start and write, as lines: for `--dry-run`, after all checks.

Used by the commands that start processes. Starts nothing and writes nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_rl.config.tree import Config
from megatron_rl.launcher.placement import listed_gpus, place
from megatron_rl.launcher.ports import port_names
from megatron_rl.protocol.exports import COLD_START, CONTROL, FINAL, candidate_name

NOTHING = "Dry run: nothing was started."


def say(lines: Sequence[str], console: Console) -> None:
    """Print lines as they are."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def run_lines(config: Config) -> list[str]:
    """Of `megatron-rl run`: phases, processes, ports, GPUs, files. Raises InputError (GPUs)."""
    phases = []
    if config.sft.steps:
        phases.append(f"cold start of {config.sft.steps} steps")
    if config.train.steps:
        phases.append(f"{config.train.steps} steps of reinforcement learning")
    if config.sft.control and config.train.steps:
        phases.append("the cold start's control")
    if config.eval.is_wanted:
        phases.append("evaluations")
    has_serving = bool(config.train.steps or config.eval.is_wanted)
    return [
        f"would do: {', then '.join(phases) or 'nothing'}",
        f"would start: {', '.join(_processes(config, has_serving=has_serving))}",
        *_places(config),
        ports_line(config),
        *file_lines(config),
    ]


def evaluation_lines(
    config: Config, label: str, folder: Path, problems: int, missing: int
) -> list[str]:
    """Of an evaluation: problems of all sets, and those whose completions are not there."""
    lines = [f"would evaluate {config.model.path} as {label!r}: {missing} of {problems} problems"]
    if missing:
        lines += [f"would start: {', '.join(_processes(config, has_serving=True))}"]
        lines += [*_places(config), ports_line(config)]
    return [*lines, f"would write {folder}: config.toml, rollouts/, logs/, eval.json"]


def _processes(config: Config, *, has_serving: bool) -> list[str]:
    found = []
    if config.train.steps or config.sft.steps:
        found.append(_count(config.parallel.world_size, "trainer rank"))
    if has_serving:
        engine = f"generator ({config.generator.engine}, {config.generator.tensor_parallel} wide)"
        found += ["1 rollout queue", _count(config.generator.replicas, engine), "1 verifier"]
    if config.has_scorer:
        found.append(f"1 scorer (sglang, {config.scorer.tensor_parallel} wide)")
    if config.metrics.is_on:
        found.append("1 process for metrics")
    return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 or what.endswith(')') else 's'}"


def _places(config: Config) -> list[str]:
    gpus = listed_gpus()
    if not gpus:
        return ["on this host's CPU"]
    roles = place(config, hosts=1, gpus_per_host=len(gpus))[0]
    told = [f"generator-{name} on {list(own)}" for name, own in roles.engines.items()]
    if roles.scorer:
        told.append(f"scorer-0 on {list(roles.scorer)}")
    return [f"on {len(gpus)} GPUs: {'; '.join(told)}"]


def ports_line(config: Config) -> str:
    """Where sockets would listen."""
    ports, names = config.ports, port_names(config)
    fixed = [f"{name} {getattr(ports, name)}" for name in names if getattr(ports, name)]
    others = len(names) - len(fixed)
    text = ", ".join([*fixed, *([f"{others} free ones, chosen at the start"] if others else [])])
    return f"ports on {ports.host}: {text}"


def file_lines(config: Config) -> list[str]:
    """Folders and models that a run leaves, with sizes where they are known."""
    model_bytes = size_of_model(config.model.path)
    exports = [COLD_START] * bool(config.sft.steps)
    exports += [candidate_name(step) for step in config.sft.candidates]
    exports += [FINAL] * bool(config.train.steps)
    exports += [CONTROL] * bool(config.sft.control and config.train.steps)
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


def size_of_model(folder: Path) -> int:
    """Bytes of a folder's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))
