"""All figures of a configuration on given GPUs, and its problems.

Used by `megatron-rl plan`. Pure, except that it reads the model's config.json.
"""

from dataclasses import dataclass, replace

from megatron_rl.config.errors import InputError
from megatron_rl.config.gpus import DEFAULT, HOST_GPUS, find_gpu
from megatron_rl.config.layer_choice import Device, installed_flash_attention, settle_layers
from megatron_rl.config.staging import longest_stage, name_of, resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.plan.card import Card
from megatron_rl.plan.communicators import engine_communicator_bytes
from megatron_rl.plan.flops import (
    StepFlops,
    bubble_share,
    hardware_flops,
    recomputed_flops,
    step_flops,
    step_seconds,
)
from megatron_rl.plan.generator import EngineMemory, cache_tokens, engine_memory
from megatron_rl.plan.padding import Padding, find_padding, padding_advice
from megatron_rl.plan.parameters import active_parameters, model_parameters
from megatron_rl.plan.problems import (
    SharedMemory,
    count_problems,
    engine_problems,
    generator_gpus,
    scorer_gpus,
    scorer_problems,
    shared_memory,
    sharing_problems,
    trainer_problems,
    turn_advice,
    wanted_gpus,
)
from megatron_rl.plan.trainer_memory import ITEM_BYTES, RankMemory, fullest_rank, microbatch_of
from megatron_rl.plan.weight_sync import WeightSyncCost, sync_cost
from megatron_rl.weights.layout.shape import ModelShape, check_parallel, read_shape

MAX_BUBBLE = 0.25
"""Share of a step that a pipeline stage may idle without a warning."""


@dataclass(frozen=True)
class Hardware:
    """Assumptions of a plan about the machines."""

    card: Card = Card(DEFAULT)
    gpus: int | None = None
    """GPUs of the run; None: as many as the configuration uses."""
    mfu: float = 0.35
    """Share of the GPUs' peak FLOPs that the model uses."""
    bytes_per_s: float | None = None
    """Rate of one rank in a weight sync; None: `sync_rate`."""
    fixed_s: float = 0.4
    """Seconds of a weight sync in addition to its bytes: pause, roll call, digests. An estimate."""


@dataclass(frozen=True)
class Step:
    """One batch of reinforcement learning."""

    sequences: int
    mean_tokens: int
    """Assumed tokens of a sequence, prompt and completion."""
    microbatches: int
    """Microbatches of each data-parallel rank and optimizer step."""
    flops: StepFlops
    hardware_flops: int
    """Computed FLOPs, with recomputation and padding."""
    seconds: float
    """Seconds at the stated MFU, with padding; without generation and weight sync."""
    bubble_share: float
    padding: Padding


@dataclass(frozen=True)
class SizingPlan:
    """All figures."""

    parameters: int
    active_parameters: int
    trainer_gpus: int
    generator_gpus: int
    """0: engines share the trainer's GPUs."""
    scorer_gpus: int
    """0: no scorer."""
    gpu: str
    gpu_bytes: int
    mfu: float
    trainer: RankMemory
    """Memory of the fullest rank."""
    engine: EngineMemory
    shared: SharedMemory | None
    """Memory of a GPU that trainer and engine share."""
    context_tokens: int
    kv_tokens: int
    step: Step
    sync: WeightSyncCost
    problems: tuple[str, ...]
    """Reasons why the run cannot work."""
    advice: tuple[str, ...]
    """Possible improvements."""
    is_known_gpu: bool = True
    """Problems with another card are warnings: its memory and speeds are partly assumed."""
    stages: "tuple[PlannedStage, ...]" = ()
    """With the configuration itself as the first; empty for a run without stages."""

    @property
    def free_bytes(self) -> int:
        """Left on the fullest trainer rank; below 0 when it does not fit."""
        return self.gpu_bytes - self.trainer.total

    @property
    def kv_completions(self) -> int:
        """Completions of context_tokens that an engine's KV cache could hold at once."""
        return self.engine.kv_tokens // self.context_tokens


@dataclass(frozen=True)
class PlannedStage:
    """The figures of a stage of the run."""

    name: str
    begins: str
    max_new_tokens: int
    minibatches: int
    max_staleness: int
    plan: SizingPlan
    """Of a run that is all this stage, with a context that just holds its longest completions: its
    prompts have the room that those of all stages have."""


def make_plan(config: Config, hardware: Hardware, mean_tokens: int | None = None) -> SizingPlan:
    """The plan of a configuration; its model folder needs config.json alone.

    mean_tokens: of a prompt and its completion, on average; None: half of
    generator.context_tokens. Raises InputError for impossible sizes.
    """
    shape = read_shape(config.model.path)
    check_parallel(shape, config.parallel)
    card = hardware.card
    gpu = find_gpu(card.gpu)
    gpu = replace(gpu, memory_bytes=card.memory_bytes or gpu.memory_bytes)
    config, problem, note = _settled(config, shape, card.capability or gpu.capability)
    mean = mean_tokens or max(1, config.generator.context_tokens // 2)
    trainer = fullest_rank(shape, config, mean)
    item_bytes, generator = ITEM_BYTES[config.model.dtype], config.generator
    engine = engine_memory(
        shape,
        generator,
        item_bytes=item_bytes,
        gpu_bytes=gpu.memory_bytes,
        communicators=engine_communicator_bytes(config, config.parallel.world_size),
    )
    kv_tokens = cache_tokens(generator, engine)
    # Half of the context is no more than a guess at the mean.
    trusted = None if mean_tokens is None else kv_tokens
    sync = sync_cost(shape, config, bytes_per_s=hardware.bytes_per_s, fixed_s=hardware.fixed_s)
    step = _step(shape, config, hardware, mean)
    shared = shared_memory(config, trainer, engine)
    stages = _stages(config, hardware, mean_tokens) if config.stages else ()
    return SizingPlan(
        parameters=model_parameters(shape),
        active_parameters=active_parameters(shape),
        trainer_gpus=config.parallel.world_size,
        generator_gpus=0 if generator.colocate else generator_gpus(config),
        scorer_gpus=scorer_gpus(config),
        gpu=card.name or card.gpu,
        gpu_bytes=gpu.memory_bytes,
        mfu=hardware.mfu,
        trainer=trainer,
        engine=engine,
        shared=shared,
        context_tokens=generator.context_tokens,
        kv_tokens=kv_tokens,
        step=step,
        sync=sync,
        problems=(
            *problem,
            *trainer_problems(shape, config, trainer, gpu, mean),
            *engine_problems(shape, config, engine, gpu),
            *sharing_problems(config, shared, gpu),
            *scorer_problems(config, gpu),
            *count_problems(config, hardware.gpus),
            *(f"{stage.name}: {text}" for stage in stages for text in stage.plan.problems),
        ),
        is_known_gpu=not card.name,
        advice=(*note, *_advice(config, hardware.gpus, step, sync, kv_tokens=trusted)),
        stages=stages,
    )


def _settled(
    config: Config, shape: ModelShape, capability: tuple[int, int]
) -> tuple[Config, list[str], list[str]]:
    """The configuration with the layers that a GPU's trainer takes, a problem and a note of them.

    The GPU's node is taken to have TransformerEngine, and the flash-attn that is installed here.
    """
    attention = shape.attention(config.train)
    device = Device(capability, installed_flash_attention())
    try:
        model, note = settle_layers(config.model, attention, device)
    except InputError as error:
        return config, [str(error)], []
    return config.model_copy(update={"model": model}), [], [note] if note else []


def _stages(
    config: Config, hardware: Hardware, mean_tokens: int | None
) -> tuple[PlannedStage, ...]:
    """The plan of each stage as if it were the whole run, but for its GPUs."""
    prompt_room = config.generator.context_tokens - longest_stage(config).sampling.max_new_tokens
    found = []
    for number, stage in enumerate(resolve_stages(config)):
        limit = stage.sampling.max_new_tokens
        generator = stage.generator.model_copy(update={"context_tokens": prompt_room + limit})
        sized = stage.model_copy(update={"generator": generator})
        found.append(
            PlannedStage(
                name=name_of(config, number),
                begins=begins(config, number),
                max_new_tokens=limit,
                minibatches=stage.train.minibatches,
                max_staleness=stage.queue.max_staleness,
                plan=make_plan(sized, replace(hardware, gpus=None), mean_tokens),
            )
        )
    return tuple(found)


def begins(config: Config, stage: int) -> str:
    """When a stage begins, for people."""
    if not stage:
        return "batch 0"
    trigger = config.stages[stage - 1]
    if trigger.plateau is not None:
        return f"plateau of {trigger.plateau.metric.removeprefix('rollout/')}"
    at_step = trigger.at_step
    never = at_step is not None and at_step >= config.train.steps
    return f"batch {at_step}" + (" (never: train.steps)" if never else "")


def _step(shape: ModelShape, config: Config, hardware: Hardware, mean_tokens: int) -> Step:
    name, model, parallel = hardware.card.gpu, config.model, config.parallel
    gpu = find_gpu(name)
    peak = gpu.fp8_flops if model.fp8 != "none" else gpu.bf16_flops
    if peak is None:
        raise InputError(f"model.fp8 needs FP8 tensor cores, which {name} does not have")
    sequences = config.train.prompts_per_batch * config.train.group_size
    flops = step_flops(shape, sequences=sequences, length=mean_tokens)
    microbatches, tokens = microbatch_of(config, mean_tokens).count, sequences * mean_tokens
    padding = find_padding(shape, config, name, tokens=tokens, microbatches=microbatches)
    computed = flops.plus(padding.flops)
    again = 0
    if model.recompute == "selective":
        modules = model.recompute_modules
        again = recomputed_flops(shape, modules, sequences=sequences, length=mean_tokens)
        again += recomputed_flops(shape, modules, sequences=padding.positions, length=1)
    return Step(
        sequences=sequences,
        mean_tokens=mean_tokens,
        microbatches=microbatches,
        flops=flops,
        hardware_flops=hardware_flops(
            computed, recomputes_layers=model.recompute == "full", again=again
        ),
        seconds=step_seconds(computed, gpus=parallel.world_size, peak_flops=peak, mfu=hardware.mfu),
        bubble_share=bubble_share(parallel.pipeline, parallel.virtual_stages, microbatches),
        padding=padding,
    )


def _advice(
    config: Config, gpus: int | None, step: Step, sync: WeightSyncCost, *, kv_tokens: int | None
) -> list[str]:
    train, generator = config.train, config.generator
    found = []
    wanted = wanted_gpus(config)
    if gpus is not None and wanted < gpus:
        found.append(f"{gpus - wanted} of {gpus} GPUs are idle: raise generator.replicas")
    if train.microbatch_tokens < generator.context_tokens:
        found.append(
            f"a sequence may have generator.context_tokens={generator.context_tokens}, more than "
            f"train.microbatch_tokens={train.microbatch_tokens}: memory is that of the former"
        )
    if kv_tokens is not None and generator.max_running * step.mean_tokens > kv_tokens:
        running = kv_tokens // step.mean_tokens
        found.append(
            f"the KV cache holds {running} completions of {step.mean_tokens} tokens, fewer than "
            f"generator.max_running={generator.max_running}"
        )
    if step.bubble_share > MAX_BUBBLE:
        found.append(
            f"{step.microbatches} microbatches leave pipeline stages idle "
            f"{step.bubble_share:.0%} of a step: lower train.microbatch_tokens or parallel.pipeline"
        )
    if max(config.parallel.tensor, generator.tensor_parallel) > HOST_GPUS:
        found.append(f"more than {HOST_GPUS} tensor ranks span hosts: their traffic is slow there")
    if sync.seconds > config.weights.deadline_s:
        found.append(
            f"a weight sync takes {sync.seconds:.0f} s, longer than "
            f"expert.weights.deadline_s={config.weights.deadline_s:.0f}"
        )
    found += padding_advice(step.padding, step.flops, step.seconds)
    found += turn_advice(config, step.seconds)
    return found
