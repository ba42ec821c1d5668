"""Finds given keys of `[algorithm]` and stages that have no effect, and biased objectives.

The preflight reports them: a run with such a key trains another objective than its author meant.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from megatron_rl.config.algorithm import REGRESSIONS, AlgorithmConfig, Part
from megatron_rl.config.expert import public_key
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.staging import name_of, resolve_stages
from megatron_rl.config.tree import Config


class _Reader(NamedTuple):
    """What reads some keys of a part."""

    part: str
    keys: tuple[str, ...]
    is_met: Callable[[AlgorithmConfig], bool]
    """Whether something reads the keys."""
    what: str
    """The setting with which something would."""


def _is(part: str, *names: str) -> Callable[[AlgorithmConfig], bool]:
    """Whether a part has one of these names, or is a user's function, which may read any key."""

    def found(cfg: AlgorithmConfig) -> bool:
        name = getattr(cfg, part).name
        return name in names or ":" in name

    return found


_READERS = (
    _Reader(
        "advantage_estimator", ("k",), _is("advantage_estimator", "pass_at_k", "majority"),
        'advantage_estimator.name = "pass_at_k" or "majority"',
    ),
    _Reader(
        "advantage_estimator", ("temperature",), _is("advantage_estimator", "soft_value"),
        'advantage_estimator.name = "soft_value"',
    ),
    _Reader(
        "policy_loss", ("eps_low", "eps_high", "level"), _is("policy_loss", "clipped", "cispo"),
        'policy_loss.name = "clipped" or "cispo"',
    ),
    _Reader(
        "policy_loss", ("dual_clip",), _is("policy_loss", "clipped"),
        'policy_loss.name = "clipped"',
    ),
    _Reader(
        "correction", ("high", "level"), _is("correction", "truncated", "masked"),
        'correction.name = "truncated" or "masked"',
    ),
    _Reader("correction", ("low",), _is("correction", "masked"), 'correction.name = "masked"'),
    _Reader(
        "kl", ("coefficient",), lambda cfg: cfg.kl.placement != "none",
        'kl.placement = "loss" or "reward"',
    ),
    _Reader(
        "kl", ("horizon",), lambda cfg: cfg.kl.placement == "reward" or cfg.kl.is_exact,
        'kl.placement = "reward" or kl.estimator = "exact"',
    ),
    _Reader(
        "shaping", ("temperature", "baseline"), _is("shaping", *REGRESSIONS),
        f"shaping.name = {' or '.join(map(repr, REGRESSIONS))}",
    ),
    _Reader(
        "shaping", ("value_lr",), lambda cfg: cfg.learns_value or ":" in cfg.shaping.name,
        'shaping.baseline = "value"',
    ),
    _Reader(
        "shaping", ("top_reward",), _is("shaping", "cross_entropy"),
        'shaping.name = "cross_entropy"',
    ),
    _Reader("shaping", ("support", "bound"), _is("shaping", "jepo"), 'shaping.name = "jepo"'),
    _Reader(
        "reference", ("decay",), lambda cfg: cfg.reference.policy == "ema",
        'reference.policy = "ema"',
    ),
    _Reader(
        "gold", ("opening", "closing"), lambda cfg: cfg.used_gold is not None,
        'gold.groups = "unrewarded" or "all"',
    ),
)  # fmt: skip


def unused_keys(config: Config) -> list[str]:
    """A warning for each given key of `[algorithm]` that nothing reads.

    Keys with their preset's value do not count, nor does a part with all keys: a run wrote it.
    """
    cfg = config.algorithm
    return [
        f"warning: {public_key(f'algorithm.{reader.part}.{key}')} has no effect without "
        f"algorithm.{reader.what}"
        for reader in _READERS
        if not reader.is_met(cfg)
        for key in _given(cfg, reader.part)
        if key in reader.keys
    ]


def _given(cfg: AlgorithmConfig, name: str) -> Iterator[str]:
    part = getattr(cfg, name)
    fields = type(part).model_fields.keys() - Part.model_fields.keys()
    if part.model_fields_set >= fields:
        return
    of_preset = PRESETS[cfg.preset].values.get(name, {})
    for key in sorted(part.model_fields_set):
        if key not in of_preset or of_preset[key] != getattr(part, key):
            yield key


def off_policy_bias(config: Config) -> list[str]:
    """A warning if a loss without an importance ratio trains on data of older policies."""
    cfg = config.algorithm
    shaping = cfg.shaping.name
    # Regressions hold whoever sampled. The KL of positions alone is in no advantage, and has no
    # ratio to correct.
    corrects = cfg.correction.name != "none" or shaping in REGRESSIONS or ":" in shaping
    estimates = cfg.advantage_estimator.name != "zero" or shaping != "none"
    has_advantages = estimates or cfg.kl.adds_to_advantages
    if cfg.policy_loss.name != "reinforce" or corrects or not has_advantages:
        return []
    if not config.train.steps:
        return []
    stages = resolve_stages(config)
    staleness = max(stage.queue.max_staleness for stage in stages)
    minibatches = max(stage.train.minibatches for stage in stages)
    why = [f"queue.max_staleness = {staleness}"] if staleness else []
    if minibatches > 1:
        why.append(f"train.minibatches = {minibatches}")
    if not why:
        return []
    return [
        f'warning: algorithm.policy_loss.name = "reinforce" has no importance ratio, and '
        f"{' and '.join(why)} trains on completions of older policies: the gradient is biased. "
        "Set queue.max_staleness = 0 and train.minibatches = 1, or algorithm.correction.name = "
        '"truncated"'
    ]


def late_stages(config: Config) -> list[str]:
    """A warning for each stage whose first batch is after the last one, plateaus reached at once.

    It is no refusal, because a run may be made longer later.
    """
    steps, first, found = config.train.steps, 0, []
    for number, stage in enumerate(config.stages, start=1):
        if stage.plateau is not None:
            first += 2 * stage.plateau.window
            why = f"its plateau.window={stage.plateau.window} needs {first} batches before it"
        else:
            first = max(stage.at_step or 0, first + 1)
            why = f"its first batch is {first}"
        if first >= steps > 0:
            found.append(
                f"warning: {name_of(config, number)} never begins: {why}, and with train.steps="
                f"{steps} the last batch is {steps - 1}. Lower at_step or plateau.window, or raise "
                "train.steps"
            )
    return found
