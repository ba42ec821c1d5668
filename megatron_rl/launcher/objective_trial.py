"""Calls a user's parts of the objective once, with made-up groups and tokens.

Used by `megatron-rl run --dry-run`. Our own parts have tests and are not called.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.algorithms.advantage_estimators import GroupView
from megatron_rl.algorithms.minibatch import AdvantageFunctions, find_advantage_functions
from megatron_rl.algorithms.objective import Objective, find_objective
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import where_raised
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


def try_objective(cfg: AlgorithmConfig) -> list[str]:
    """Call each part that is a user's function; lines about them. Raises InputError."""
    advantage_functions = find_advantage_functions(cfg)
    tried = _try(cfg, _advantage_calls(advantage_functions), _check_arrays)
    if any(":" in one.name for one in (cfg.policy_loss, cfg.correction, cfg.shaping)):
        objective, tokens = find_objective(cfg), _tokens()
        tried += _try(cfg, _token_calls(objective, tokens), _check_tensor)
        policy_loss = {
            "policy_loss": lambda: objective.policy_loss(tokens, tokens.advantages, cfg.policy_loss)
        }
        tried += _try(cfg, policy_loss, partial(_check_policy_loss, tokens=tokens))
    return [f"{part} was called with made-up tokens: shapes are right" for part in tried]


def _try(cfg: AlgorithmConfig, calls: Calls, check: Callable[[str, Any], None]) -> list[str]:
    """Call and check the parts that are user's functions; returns their KEY='NAME'."""
    tried = []
    for part, call in calls.items():
        name = getattr(cfg, part).name
        if ":" in name:
            tried.append(f"algorithm.{part}.name={name!r}")
            check(tried[-1], _called(tried[-1], call))
    return tried


def _advantage_calls(functions: AdvantageFunctions) -> Calls:
    cfg, groups = functions.cfg, _groups()
    lengths = [group.lengths for group in groups]
    rewards = [group.rewards for group in groups]
    return {
        "advantage_estimator": lambda: [
            functions.estimator(group, cfg.advantage_estimator) for group in groups
        ],
        "normalization": lambda: functions.normalization(rewards, cfg.normalization),
        "aggregation": lambda: functions.aggregation(lengths, cfg.aggregation),
    }


def _token_calls(objective: Objective, tokens: "Tokens") -> Calls:
    cfg, calls = objective.cfg, Calls()
    ratios = (tokens.logprobs.detach() - tokens.generator_logprobs).exp()
    if (shaping := objective.shaping) is not None:
        calls["shaping"] = lambda: shaping(tokens, cfg.shaping)
    if (correction := objective.correction) is not None:
        calls["correction"] = lambda: correction(ratios, cfg.correction)
    return calls


def _groups() -> list[GroupView]:
    generator = np.random.default_rng(0)
    return [
        GroupView(
            f"made-up-{number}",
            rewards=generator.random(len(lengths)),
            is_correct=np.arange(len(lengths)) > 0,
            is_well_formed=np.ones(len(lengths), bool),
            lengths=np.array(lengths),
            classes=np.arange(len(lengths)) - 1,
        )
        for number, lengths in enumerate(_LENGTHS)
    ]


def _check_arrays(part: str, found: Any) -> None:
    expected = [(len(lengths),) for lengths in _LENGTHS]
    shapes = [np.shape(one) for one in found] if isinstance(found, Sequence) else np.shape(found)
    if shapes != expected:
        raise InputError(
            f"{part} gives the shapes {shapes} for groups of {len(_LENGTHS[0])} "
            f"completions, expected {expected}: a number for each completion of each group"
        )
    if not all(np.isfinite(one).all() for one in found):
        raise InputError(f"{part} gives numbers that are not finite: {found}")


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
    except _ERRORS as error:
        raise InputError(
            f"{part} raised {type(error).__name__}: {error} ({where_raised(error)}), "
            f"called with {_TOKENS} made-up tokens in {len(_LENGTHS)} groups"
        ) from error
