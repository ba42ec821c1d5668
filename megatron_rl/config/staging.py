"""Builds and checks the configuration of each stage of a run.

Used by every process: `files.py` checks all stages when it loads a configuration. Every stage is a
whole configuration with the usual validators.
"""

from collections.abc import Sequence

import pydantic

from megatron_rl.config.tree import Config


def check_stages(config: Config) -> None:
    """Raise ValueError, which names the stage, for an impossible stage."""
    if not config.stages:
        return
    latest = 0
    for number, stage in enumerate(config.stages, start=1):
        if stage.at_step is None:
            continue
        if stage.at_step <= latest:
            raise ValueError(
                f"{name_of(config, number)} has at_step={stage.at_step}: it must be above that of "
                f"the stages before it, {latest}"
            )
        latest = stage.at_step
    stages = resolve_stages(config)
    for number, resolved in enumerate(stages):
        _check_engine(resolved, name_of(config, number))
    _check_replay(config, stages)
    _check_schedule(config, stages)


def name_of(config: Config, number: int) -> str:
    """Number and name of a stage, for messages."""
    name = config.stages[number - 1].name if number else "from the start"
    return f"stage {number}" + (f" ({name})" if name else "")


def resolve_stages(config: Config) -> list[Config]:
    """The configuration of each stage, without `stages`; stage 0 is the configuration itself.

    Raises ValueError, which names the stage.
    """
    resolved = [config.model_copy(update={"stages": []})]
    tree = resolved[0].model_dump(mode="json", exclude_none=True)
    for number, stage in enumerate(config.stages, start=1):
        for section, values in stage.changes().items():
            tree[section] |= values
        for key, weight in stage.weights.items():
            tree["prompts"][_source_of(config, key, number)]["weight"] = weight
        try:
            resolved.append(type(config).model_validate(tree))
        except pydantic.ValidationError as error:
            found = "; ".join(item["msg"].removeprefix("Value error, ") for item in error.errors())
            raise ValueError(f"{name_of(config, number)} is impossible: {found}") from error
    return resolved


def longest_stage(config: Config) -> Config:
    """The stage with the longest completions. Prompts must leave room for them, and all evaluations
    use this limit, so that they are comparable."""
    return max(resolve_stages(config), key=lambda stage: stage.sampling.max_new_tokens)


def group_sizes(config: Config) -> set[int]:
    """The sizes of groups that the stages sample."""
    return {stage.train.group_size for stage in resolve_stages(config)}


def optimizer_steps(config: Config, first: int = 0) -> int:
    """Optimizer steps from batch `first` to the end, for the schedule of the learning rate.

    A stage with a plateau adds nothing: `_check_schedule` lets it change optimizer steps only under
    a constant rate.
    """
    stages = resolve_stages(config)
    known = [(0, stages[0])]
    for trigger, stage in zip(config.stages, stages[1:], strict=True):
        known += [(trigger.at_step, stage)] if trigger.at_step is not None else []
    steps = config.train.steps
    ends = [begin for begin, _ in known[1:]] + [steps]
    return sum(
        max(0, min(end, steps) - max(begin, first)) * stage.train.minibatches
        for (begin, stage), end in zip(known, ends, strict=True)
    )


def _source_of(config: Config, key: str, number: int) -> int:
    """Number of the source that a stage calls `key`."""
    names = [source.name for source in config.prompts]
    if names.count(key) == 1:
        return names.index(key)
    if key.isdigit() and int(key) < len(names):
        return int(key)
    known = [name or str(place) for place, name in enumerate(names)]
    problem = "names several sources" if key in names else "names no source"
    raise ValueError(
        f"{name_of(config, number)}: weights.{key} {problem} of [[prompts]]: they are {known}; "
        f"their numbers, 0 to {len(names) - 1}, do as well"
    )


def _check_engine(stage: Config, name: str) -> None:
    """Engines start once, so their sizes must fit every stage."""
    limit, held = stage.sampling.max_new_tokens, stage.generator.bounded_kv_tokens
    if limit >= held:
        raise ValueError(
            f"{name}: generator.kv_tokens={held} does not hold one completion of "
            f"sampling.max_new_tokens={limit} and its prompt; engines keep their size for the "
            "whole run: raise it"
        )
    if stage.prompts and not any(source.weight for source in stage.prompts):
        raise ValueError(f"{name}: all sources of prompts have weight 0: raise one")


def _check_replay(config: Config, stages: Sequence[Config]) -> None:
    counts = {config.replay.groups_of(stage.train.prompts_per_batch) for stage in stages}
    if len(counts) > 1:
        raise ValueError(
            f"replay.share={config.replay.share:g} means {sorted(counts)} groups of a batch in "
            "different stages, but replayed groups are drawn by a fixed number: keep "
            "train.prompts_per_batch, or set replay.share=0"
        )


def _check_schedule(config: Config, stages: Sequence[Config]) -> None:
    has_plateau = any(stage.plateau is not None for stage in config.stages)
    counts = {stage.train.minibatches for stage in stages}
    if has_plateau and len(counts) > 1 and config.optimizer.lr_schedule != "constant":
        raise ValueError(
            f'optimizer.lr_schedule="{config.optimizer.lr_schedule}" needs to know the optimizer '
            "steps of the run, which a stage with a plateau and another train.minibatches leaves "
            "open: use at_step, keep "
            'train.minibatches, or set optimizer.lr_schedule="constant"'
        )
