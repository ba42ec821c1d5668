"""Refuses bad input before any process starts or any model is loaded.

Used by commands that start processes. Checks the machine, files and prompts; `config/check.py`
checks the configuration alone. Each check raises InputError.
"""

import importlib.metadata
import itertools
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from generation.engine import ENGINES, load_engine
from generation.sglang_arguments import check_extras
from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.backend.cpu.sglang import torch_is_for_cpu
from megatron_rl.backend.environment import (
    ALLOCATOR,
    GPUS_VARIABLE,
    DeviceKind,
    device_of_host,
    uses_gpus,
)
from megatron_rl.backend.gpu_host import check_driver
from megatron_rl.config.errors import InputError, printable
from megatron_rl.config.generator import refuse_overlap
from megatron_rl.config.lookup import find_function
from megatron_rl.config.reward import CODE
from megatron_rl.config.tree import Config
from megatron_rl.config.unused import late_stages, off_policy_bias, unused_keys
from megatron_rl.data.dropped_prompts import DROPPED, DroppedPrompt, try_rendering
from megatron_rl.data.own_systems import describe_own_systems, has_own_system
from megatron_rl.data.prompts import (
    PromptSets,
    divide_for_run,
    material_of_run,
    most_held_out,
)
from megatron_rl.launcher import model_checks
from megatron_rl.launcher.placement import listed_gpus
from megatron_rl.launcher.ports import check_ports
from megatron_rl.launcher.reward_trial import try_rewards
from megatron_rl.launcher.run_folder import check_run_folder
from megatron_rl.launcher.sft_checks import (
    check_sft_dataset,
    describe_sft_openings,
    first_taught,
    sft_trials,
)
from megatron_rl.launcher.thinking import describe_thinking
from megatron_rl.observe.exporters.exporter import check_installed
from megatron_rl.observe.host_memory import memory_limit_bytes
from megatron_rl.protocol.checkpoint_folder import find_resume, read_queue_state
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.render import count_parameters, describe_system_prompts, names_cpp
from megatron_rl.protocol.types import Prompt
from megatron_rl.rollout_queue.evaluation import (
    completion_limits,
    describe_evaluation,
    evaluation_sets,
)
from megatron_rl.rollout_queue.recovery import check_resumption
from megatron_rl.rollout_queue.replay_datasets import check_sources
from megatron_rl.rollout_queue.training_groups import check_draws
from megatron_rl.weights.exchange.folder import check_folder
from verification import settings
from verification.environments.fork_client import check_target
from verification.environments.settings import environment_settings

_MEMORY_SAVER = "torch-memory-saver"
_SLOW_FROM = 500_000_000
"""Parameters above which a step on CPU cores takes many minutes."""
_STATE_BYTES = 16
"""Bytes per parameter in float32: master weight, gradient, two moments of Adam."""


class PromptReport(NamedTuple):
    """Findings about the prompts of a run."""

    notes: list[str]
    """Lines to show."""
    dropped: list[DroppedPrompt]
    """Prompts that are left out."""
    files: tuple[Path, ...] = ()
    """Files of the prompts."""
    prompts: Sequence[Prompt] = ()
    """Prompts that are kept."""
    own_files: tuple[Path, ...] = ()
    """Those of [[prompts]], in order."""


def check(
    config: Config, *, is_known_folder: bool = False, calls_rewards: bool = True
) -> PromptReport:
    """Run every check, cheapest first; returns findings about the prompts. Raises InputError.

    is_known_folder: the caller checks the run folder. calls_rewards: call the user's functions.
    """
    gpus = listed_gpus()
    check_tools()
    if not is_known_folder:
        check_run_folder(config)
    check_names(config)
    check_installed(config)
    check_overlap(config, gpus)
    check_weights_folder(config)
    if config.train.steps and config.generator.release_memory:
        check_memory_saver(device_of_host(gpus), os.environ)
    model_checks.check_model_folder(config.model.path)
    model_checks.check_quantization(config)
    model_checks.check_vllm(config)
    model_checks.check_positions(config)
    layers_note = ""
    if config.train.steps or config.sft.steps:
        model_checks.check_model(config)
        gpu = model_checks.find_device() if uses_gpus(device_of_host(gpus)) else None
        layers_note = "" if gpu is None else model_checks.check_layers(config, gpu)
    else:
        # An evaluation alone needs no trainer: the engine knows more architectures.
        model_checks.check_weights(config.model.path, "model.path")
    if config.train.steps:
        model_checks.check_reference(config)
    model_checks.check_judge(config)
    model_checks.check_megatron_path(config)
    check_extras(config)
    check_ports(config)
    check_sft_dataset(config)
    check_replay(config)
    found = check_prompts(config)
    found.notes.extend([f"note: {layers_note}"] if layers_note else [])
    if calls_rewards:
        found.notes.extend(try_rewards(found.prompts, config))
    return found


def check_tools() -> None:
    if find_compiler() is None:
        raise InputError(
            f"no C++ compiler: neither $CXX (given: {os.environ.get('CXX', '')!r}) nor g++ is on "
            "PATH. SGLang and PyTorch compile small extensions. Install the Debian package g++: "
            "apt-get install g++"
        )
    if shutil.which("setpriv") is None:
        raise InputError(
            "the program setpriv is not on PATH; it ties the processes of a run to the launcher. "
            "Install the Debian package util-linux: apt-get install util-linux"
        )


def find_compiler() -> str | None:
    """Path of the C++ compiler for extensions; None without one."""
    return shutil.which(os.environ.get("CXX") or "g++")


def check_overlap(config: Config, gpus: Sequence[str]) -> None:
    """`expert.weights.overlap` fits the trainer's device; gpus: of this host."""
    if config.train.steps and config.weights.overlap:
        has_gpus = uses_gpus(device_of_host(gpus))
        refuse_overlap(config.weights, gpus=has_gpus)


def check_weights_folder(config: Config) -> None:
    """Files of weights.method "folder" can be written and read from here."""
    # The default lies in the run folder, which is checked by itself.
    if config.train.steps and config.weights.method == "folder" and config.weights.folder:
        try:
            check_folder(config.weights.folder)
        except RuntimeError as error:
            raise InputError(
                f"expert.weights.folder={config.weights.folder!r}: {error}. Give a folder or a "
                "bucket that all nodes can write, and install what such a URL needs (s3://: s3fs)"
            ) from error


def check_memory_saver(device: DeviceKind, environment: Mapping[str, str]) -> None:
    """SGLang's memory saver, which engines release memory with, can work."""
    if not uses_gpus(device):
        return
    try:
        importlib.metadata.version(_MEMORY_SAVER)
    except importlib.metadata.PackageNotFoundError as error:
        raise InputError(
            f"generator.release_memory=true needs the package {_MEMORY_SAVER}, with which SGLang "
            "gives memory back: run `bash tools/install.sh gpu`"
        ) from error
    for name in sorted(ALLOCATOR):
        if "expandable_segments:True" in (given := environment.get(name, "")):
            # torch_memory_saver 0.0.10, entrypoint.py: _sanity_checks.
            raise InputError(
                f"generator.release_memory=true with {name}={given} in the environment, which "
                "engines get too: their memory saver knows no expandable segments. Leave it out; "
                "expert.train.expandable_segments sets it for trainer ranks alone"
            )


def notes_of_host(config: Config) -> list[str]:
    """Warnings about a model on this host's CPU cores; none on a host with GPUs.

    Raises InputError for a model larger than the host's memory.
    """
    if listed_gpus():
        return []
    driver = check_driver(os.environ)
    is_asked = GPUS_VARIABLE not in os.environ and not torch_is_for_cpu()
    fault = f"warning: the run uses this host's CPU cores: {driver.found}"
    return [fault] * (is_asked and not driver.is_good) + check_cpu_host(
        count_parameters(config.model.path),
        item_bytes=2 if config.model.dtype == "bfloat16" else 4,
        engines=config.generator.replicas,
        trains=bool(config.train.steps or config.sft.steps),
        memory_bytes=memory_limit_bytes(),
    )


def check_cpu_host(
    parameters: int, *, item_bytes: int, engines: int, trains: bool, memory_bytes: int
) -> list[str]:
    """`notes_of_host` by sizes. Pure.

    item_bytes: of a weight in model.dtype. engines: engines' copies of the model. memory_bytes: of
    the host.
    """
    copies = engines + trains
    needed = parameters * (copies * item_bytes + trains * _STATE_BYTES)
    if needed > memory_bytes:
        raise InputError(
            f"this host lists no GPU, and its memory of {memory_bytes / 1e9:.1f} GB does not hold "
            f"a model of {parameters / 1e9:.1f} billion parameters: weights, gradients and "
            f"optimizer take {needed / 1e9:.1f} GB. Take a smaller model, or a host with GPUs"
        )
    if parameters < _SLOW_FROM:
        return []
    return [
        f"warning: this host lists no GPU, so the run uses its CPU cores: with "
        f"{parameters / 1e9:.1f} billion parameters a step takes many minutes. If it has GPUs, "
        "nvidia-smi and CUDA_VISIBLE_DEVICES should show them; `megatron-rl doctor` says more"
    ]


def check_names(config: Config) -> None:
    """Every function that the configuration names exists."""
    if config.train.steps:
        find_objective(config.algorithm)
        find_advantage_functions(config.algorithm)
    # Checks the name alone, because the engines' modules are slow to load.
    engines = dict.fromkeys(ENGINES, load_engine)
    find_function(engines, config.generator.engine, key="generator.engine")


def check_replay(config: Config) -> None:
    """Replayed groups can be read, and the objective can learn from them."""
    if not config.replay.share or not config.train.steps:
        return
    if find_advantage_functions(config.algorithm).needs_classes:
        raise InputError(
            f"replay.share={config.replay.share:g} and algorithm.advantage_estimator.name="
            f"{config.algorithm.advantage_estimator.name!r} exclude each other: which answers are "
            "the same is not recorded; set the share to 0, or take another advantage estimator"
        )
    check_sources(config)


def check_classes(config: Config, tasks: Collection[str]) -> None:
    """Each task that is trained on has answers, if the advantage estimator compares them."""
    if not find_advantage_functions(config.algorithm).needs_classes:
        return
    for task in sorted(tasks):
        if config.reward.all_tasks[task].is_decided_by_environment:
            raise InputError(
                f"algorithm.advantage_estimator.name={config.algorithm.advantage_estimator.name!r} "
                f"compares answers, and the environment of reward.tasks.{task} decides the reward "
                f"without one: set reward.tasks.{task}.compare and let it return ToGrade "
                "(docs/agents.md), or take another advantage estimator"
            )


def check_environments(config: Config) -> None:
    """Raise InputError for an environment that cannot be loaded; each starts once."""
    for target in sorted(set(config.reward.environments.values())):
        # It stays where the environment cannot be loaded, for the user to read.
        folder = Path(tempfile.mkdtemp(prefix="megatron-rl-"))
        log_path = folder / "environment.log"
        check_target(target, environment_settings(config.environments, log_path))
        shutil.rmtree(folder)


def _describe_missing_variables(config: Config) -> list[str]:
    """A warning about variables that environments shall see and that are not set here."""
    names = config.environments.variables if config.reward.environments else []
    if not (missing := [name for name in names if name not in os.environ]):
        return []
    return [
        f"warning: expert.environments.variables names {', '.join(missing)}, which no environment "
        "will see, because it is not set in this shell: export it before the run, or omit it"
    ]


def check_prompts(config: Config) -> PromptReport:
    """All sources load, and there are enough train and held-out prompts."""
    settings.check_sources([*config.prompts, *(one.prompts for one in config.eval.sets)])
    settings.check_functions(config.reward)
    check_environments(config)
    material = material_of_run(config)
    sets = material.divide()
    settings.check_prompts(sets.all, config.reward)
    tasks = sorted({prompt.task for prompt in sets.all})
    if _samples_for_training(config):
        check_classes(config, {prompt.task for prompt in itertools.chain(*sets.train)})
    if any(config.reward.all_tasks[task].compare == CODE for task in tasks):
        settings.check_sandbox(config.reward)
    most = most_held_out(config)
    if _samples_for_training(config) and not material.divide(most_held_out=most).train:
        raise InputError(
            'there are no train prompts: lines need "split": "train" or none, and a question that '
            "is not held out; train.steps=0 only evaluates"
        )
    evaluation_sets(config, sets)
    dropped, rendering_notes = try_rendering(
        sets.all, config, completion_limits(config, sets), taught=first_taught(config.sft),
        trials=sft_trials(config.sft),
    )  # fmt: skip
    saved = _saved_state(config)
    kept_out = frozenset(prompt.id for prompt in dropped)
    cursor = saved.cursor if saved is not None else None
    sets = divide_for_run(material, config, kept_out, cursor=cursor)
    if dropped:
        _check_kept(sets, dropped, config)
    if _samples_for_training(config):
        check_draws(sets, config)
    if saved is not None:
        check_resumption(config, sets, saved)
    notes = [sets.describe(), *describe_evaluation(evaluation_sets(config, sets))]
    notes += [*map(printable, sets.notes), *_describe_dropped(dropped)]
    notes += map(printable, rendering_notes)
    own = describe_own_systems(sets.all, config)
    notes += filter(None, [printable(own), config.sampling.describe_stop()])
    asked = {
        (p.task, p.is_program, names_cpp(p.messages)) for p in sets.all if not has_own_system(p)
    }
    notes += _describe_missing_variables(config)
    notes += _describe_unused(config, tasks)
    notes.append(describe_thinking(config, tasks))
    notes += describe_system_prompts(config, sorted(asked))
    notes += describe_sft_openings(config)
    return PromptReport(notes, dropped, sets.files, sets.all, material.own_files)


def _describe_unused(config: Config, tasks: Sequence[str]) -> list[str]:
    """What is configured without effect. tasks: of the prompts."""
    found = []
    if unused := [name for name in config.reward.own_tasks if name not in tasks]:
        found.append(
            f"warning: no prompt has the task {' or '.join(unused)} of [reward.tasks]: set "
            "prompts.task, or the task of each line"
        )
    return found + unused_keys(config) + late_stages(config) + off_policy_bias(config)


def _saved_state(config: Config) -> QueueState | None:
    """The queue's state from which a run resumes."""
    if not config.train.steps:
        return None
    resumed = find_resume(config.checkpoint, config.run.dir)
    return None if resumed is None else read_queue_state(resumed)


def _samples_for_training(config: Config) -> bool:
    return config.train.steps > 0 and config.sampled_groups > 0


def _check_kept(sets: PromptSets, dropped: list[DroppedPrompt], config: Config) -> None:
    """Enough prompts remain after the dropped ones."""
    if _samples_for_training(config) and not sets.train:
        raise InputError(
            f"no train prompt can be rendered; {dropped[0].where}: {dropped[0].reason}"
        )
    try:
        evaluation_sets(config, sets)
    except InputError as error:
        raise InputError(f"{error}; {_describe_dropped(dropped)[0]}") from error


def _describe_dropped(dropped: list[DroppedPrompt]) -> list[str]:
    if not dropped:
        return []
    return [
        f"warning: {len(dropped)} prompts are left out, listed in {DROPPED} of the run folder; the "
        f"first is {dropped[0].where}: {dropped[0].reason}"
    ]
