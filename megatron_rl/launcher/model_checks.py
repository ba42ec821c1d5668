"""Refuses models, references and sizes that the trainer or the engines do not support.

Used by `preflight.py` and by sweeps. Reads config.json and the tokenizer of a folder, and only the
headers of its weights. Each check raises InputError.
"""

import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from generation.engine import EngineError
from generation.vllm_command import installed_release, refuse_model
from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.backend.tensor_overlap import check_shape
from megatron_rl.config.divisibility import check_engine_experts, check_engine_tensor
from megatron_rl.config.errors import InputError
from megatron_rl.config.hf_config import positions_of
from megatron_rl.config.layer_choice import (
    Device,
    choose_layers,
    describe,
    installed_flash_attention,
)
from megatron_rl.config.prompts import RenderConfig
from megatron_rl.config.tree import Config, GeneratorConfig
from megatron_rl.plan.card import listed_card
from megatron_rl.protocol.chat_template import RenderError
from megatron_rl.protocol.checkpoint_folder import COMPLETE
from megatron_rl.protocol.render import NoTemplate, Renderer, judge_context, read_values
from megatron_rl.protocol.weight_files import whole_weight_files
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.rope import check_length
from megatron_rl.weights.layout.shape import (
    ModelShape,
    check_parallel,
    check_teacher,
    counts_of,
    read_shape,
)
from verification.environments.judging import YES_NO, blank_message

_RUBRIC = "verification.environments.judging:rubric"
_ENGINE = "transformer-engine-torch"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
MAX_FOREIGN_IDS = 1024
"""Most token ids of a teacher that the policy lacks; each adds a logprob to every token."""
_OF_CHECKPOINT = (
    ". It is a checkpoint of a trainer: take RUN/hf/final, or write an HF folder with "
    "`megatron-rl convert CHECKPOINT TARGET`"
)


def check_model_folder(folder: Path) -> None:
    """The folder has a configuration and a tokenizer."""
    if not folder.is_dir():
        raise InputError(
            f"model.path = {folder}: there is no such folder. Give a Hugging Face folder with "
            "config.json, *.safetensors and a tokenizer, or the name of a model on the Hub, such "
            "as Qwen/Qwen2.5-0.5B-Instruct (a path in a TOML file is relative to that file)"
        )
    if not (folder / "config.json").exists():
        raise InputError(
            f"model.path = {folder}: the folder has no config.json, so it is no HF model"
            + (_OF_CHECKPOINT if (folder / COMPLETE).exists() else "")
        )
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        raise InputError(
            f"model.path = {folder}: the folder has no tokenizer: "
            f"expected one of {', '.join(_TOKENIZER_FILES)}"
        )


def check_weights(folder: Path, key: str, shape: ModelShape | None = None) -> None:
    """All files of weights are there, and none is cut off; only their headers are read.

    shape: of the model that a trainer loads: the tensors are those that it means, and a stored
    output matrix of a tied model, which is read, is the embedding.
    """
    from megatron_rl.weights.folders.text_tensors import (
        EMBEDDING,
        HEAD,
        check_tied,
        open_files,
        sort_tensors,
        stored_rows,
    )

    try:
        with ExitStack() as stack:
            files = whole_weight_files(folder)
            tensors = open_files(files, stack, framework="np")
            if shape is None:
                return
            found = sort_tensors(tensors, shape, folder)
            if shape.is_tied and HEAD in found.text:
                both = (EMBEDDING, HEAD)
                rows = {name: stored_rows(files, found.spelling.rename(name)) for name in both}
                check_tied(rows, folder, 0, shape.vocab)
    except InputError as error:
        raise InputError(f"{key}: {error}") from error


def check_model(config: Config) -> None:
    """The trainer knows the architecture and has its weights; parallel sizes divide the model."""
    shape = read_shape(config.model.path)
    if shape.rotated_dim % 2:
        raise InputError(
            f"model.path = {config.model.path}: rotary positions turn pairs of a head's dimensions,"
            f" and {shape.rotated_dim} is odd (head_dim, or hidden_size / num_attention_heads)"
        )
    check_parallel(shape, config.parallel)
    check_weights(config.model.path, "model.path", shape)
    ranks, normed = config.generator.tensor_parallel, shape.jointly_normed
    check_engine_tensor(ranks, shape.heads, normed_heads=normed)
    check_expert_parallel(config.generator, shape)
    check_wrapper(config.generator, shape)
    check_latent(config, shape)
    check_sinks(config, shape)
    check_length(shape.rope_scaling, config.generator.context_tokens, "generator.context_tokens")
    if config.train.router_replay and not shape.experts:
        raise InputError(
            f"train.router_replay = true, but {config.model.path} has no experts: set it to false"
        )
    if config.parallel.overlap_tensor:
        positions, is_latent = config.train.microbatch_tokens, shape.kv_rank > 0
        check_shape(shape.hidden, positions, has_latent_attention=is_latent)


def find_device() -> Device | None:
    """This node's first GPU and what is installed for it; None: nvidia-smi lists none."""
    card = listed_card()
    if card is None:
        return None
    try:
        has_engine = bool(importlib.metadata.version(_ENGINE))
    except importlib.metadata.PackageNotFoundError:
        has_engine = False
    return Device(card.capability, installed_flash_attention(), has_engine=has_engine)


def check_layers(config: Config, device: Device) -> str:
    """The trainer's layers can be had on a GPU; returns a note if `auto` takes the local ones."""
    attention = read_shape(config.model.path).attention(config.train)
    return describe(choose_layers(config.model, attention, device))


def check_positions(config: Config) -> None:
    """An engine serves sequences of generator.context_tokens, as the model has the positions."""
    engine, longest = config.generator.engine, config.generator.context_tokens
    if engine not in ("sglang", "vllm") or not (config.train.steps or config.eval.is_wanted):
        return
    values = read_values(config.model.path / "config.json")
    _refuse_longer(longest, values, f"model.path = {config.model.path}", engine)


def _refuse_longer(longest: int, values: Mapping[str, Any], model: str, engine: str) -> None:
    """Raise InputError if the model has fewer positions. values: of its config.json."""
    positions = positions_of(values)
    if positions is not None and longest > positions:
        raise InputError(
            f"generator.context_tokens = {longest} is above the {positions} positions of {model} "
            f"(max_position_embeddings in config.json, with its rotary scaling), and {engine} "
            "serves no longer sequences: lower it, and sampling.max_new_tokens with it, or choose "
            "another model"
        )


def check_expert_parallel(generator: GeneratorConfig, shape: ModelShape) -> None:
    """An engine's ranks can divide the model's experts."""
    check_engine_experts(generator.tensor_parallel, generator.expert_parallel, counts_of(shape))
    if generator.expert_parallel > 1 and generator.engine == "sglang" and sglang_cpu.is_needed():
        # SGLang 0.5.23, layers/moe/fused_moe_native.py: no experts of other ranks.
        raise InputError(
            f"generator.expert_parallel = {generator.expert_parallel} without a GPU: SGLang's CPU "
            "mode cannot compute with divided experts; set it to 1"
        )


def check_wrapper(generator: GeneratorConfig, shape: ModelShape) -> None:
    """The engine can take new weights of a text model inside a wrapper."""
    if FAMILIES[shape.architecture].wrapper is None:
        return
    fault = f"model.path is a {shape.architecture}, which holds more than the text model"
    if generator.engine in ("hf", "vllm"):
        raise InputError(
            f"{fault}: generator.engine={generator.engine!r} takes weights of text models alone; "
            "set it to 'sglang'"
        )


def check_latent(config: Config, shape: ModelShape) -> None:
    """The engine can serve the model's latent attention, if it has such."""
    if not shape.kv_rank:
        return
    engine, given = config.generator.engine, config.generator.quantization
    faults = {
        "vllm": "weight syncs do not reach the matrices that vLLM derives for it",
        # transformers 5.19: its cache for continuous batching has one size for keys and values.
        "hf": "transformers does not cache its keys and values",
    }
    if engine in faults:
        raise InputError(
            f"generator.engine = {engine!r} with {shape.architecture}, which has latent attention: "
            f"{faults[engine]}; set it to 'sglang'"
        )
    if given and engine == "sglang":
        # SGLang 0.5.23 derives them before it quantises kv_b_proj, and a sync afterwards.
        raise InputError(
            f"generator.quantization = {given!r} with {shape.architecture}: the matrices that "
            "SGLang derives for latent attention would come from codes; set it to ''"
        )
    values = read_values(config.model.path / "config.json")
    lacking = [key for key in FAMILIES[shape.architecture].engine_keys if key not in values]
    if lacking and engine == "sglang":
        raise InputError(
            f"{config.model.path}/config.json lacks {', '.join(lacking)}, which SGLang needs for "
            f"{shape.architecture}: take these keys from the published folder"
        )


def check_sinks(config: Config, shape: ModelShape) -> None:
    """The engine can serve attention with sinks and take new weights, if the model has such."""
    if not shape.has_sinks:
        return
    generator = config.generator
    if generator.engine in ("hf", "vllm"):
        raise InputError(
            f"generator.engine = {generator.engine!r} with {shape.architecture}: weight syncs do "
            "not reach its experts there, which share a tensor; set it to 'sglang'"
        )
    if generator.quantization:
        raise InputError(
            f"generator.quantization = {generator.quantization!r} with {shape.architecture}: "
            "weight syncs reach no quantised experts with biases; set it to ''"
        )
    if generator.expert_parallel > 1:
        # sgl-project/sglang#22784: each rank tries to load the experts of all ranks.
        raise InputError(
            f"generator.expert_parallel = {generator.expert_parallel} with {shape.architecture}: "
            "SGLang 0.5.23 cannot load divided experts that share a tensor; set it to 1"
        )


def check_quantization(config: Config) -> None:
    """A quantised engine can take new weights."""
    given, engine = config.generator.quantization, config.generator.engine
    if not given or engine != "sglang" or not config.train.steps:
        return
    architecture = sglang_cpu.architecture_of(config.model.path)
    family = FAMILIES.get(architecture)
    fault = f"generator.quantization={given!r} with a model of architecture {architecture}"
    if given != "fp8":
        raise InputError(
            f"{fault}: such an engine takes no new weights. A training run allows 'fp8' alone. "
            "Set generator.quantization='fp8' or ''"
        )
    if sglang_cpu.is_needed() and family is not None and family.experts:
        # SGLang 0.5.23, kernels/ops/quantization/fp8_kernel.py: scaled_fp8_quant.
        raise InputError(
            f"{fault} without a GPU: SGLang quantises experts by a CUDA kernel. "
            "Set generator.quantization=''"
        )


def check_vllm(config: Config) -> None:
    """If vLLM is the engine, it is installed and supports the model's attention."""
    if config.generator.engine != "vllm":
        return
    try:
        installed_release()
        refuse_model(config.model.path)
    except EngineError as error:
        raise InputError(str(error)) from error


def check_reference(config: Config) -> None:
    """The reference's folder has the policy's tokens, and its ranks can divide the model."""
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
    parallel = None if by_engine else config.parallel
    check_teacher(shape, own, folder, is_exact=config.algorithm.kl.is_exact, parallel=parallel)
    check_length(shape.rope_scaling, config.generator.context_tokens, "generator.context_tokens")
    if by_engine:
        check_scorer(config, shape, own, folder)
    check_weights(folder, "algorithm.reference.policy", None if by_engine else shape)
    paths = [path / "tokenizer.json" for path in (folder, config.model.path)]
    if all(path.exists() for path in paths):
        # Only the vocabularies: library versions write the rest of the files differently.
        theirs, ours = (json.loads(path.read_text())["model"].get("vocab") for path in paths)
        if theirs != ours:
            raise InputError(
                f"algorithm.reference.policy: {paths[0]} has other tokens than {paths[1]}: a "
                "reference is given the policy's token ids, so take one with the same tokenizer"
            )


def check_judge(config: Config) -> None:
    """The judge's folder has a model, a tokenizer and a chat template that the scorer can serve."""
    folder, key = config.judge_folder, "expert.scorer.judge"
    graded = [name for name, target in config.reward.environments.items() if target == _RUBRIC]
    if folder is None:
        if graded:
            raise InputError(
                f"reward.tasks.{graded[0]}.environment = {_RUBRIC!r} asks a judge, and the run has "
                f"none: give the folder of a model by {key}"
            )
        return
    if not (folder / "config.json").exists():
        raise InputError(f"{key} = {folder} is no folder of a Hugging Face model")
    check_weights(folder, key)
    heads = read_values(folder / "config.json").get("num_attention_heads")
    if heads is not None:
        check_engine_tensor(config.scorer.tensor_parallel, heads, key="scorer.tensor_parallel")
    try:
        renderer = Renderer(RenderConfig(), folder, 1, format_checks={})
    except NoTemplate as error:
        raise InputError(
            f"{key} = {folder}: its tokenizer has no chat template, and render.chat_template is "
            f"the policy's alone. Give a chat model, or write the judge's template to {folder}/"
            "chat_template.jinja"
        ) from error
    except InputError as error:
        # It names the key of the policy's folder.
        raise InputError(f"{key} = {folder}: {error}") from error
    if graded:
        _check_rubric(renderer, config, f"{key} = {folder}", graded[0])


def _check_rubric(renderer: Renderer, config: Config, given: str, task: str) -> None:
    """The judge tells its verdicts apart, and has room for the fixed text. given: key and value."""
    if renderer.encode(YES_NO[0]) == renderer.encode(YES_NO[1]):
        raise InputError(
            f"{given}: its tokenizer gives {' and '.join(YES_NO)} the same tokens, so it cannot "
            f"grade reward.tasks.{task}: give another model"
        )
    try:
        text = renderer.template.render([{"role": "user", "content": blank_message()}])
    except RenderError as error:
        raise InputError(f"{given}: its chat template: {error}") from error
    needed, room = len(renderer.encode(text)) + 1, judge_context(config)
    if needed > room:
        raise InputError(
            f"{given}: it has room for {room} tokens, and the fixed text about a rubric takes "
            f"{needed} before question, answer and rubric of reward.tasks.{task}: give a judge "
            "with more positions, or raise expert.scorer.kv_tokens if that is the limit"
        )


def check_megatron_path(config: Config) -> None:
    """The folder of the initial Megatron checkpoint exists."""
    path = config.model.megatron_path
    if path is not None and not path.is_dir():
        raise InputError(f"model.megatron_path = {path}: there is no such folder")


def check_scorer(config: Config, shape: ModelShape, own: ModelShape, folder: Path) -> None:
    """The scorer's engine can serve the reference.

    shape: of the reference in `folder`; own: of the policy.
    """
    ranks = config.scorer.tensor_parallel
    key, normed = "scorer.tensor_parallel", shape.jointly_normed
    check_engine_tensor(ranks, shape.heads, normed_heads=normed, key=key)
    values = {"max_position_embeddings": shape.max_positions, **read_values(folder / "config.json")}
    model = f"algorithm.reference.policy = {folder}"
    _refuse_longer(config.generator.context_tokens, values, model, "sglang")
    if shape.vocab - own.vocab > MAX_FOREIGN_IDS:
        raise InputError(
            f"algorithm.reference.policy: {folder} has {shape.vocab - own.vocab} token ids more "
            f"than the policy, and an engine leaves out {MAX_FOREIGN_IDS} at most: take "
            "algorithm.reference.source = 'trainer', or another reference"
        )
