"""Calls a user's parts of the objective once, with made-up groups and tokens.

Used by `megatron-rl run --dry-run`. Our own parts have tests and are not called.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.algorithms.advantage_estimators import GroupView
from megatron_rl.algorithms.minibatch import AdvantageFunctions, find_advantage_functions
from megatron_rl.algorithms.objective import Objective, find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import where_raised
from megatron_rl.config.staging import group_sizes
from megatron_rl.config.tree import Config
from megatron_rl.observe.metrics_table import TRAINER

if TYPE_CHECKING:
    from megatron_rl.algorithms.tokens import Tokens

Calls = dict[str, Callable[[], Any]]
"""Call of each part of the objective, by its section of [algorithm]."""
_LENGTHS = ((3, 2, 4), (1, 5, 2))
"""Completion tokens, by group."""
_TOKENS = sum(map(sum, _LENGTHS))
_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
"""Errors of a faulty user function."""


def try_objective(config: Config) -> list[str]:
    """Call each part that is a user's function; lines about them. Raises InputError."""
    cfg = config.algorithm
    functions, groups = find_advantage_functions(cfg), _groups(config)
    equal = _equal_group(groups[0])
    keeps_equal = cfg.zero_variance_groups == "keep"
    tried = _try(cfg, _advantage_calls(functions, [*groups, equal] if keeps_equal else groups))
    warnings = []
    if config.reward.environments and not keeps_equal:
        warnings = _warn_of_equal_replies(functions, groups, equal)
    if any(":" in one.name for one in (cfg.policy_loss, cfg.correction, cfg.shaping)):
        objective, tokens = find_objective(cfg), _tokens()
        tried += _try(cfg, _token_calls(objective, tokens), _check_tensor)
        policy_loss = {
            "policy_loss": lambda: objective.policy_loss(tokens, tokens.advantages, cfg.policy_loss)
        }
        tried += _try(cfg, policy_loss, partial(_check_policy_loss, tokens=tokens))
    right = "was called with made-up groups and tokens: shapes are right"
    return [f"{part} {right}" for part in tried] + warnings


def _warn_of_equal_replies(
    functions: AdvantageFunctions, groups: list[GroupView], equal: GroupView
) -> list[str]:
    """Replies of equal rewards reach the functions, if an environment rewards replies at all."""
    try:
        _try(functions.cfg, _advantage_calls(functions, [*groups, equal]))
    except InputError as error:
        return [f"warning: where an environment rewards replies one by one, {error}"]
    return []


def _no_check(part: str, found: Any) -> None:
    """AdvantageFunctions checks what it returns."""


def _try(
    cfg: AlgorithmConfig, calls: Calls, check: Callable[[str, Any], None] = _no_check
) -> list[str]:
    """Call and check the parts that are user's functions; returns their KEY='NAME'."""
    tried = []
    for part, call in calls.items():
        name = getattr(cfg, part).name
        if ":" in name:
            tried.append(f"algorithm.{part}.name={name!r}")
            check(tried[-1], _called(tried[-1], call))
    return tried


def _advantage_calls(functions: AdvantageFunctions, groups: list[GroupView]) -> Calls:
    return {
        "advantage_estimator": lambda: [functions.estimate(group) for group in groups],
        "normalization": lambda: functions.advantages(groups),
        "aggregation": lambda: functions.weights(groups),
    }


def _token_calls(objective: Objective, tokens: "Tokens") -> Calls:
    cfg, calls = objective.cfg, Calls()
    ratios = (tokens.logprobs.detach() - tokens.generator_logprobs).exp()
    if (shaping := objective.shaping) is not None:
        calls["shaping"] = lambda: shaping(tokens, cfg.shaping)
    if (correction := objective.correction) is not None:
        calls["correction"] = lambda: correction(ratios, cfg.correction)
    return calls


def _groups(config: Config) -> list[GroupView]:
    """A group of each size that a stage samples, and one that lost a completion if it may."""
    sizes = group_sizes(config)
    fewer = min(sizes) - 1
    if fewer >= max(2, config.queue.min_group_share * min(sizes)):
        sizes.add(fewer)
    generator = np.random.default_rng(0)
    return [
        GroupView(
            f"made-up-{number}",
            rewards=generator.random(size),
            is_correct=np.arange(size) > 0,
            is_well_formed=np.ones(size, bool),
            lengths=generator.integers(1, 6, size),
            classes=np.arange(size) - 1,
        )
        for number, size in enumerate(sorted(sizes, reverse=True))
    ]


def _equal_group(group: GroupView) -> GroupView:
    """A group of as many completions, all of the same reward and verdict."""
    nothing = np.zeros(len(group.rewards))
    return dataclasses.replace(
        group, prompt_id="made-up-equal", rewards=nothing, is_correct=nothing > 0
    )


def _tokens() -> "Tokens":
    import torch

    from megatron_rl.algorithms.tokens import Segments, Tokens

    flat = torch.tensor([length for lengths in _LENGTHS for length in lengths])
    members = len(_LENGTHS[0])
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        return torch.rand(_TOKENS, generator=generator)

    segments = Segments(
        torch.repeat_interleave(torch.arange(len(flat)), flat),
        flat.cumsum(0),
        torch.arange(len(flat)) // members,
        torch.arange(len(flat)) % members,
        groups=len(_LENGTHS),
        members=members,
    )
    return Tokens(
        logprobs=(-0.1 - draw()).requires_grad_(),
        generator_logprobs=-0.1 - draw(),
        advantages=draw() - 0.5,
        rewards=draw(),
        weights=torch.full((_TOKENS,), 1 / _TOKENS),
        is_real=torch.ones(_TOKENS, dtype=torch.bool),
        lags=torch.zeros(_TOKENS, dtype=torch.int64),
        segments=segments,
        is_gold=torch.zeros(_TOKENS, dtype=torch.bool),
        proximal_logprobs=-0.1 - draw(),
        reference_logprobs=-0.1 - draw(),
        reference_kl=draw(),
        values=draw(),
        effective_shares=draw(),
    )


def _check_tensor(part: str, found: Any) -> None:
    import torch

    if not isinstance(found, torch.Tensor) or found.shape != (_TOKENS,):
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise InputError(
            f"{part} gives {shape} for {_TOKENS} tokens, expected a tensor [tokens], here "
            f"[{_TOKENS}]: a number for each token, without a sum or mean over them"
        )
    if not found.isfinite().all():
        raise InputError(f"{part} gives numbers that are not finite: {found.tolist()}")


def _check_policy_loss(part: str, found: Any, tokens: "Tokens") -> None:
    import torch

    from megatron_rl.algorithms.objective import OWN_SUMS
    from megatron_rl.algorithms.policy_loss import CLIPPED_HIGH, CLIPPED_LOW, PolicyLoss

    if not isinstance(found, PolicyLoss):
        what = "a plain tensor" if isinstance(found, torch.Tensor) else type(found).__name__
        raise InputError(
            f"{part} returns {what}, expected PolicyLoss(values, sums) of "
            "megatron_rl.algorithms.policy_loss: values [tokens] to maximise, sums by name to "
            "report ({} for none), as in `return PolicyLoss(ratio * advantages, {})`"
        )
    _check_tensor(part, found.values)
    gradient = None
    if found.values.requires_grad:
        (gradient,) = torch.autograd.grad(found.values.sum(), tokens.logprobs, allow_unused=True)
    if gradient is None or not gradient.isfinite().all():
        raise InputError(
            f"{part}: its values have no finite gradient by tokens.logprobs, so nothing "
            "would be learnt: compute them from tokens.logprobs without detach()"
        )
    wrong = [
        one for one, value in found.sums.items()
        if not isinstance(value, torch.Tensor) or value.shape != ()
    ]  # fmt: skip
    if wrong:
        raise InputError(
            f"{part}: sums[{wrong[0]!r}] is no tensor of shape []: report the sum over "
            "real tokens, as (values * tokens.is_real).sum()"
        )
    reserved = {one.name.removeprefix("train/") for one in TRAINER} | OWN_SUMS
    if taken := sorted(found.sums.keys() & (reserved - {CLIPPED_LOW, CLIPPED_HIGH})):
        raise InputError(
            f"{part}: sums[{taken[0]!r}] would be mixed with our own figure of that name: choose "
            "another name, which becomes the metric train/NAME"
        )


def _called(part: str, call: Callable[[], Any]) -> Any:
    """The result of a call; InputError with the line of the user's code that raised."""
    try:
        return call()
    except InputError:
        raise
    except _ERRORS as error:
        raise InputError(
            f"{part} raised {type(error).__name__}: {error} ({where_raised(error)}), "
            "called with made-up groups and tokens"
        ) from error
