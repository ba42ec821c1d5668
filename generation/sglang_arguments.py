"""Checks `generator.extra_args` and `generator.env` for SGLang's server.

`check_extras` runs in the launcher, before anything starts. It asks a child, which alone imports
SGLang and its parser: `python -m generation.sglang_arguments` reads a Question from stdin and
answers with the fault, or with nothing.
"""

import argparse
import dataclasses
import difflib
import fnmatch
import os
import sys
from pathlib import Path

import msgspec

from generation.child import ChildFailed, ask
from generation.engine import engine_setup
from generation.sglang_command import (
    MEETS_BY,
    extra_flags,
    option_of,
    server_arguments,
    server_environment,
)
from generation.sglang_orders import LOADER
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.protocol.render import read_values
from megatron_rl.weights.layout.rope import read_rope

_MODULE = "generation.sglang_arguments"
_PARSE_LIMIT_S = 120.0
_FUSED_ROTATION = "--enable-fused-qk-norm-rope"
_OWN_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "SGLANG_EXTERNAL_MODEL_PACKAGE",
    MEETS_BY, "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
_OF_THE_RUN = (
    # Arguments that `server_arguments` gives in some runs only.
    "disable-overlap-schedule", "quantization", "enable-return-routed-experts",
    "enable-memory-saver", "skip-tokenizer-init", "nccl-port", "nnodes", "node-rank",
    "dist-init-addr", "moe-runner-backend",
    # The opposite of --disable-shared-experts-fusion.
    "enforce-shared-experts-fusion",
    # Where an engine runs, and which peers may reach it.
    "help", "config", "device", "base-gpu-id", "gpu-id-step", "nccl-init-addr", "use-ray",
    "revision", "api-key", "admin-api-key", "ssl-*", "enable-ssl-refresh", "enable-http2",
    "grpc-*", "smg-*", "sidecar*", "tokenizer-*", "detokenizer-worker-num",
    "enable-http-worker-reuseport", "incremental-streaming-output", "is-embedding",
    "fastapi-root-path", "sampling-defaults", "preferred-sampling-params",
    "return-input-ids", "return-output-ids",
)  # fmt: skip
_OF_WEIGHTS = (
    # Weights that the trainer cannot reach, or with another layout.
    "load-format", "model-loader-extra-config", "weight-*", "startup-weight-load-mode",
    "delete-ckpt-after-loading", "checkpoint-engine-*", "remote-instance-*", "modelopt-*",
    "rl-quant-*", "quantize-and-serve", "*lora*", "speculative-*", "decoupled-spec-*",
    "spec-trace-dir", "enable-multi-layer-eagle", "data-parallel-size", "pipeline-parallel-size",
    "attention-data-parallel-size", "attention-context-parallel-size", "moe-data-parallel-size",
    "moe-dense-tp-size", "decode-context-parallel-size", "enable-dp-*", "enable-eplb", "eplb-*",
    "ep-num-redundant-experts", "init-expert-location", "elastic-ep-*", "enable-elastic-*",
    "max-ep-size", "kt-*", "cpu-offload-gb", "offload-*", "ple-offload-*", "enable-paged-experts",
    "enable-weights-cpu-backup", "enable-draft-weights-cpu-backup", "dllm-*", "encoder-*",
    # It would undo --disable-shared-experts-fusion (0.5.23, arg_groups/overrides.py:1564).
    "enable-waterfill",
    # Most of its choices divide experts over all ranks (overrides.py:1611), and each rank then has
    # the whole shared expert (deepseek_v2.py:873). Slices go by generator.expert_parallel.
    "moe-a2a-backend",
)  # fmt: skip
_OF_KERNELS = (
    # They keep copies of weights: model._derived_weight_cache_error of kernel_plugins/*/binding.py.
    "enable-nvidia-megakernel", "enable-amd-monokernel", "monokernel-backend",
)  # fmt: skip
_OF_LOGPROBS = ("enable-watermark", "watermark-*")
_OF_VERSIONS = (
    # Keys and values that outlive the weights they were computed with.
    "enable-hierarchical-cache", "enable-hicache", "hicache-*", "enable-lmcache", "lmcache-*",
    "enable-flexkv", "flexkv-*", "radix-cache-backend", "enable-session-radix-cache",
    "enable-streaming-session", "disaggregation-*", "enable-pd*", "enable-unified-cache-*",
    "unified-cache-*", "stream-interval", "weight-version",
)  # fmt: skip
_REASONS = {
    "the run sets it itself": _OF_THE_RUN,
    "the trainer's weights would not reach all that computes": _OF_WEIGHTS,
    "tokens could come from weights of another version than they say": _OF_VERSIONS,
    "SGLang would refuse every weight sync": _OF_KERNELS,
    "tokens would be drawn from another distribution than their logprobs say": _OF_LOGPROBS,
}


class Question(msgspec.Struct):
    """Input of the child."""

    command: list[str]
    """The server's command line without the extra arguments."""
    extra: dict[str, bool | int | float | str | list[bool | int | float | str]]


def check_extras(config: Config) -> None:
    """Raise InputError for an argument or a variable that a run cannot work with."""
    generator = config.generator
    if generator.engine != "sglang" or not (generator.extra_args or generator.env):
        return
    setup = engine_setup(config, 0, ())
    own = server_environment(dataclasses.replace(setup, env={}))
    for name in setup.env:
        if name in own or name in _OWN_VARIABLES or name.startswith("MEGATRON_RL_"):
            raise InputError(f"generator.env.{name}: the run sets it itself; leave it out")
    if _FUSED_ROTATION in map(option_of, setup.extra_args) and is_stretched(setup.model):
        # SGLang 0.5.23 gives this kernel yarn's factor by another rule than its other kernels, and
        # for a linear stretch too (models/qwen3_moe.py: compute_yarn_parameters).
        raise InputError(
            f"generator.extra_args.{_FUSED_ROTATION.removeprefix('--')}: where config.json scales "
            "rotary embeddings, the kernel turns positions otherwise than the trainer; leave it out"
        )
    if setup.extra_args:
        given = server_arguments(dataclasses.replace(setup, extra_args={}), LOADER)
        question = msgspec.json.encode(Question(given, dict(setup.extra_args)))
        try:
            fault = ask(_MODULE, question, {**os.environ, **own}, _PARSE_LIMIT_S).decode()
        except ChildFailed as error:
            fault = f"generator.extra_args: SGLang's parser cannot be asked: {error}"
        if fault:
            raise InputError(fault)


def is_stretched(model: Path) -> bool:
    """Whether the model folder's config.json scales rotary embeddings."""
    return read_rope(read_values(model / "config.json"), model)["rope_type"] != "default"


class _Parser(argparse.ArgumentParser):
    """A parser that raises ValueError where argparse would end the process."""

    def error(self, message: str) -> None:
        """Raise instead of ending the process."""
        raise ValueError(message)


def judge(question: Question, parser: argparse.ArgumentParser) -> str:
    """Return the first fault of an extra argument; "": none."""
    options = {option: action for action in parser._actions for option in action.option_strings}
    own = {
        options[word.partition("=")[0]].dest
        for word in question.command
        if word.partition("=")[0] in options
    }
    for name in question.extra:
        option = option_of(name)
        given = f"generator.extra_args.{name}"
        if option not in options:
            longer = [known for known in options if known.startswith(option)]
            nearest = longer or difflib.get_close_matches(option, options, n=1)
            hint = f"; did you mean {nearest[0].removeprefix('--')!r}?" if nearest else ""
            return f"{given}: SGLang's server has no argument {option}{hint}"
        reason = _refusal(options[option], own)
        if reason:
            return f"{given}: {reason}; leave it out"
    try:
        parser.parse_args([*question.command, *extra_flags(question.extra)])
    except ValueError as error:
        return f"generator.extra_args: {error}"
    return ""


def _refusal(action: argparse.Action, own: set[str]) -> str:
    if action.dest in own:
        return next(iter(_REASONS))
    names = [option.removeprefix("--") for option in action.option_strings]
    for reason, patterns in _REASONS.items():
        if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns):
            return reason
    return ""


def main() -> None:
    """Entry of the child."""
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.write(judge(question, parser))


if __name__ == "__main__":
    main()
