"""Refuses bad input with one clear error before any process starts or any model is loaded.

Used by `run.py`. Each check raises InputError: what was given, what was expected, what to do.
"""

import importlib.metadata
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from generation import sglang_cpu
from generation.engine import ENGINES, EngineError, load_engine
from generation.sglang_arguments import check_extras
from generation.sglang_command import FP8_RELOADS
from generation.vllm_command import installed_release, refuse_model
from megatron_rl.algorithms.minibatch import find_advantage_functions
from megatron_rl.algorithms.objective import find_objective
from megatron_rl.backend.environment import (
    ALLOCATOR,
    DeviceKind,
    device_of_host,
    uses_gpus,
)
from megatron_rl.backend.tensor_overlap import check_shape
from megatron_rl.cli.command_line.printing import printable
from megatron_rl.config.divisibility import check_engine_experts, check_engine_tensor
from megatron_rl.config.errors import InputError
from megatron_rl.config.generator import refuse_overlap, refuse_relay
from megatron_rl.config.lookup import find_function
from megatron_rl.config.reward import CODE
from megatron_rl.config.tree import (
    Config,
    GeneratorConfig,
    SftConfig,
    TrainConfig,
)
from megatron_rl.data.dropped_prompts import DROPPED, DroppedPrompt, find_dropped
from megatron_rl.data.prompts import (
    PromptSets,
    has_own_system,
    most_held_out,
    read_prompts,
)
from megatron_rl.launcher.placement import listed_gpus
from megatron_rl.launcher.ports import check_ports
from megatron_rl.launcher.reward_trial import try_rewards
from megatron_rl.launcher.run_folder import check_run_folder
from megatron_rl.launcher.scorer_checks import check_scorer
from megatron_rl.observe.exporters.exporter import check_installed
from megatron_rl.protocol.render import describe_system_prompts, names_cpp
from megatron_rl.protocol.types import Prompt
from megatron_rl.rollout_queue.evaluation import (
    completion_limits,
    describe_evaluation,
    evaluation_sets,
)
from megatron_rl.rollout_queue.replay.datasets import check_sources
from megatron_rl.rollout_queue.training_groups import check_draws
from megatron_rl.trainer.sft_dataset import read_sft_dataset
from megatron_rl.weights.layout.shape import (
    ModelShape,
    check_parallel,
    check_teacher,
    counts_of,
    read_shape,
)
from verification import settings

_MEMORY_SAVER = "torch-memory-saver"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class PromptReport(NamedTuple):
    """What a run should know of its prompts."""

    notes: list[str]
    """Lines for the user."""
    dropped: list[DroppedPrompt]
    """Prompts that are left out."""
    files: tuple[Path, ...] = ()
    """What prompts were read from."""
    prompts: Sequence[Prompt] = ()
    """Those that are kept."""


def check(
    config: Config, *, is_known_folder: bool = False, calls_rewards: bool = True
) -> PromptReport:
    """Run every check, cheapest first; returns what was found of the prompts. Raises InputError.

    is_known_folder: the caller has looked at the run folder. calls_rewards: call the user's
    functions once.
    """
    check_tools()
    if not is_known_folder:
        check_run_folder(config)
    check_names(config)
    check_installed(config)
    if config.weights.overlap:
        check_overlap(config, listed_gpus())
    if config.train.steps and config.generator.release_memory:
        check_memory_saver(device_of_host(listed_gpus()), os.environ)
    if config.train.steps and config.weights.relay:
        refuse_relay(config.generator.quantization)
    check_model_folder(config.model.path)
    check_quantization(config)
    check_vllm(config)
    if config.train.steps or config.sft.steps:
        # An evaluation alone needs no trainer: the engine knows more architectures.
        check_model(config)
    if config.train.steps:
        check_reference(config)
    check_megatron_path(config)
    check_extras(config)
    check_ports(config)
    check_sft_dataset(config.sft)
    check_replay(config)
    found = check_prompts(config)
    if calls_rewards:
        found.notes.extend(try_rewards(found.prompts, config))
    return found


def check_tools() -> None:
    """The programs that a run starts."""
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
    """Path of the C++ compiler that extensions would be built with."""
    return shutil.which(os.environ.get("CXX") or "g++")


def check_model_folder(folder: Path) -> None:
    """A Hugging Face folder with configuration, tokenizer and weights; none of them is read."""
    if not folder.is_dir():
        raise InputError(
            f"model.path = {folder}: there is no such folder. Give a Hugging Face folder with "
            "config.json, *.safetensors and a tokenizer, or the name of a model on the Hub, such "
            "as Qwen/Qwen2.5-0.5B-Instruct (a path in a TOML file is relative to that file)"
        )
    if not (folder / "config.json").exists():
        raise InputError(
            f"model.path = {folder}: the folder has no config.json, so it is no HF model"
        )
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise InputError(
            f"model.path = {folder}: the folder has no tokenizer: "
            f"expected one of {', '.join(_TOKENIZER_FILES)}"
        )
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"model.path = {folder}: the folder has no *.safetensors")


def check_model(config: Config) -> None:
    """The trainer knows the architecture, and the parallel sizes divide the model."""
    shape = read_shape(config.model.path)
    check_parallel(shape, config.parallel)
    check_engine_tensor(config.generator.tensor_parallel, shape.heads)
    check_expert_parallel(config.generator, shape)
    check_router_replay(config.train, shape, config.model.path)
    if config.parallel.overlap_tensor:
        check_shape(shape.hidden, config.train.microbatch_tokens)


def check_expert_parallel(generator: GeneratorConfig, shape: ModelShape) -> None:
    """An engine's ranks can divide the model's experts, and SGLang can run them so."""
    check_engine_experts(generator.tensor_parallel, generator.expert_parallel, counts_of(shape))
    if generator.expert_parallel > 1 and generator.engine == "sglang" and sglang_cpu.is_needed():
        # Its layers/moe/fused_moe_native.py (0.5.23) knows no experts of other ranks.
        raise InputError(
            f"generator.expert_parallel = {generator.expert_parallel} without a GPU: SGLang's CPU "
            "mode cannot compute with divided experts; set it to 1"
        )


def check_overlap(config: Config, gpus: Sequence[str]) -> None:
    """`expert.weights.overlap` is possible where the trainer computes. gpus: of this host.

    Raises InputError.
    """
    weights, quantization = config.weights, config.generator.quantization
    if config.train.steps and weights.overlap:
        refuse_overlap(uses_gpus(device_of_host(gpus)), weights.method, quantization)


def check_memory_saver(device: DeviceKind, environment: Mapping[str, str]) -> None:
    """SGLang's memory saver can work where engines give memory back. Raises InputError."""
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


def check_names(config: Config) -> None:
    """Every function that is named exists; the processes that use them start much later."""
    if config.train.steps:
        find_objective(config.algorithm)
        find_advantage_functions(config.algorithm)
    # By name alone: the engines' modules are slow to load.
    engines = dict.fromkeys(ENGINES, load_engine)
    find_function(engines, config.generator.engine, key="generator.engine")


def check_quantization(config: Config) -> None:
    """SGLang can load new weights into what it has quantised."""
    given, engine = config.generator.quantization, config.generator.engine
    if not given or engine != "sglang" or not config.train.steps:
        return
    architecture = sglang_cpu.architecture_of(config.model.path)
    if given != "fp8" or architecture not in FP8_RELOADS:
        raise InputError(
            f"generator.quantization={given!r} with a model of architecture {architecture}: "
            "SGLang 0.5.23 cannot load new weights into such an engine. Allowed in a training run: "
            f"'fp8' with {' or '.join(FP8_RELOADS)}. Set generator.quantization=''"
        )


def check_vllm(config: Config) -> None:
    """vLLM is there and has attention for the model, where it is the engine."""
    if config.generator.engine != "vllm":
        return
    try:
        installed_release()
        refuse_model(config.model.path)
    except EngineError as error:
        raise InputError(str(error)) from error


def check_reference(config: Config) -> None:
    """A reference in a folder has the policy's tokens, and what computes it can divide it."""
    by_engine = config.algorithm.needs_scorer
    folder = config.algorithm.reference.folder
    if folder is None and not by_engine:
        return
    folder = folder or config.model.path
    if not (folder / "config.json").exists():
        raise InputError(
            f"algorithm.reference.policy = '{folder}' is none of none, start, ema, and no folder "
            "of a Hugging Face model"
        )
    shape, own = read_shape(folder), read_shape(config.model.path)
    check_teacher(shape, own, folder, is_exact=config.algorithm.kl.is_exact)
    if by_engine:
        check_scorer(config, shape, own, folder, gpus=listed_gpus())
    else:
        check_parallel(shape, config.parallel)
    paths = [path / "tokenizer.json" for path in (folder, config.model.path)]
    if all(path.exists() for path in paths):
        # Not the whole files: versions of libraries write them differently.
        theirs, ours = (json.loads(path.read_text())["model"].get("vocab") for path in paths)
        if theirs != ours:
            raise InputError(
                f"algorithm.reference.policy: {paths[0]} has other tokens than {paths[1]}: a "
                "reference is given the policy's token ids, so take one with the same tokenizer"
            )


def check_megatron_path(config: Config) -> None:
    """Only reinforcement learning starts from a Megatron checkpoint; engines read HF folders."""
    path = config.model.megatron_path
    if path is None:
        return
    if not path.is_dir():
        raise InputError(f"model.megatron_path = {path}: there is no such folder")
    if config.sft.steps or not config.train.steps:
        raise InputError(
            f"model.megatron_path = {path} is read by reinforcement learning alone, without "
            "sft.steps and with train.steps: make a HF folder of it with `megatron-rl convert`, "
            "and give that as model.path"
        )


def check_router_replay(train: TrainConfig, shape: ModelShape, folder: Path) -> None:
    """Only a mixture of experts has choices to replay."""
    if train.router_replay and not shape.experts:
        raise InputError(
            f"train.router_replay = true, but {folder} has no experts: set it to false"
        )


def check_sft_dataset(sft: SftConfig) -> None:
    """Every line of sft.dataset is {"messages": [{"role", "content"}, ...], "response": text}."""
    if sft.dataset is None:
        if sft.steps or sft.baseline:
            key = "sft.steps" if sft.steps else "sft.baseline"
            raise InputError(
                f"{key} needs sft.dataset: name a JSONL file of {{messages, response}}"
            )
        return
    if sft.steps or sft.baseline:
        read_sft_dataset(sft.dataset)


def check_replay(config: Config) -> None:
    """What is replayed can be read, and the objective can learn from it."""
    if not config.replay.share or not config.train.steps:
        return
    if find_advantage_functions(config.algorithm).needs_classes:
        raise InputError(
            f"replay.share={config.replay.share:g} and algorithm.advantage_estimator.name="
            f"{config.algorithm.advantage_estimator.name!r} exclude each other: which answers are "
            "the same is not recorded; set the share to 0, or take another advantage estimator"
        )
    check_sources(config)


def check_prompts(config: Config) -> PromptReport:
    """All sources load; there are train prompts, and enough held-out ones for the evaluation."""
    settings.check_sources([*config.prompts, *(one.prompts for one in config.eval.sets)])
    settings.check_functions(config.reward)
    material = read_prompts(config.prompts, config.run.seed, eval_sets=config.eval.sets)
    sets = material.divide()
    settings.check_prompts(sets.all, config.reward)
    tasks = sorted({prompt.task for prompt in sets.all})
    if any(config.reward.all_tasks[task].compare == CODE for task in tasks):
        settings.check_sandbox(config.reward)
    most = most_held_out(config)
    if _samples_for_training(config) and not material.divide(most_held_out=most).train:
        raise InputError(
            'there are no train prompts: lines need "split": "train" or none, and a question that '
            "is not held out; train.steps=0 only evaluates"
        )
    evaluation_sets(config, sets)
    dropped = find_dropped(sets.all, config, completion_limits(config, sets))
    sets = material.divide(frozenset(prompt.id for prompt in dropped), most_held_out=most)
    if dropped:
        _check_kept(sets, dropped, config)
    if _samples_for_training(config):
        check_draws(sets, config)
    notes = [sets.describe(), *describe_evaluation(evaluation_sets(config, sets))]
    notes += [*map(printable, sets.notes), *_describe_dropped(dropped)]
    asked = {
        (p.task, p.is_program, names_cpp(p.messages)) for p in sets.all if not has_own_system(p)
    }
    notes += describe_system_prompts(config, sorted(asked))
    return PromptReport(notes, dropped, sets.files, sets.all)


def _samples_for_training(config: Config) -> bool:
    return config.train.steps > 0 and config.sampled_groups > 0


def _check_kept(sets: PromptSets, dropped: list[DroppedPrompt], config: Config) -> None:
    """Enough prompts are left without the dropped ones."""
    if _samples_for_training(config) and not sets.train:
        raise InputError(
            f"no train prompt can be rendered; {dropped[0].where}: {dropped[0].reason}. Raise "
            "generator.context_tokens, or lower sampling.max_new_tokens"
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
