"""Which settings go with engines on the trainer's GPUs. Pure; used by the configuration tree."""

from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.generator import GeneratorConfig, WeightsConfig


def check_sharing(generator: GeneratorConfig, weights: WeightsConfig, *, ranks: int) -> None:
    """Raise ValueError where weights would not reach engines on the trainer's GPUs.

    ranks: of the trainer.
    """
    possible = ("disk", "host", "ipc") if ranks == 1 else ("disk", "host")
    if generator.colocate and weights.method not in possible:
        # An engine sees its own GPUs alone, and memory of others cannot be opened there.
        raise ValueError(
            f"generator.colocate with {ranks} trainer ranks needs "
            f"weights.method {' or '.join(possible)}, not {weights.method!r}: two ranks "
            "of NCCL do not share a GPU"
        )


def check_release(
    generator: GeneratorConfig, weights: WeightsConfig, evaluation: EvalConfig
) -> None:
    """Raise ValueError where engines that give their memory back are impossible or of no use."""
    if not generator.release_memory:
        return
    given = "generator.release_memory=true"
    if generator.engine != "sglang":
        raise ValueError(
            f"{given} with generator.engine={generator.engine!r}: SGLang alone gives memory back; "
            "set generator.engine='sglang', or leave release_memory at false"
        )
    if not generator.colocate:
        raise ValueError(
            f"{given} without generator.colocate: engines on GPUs of their own are in nobody's "
            "way; set colocate=true, or leave release_memory at false"
        )
    if weights.kv_cache != "recompute":
        raise ValueError(
            f"{given} with weights.kv_cache={weights.kv_cache!r}: keys and values are given back "
            "too; set weights.kv_cache='recompute'"
        )
    if weights.overlap:
        raise ValueError(
            f"{given} and expert.weights.overlap=true exclude each other: an engine that takes "
            "weights needs its memory, and so does the trainer that trains meanwhile; leave one of "
            "them out"
        )
    if evaluation.replicas != "auto":
        raise ValueError(
            f"{given} and eval.replicas={evaluation.replicas} exclude each other: no engine keeps "
            "the weights that it evaluates while the trainer computes; leave the latter out"
        )
    if weights.join_timeout_s < generator.start_timeout_s:
        raise ValueError(
            f"{given} with expert.weights.join_timeout_s={weights.join_timeout_s:g} below "
            f"expert.generator.start_timeout_s={generator.start_timeout_s:g}: engines start while "
            "the trainer waits for them to join; raise the former"
        )
    if generator.quantization:
        raise ValueError(
            f"{given} with generator.quantization={generator.quantization!r}: of a model's layers "
            "SGLang restores buffers and a publish parameters, but what quantisation adds may be "
            "neither; leave one of them out"
        )
