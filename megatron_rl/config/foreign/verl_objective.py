"""Converts verl's objective to ours: advantages, policy loss, clipping, weights of tokens, KL.

Used by the table in `verl.py`. `Nearest` says what differs; `refuse` ends the import.
"""

from typing import Any

from megatron_rl.config.foreign.rules import (
    NOTHING,
    Nearest,
    NoCounterpart,
    Values,
    kl_in_loss,
    kl_penalty,
    refuse,
    times,
    truncated,
    undivided,
)
from megatron_rl.config.foreign.verl_values import ACTOR

CORRECTION = "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
WEIGHTS = f"{ACTOR}.loss_agg_mode"
ADVANTAGES = {
    "grpo": "group_mean", "rloo": "leave_one_out", "reinforce_plus_plus_baseline": "group_mean",
}  # fmt: skip
"""Advantage estimators of verl that are here."""

_LOSSES = {"vanilla": "clipped", "gspo": "clipped", "cispo": "cispo", "gpg": "reinforce"}
_NEAREST_LOSSES = {"geo_mean": "gspo", "sapo": "cispo", "dppo_tv": "cispo", "dppo_kl": "cispo"}
_WEIGHTS = {
    "token-mean": "batch_tokens", "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum", "seq-mean-token-sum-norm": "sequence_sum",
}  # fmt: skip


def estimator(value: Any, values: Values) -> dict[str, Any]:
    value = str(value).removesuffix("_vectorized")
    if value not in ADVANTAGES:
        raise NoCounterpart("`megatron-rl algorithms` lists estimators; there is no critic here")
    scale = {"grpo": "group" if values["algorithm.norm_adv_by_std_in_grpo"] else "none",
             "rloo": "none", "reinforce_plus_plus_baseline": "minibatch"}  # fmt: skip
    ours = {
        "algorithm.preset": "grpo",
        "algorithm.advantage_estimator.name": ADVANTAGES[value],
        "algorithm.normalization.name": scale[value],
    }
    if scale[value] == "minibatch":
        differs = "over the tokens of the batch there; over the completions of a minibatch here"
        return Nearest(ours, f"algorithm.normalization: {differs}")
    return ours


def loss(value: Any, values: Values) -> dict[str, Any]:
    if value not in _LOSSES:
        refuse(LOSS, value, _LOSSES, _NEAREST_LOSSES.get(value, "vanilla"))
    ours = {
        "algorithm.policy_loss.name": _LOSSES[value],
        "algorithm.policy_loss.level": "sequence" if value == "gspo" else "token",
    }
    if value != "gspo":
        return ours
    ours["algorithm.aggregation.name"] = "sequence_mean"
    others = values[f"{ACTOR}.use_kl_loss"] or values.get(f"{ACTOR}.entropy_coeff")
    if others and values[WEIGHTS] != "seq-mean-token-mean":
        return Nearest(
            ours,
            f"algorithm.aggregation: with gspo, verl's loss_agg_mode {values[WEIGHTS]} is that of "
            "KL and entropy only; here sequence_mean is theirs too",
        )
    return ours


def clip(value: Any, values: Values) -> dict[str, Any]:
    low, high = (values.get(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    if low is not None and high is not None:
        raise NoCounterpart("no effect with clip_ratio_low and clip_ratio_high")
    _check_clips(values)
    sides = {"eps_low": low, "eps_high": high}
    return {f"algorithm.policy_loss.{k}": value for k, given in sides.items() if given is None}


def clip_low(value: float, values: Values) -> dict[str, Any]:
    _check_clips(values)
    # Ratios are positive: above 1 nothing more is clipped.
    return {"algorithm.policy_loss.eps_low": min(1.0, value)}


def clip_high(value: float, values: Values) -> dict[str, Any]:
    _check_clips(values)
    return {"algorithm.policy_loss.eps_high": value}


def _check_clips(values: Values) -> None:
    if values[LOSS] == "gpg":
        raise NoCounterpart("no effect with loss_mode gpg")


def dual_clip(value: float, values: Values) -> dict[str, Any]:
    if values[LOSS] != "vanilla":
        raise NoCounterpart(f"no effect with loss_mode {values[LOSS]}")
    return {"algorithm.policy_loss.dual_clip": value}


def weights(value: Any, values: Values) -> dict[str, Any]:
    if value not in _WEIGHTS:
        refuse(WEIGHTS, value, _WEIGHTS, "token-mean")
    if values[LOSS] == "gspo" and _WEIGHTS[value] != "sequence_mean":
        raise NoCounterpart("no effect on the policy loss with loss_mode gspo: sequence_mean")
    if value == "seq-mean-token-sum-norm":
        return undivided(_divisor(values), "loss_scale_factor, or max_response_length")
    return {"algorithm.aggregation.name": _WEIGHTS[value]}


def clip_norm(value: float, values: Values) -> dict[str, Any]:
    return times(value, _divisor(values))


def _divisor(values: Values) -> Any:
    """The number that verl divides the loss by, beyond our weights of tokens; None: none."""
    if values[LOSS] == "gspo" or values.get(WEIGHTS) != "seq-mean-token-sum-norm":
        return None
    factor = values.get(f"{ACTOR}.loss_scale_factor")
    return factor or values.get("data.max_response_length")


def old_logprobs(value: Any, _: Values) -> dict[str, Any]:
    return {"algorithm.policy_loss.old_logprobs": "generator" if value else "recompute"}


def kl(_: Any, values: Values) -> dict[str, Any]:
    in_reward = values["algorithm.use_kl_in_reward"]
    if values[f"{ACTOR}.use_kl_loss"]:
        kind, coefficient = values[f"{ACTOR}.kl_loss_type"], values[f"{ACTOR}.kl_loss_coef"]
        ours = kl_in_loss(f"{ACTOR}.kl_loss_type", kind, coefficient)
        if not in_reward:
            return ours
        differs = f"{ours.differs}. " if isinstance(ours, Nearest) else "algorithm.kl: "
        return Nearest(
            ours,
            f"{differs}verl has a KL in the reward too, with coefficient "
            f"{values['algorithm.kl_ctrl.kl_coef']}; there is one placement here",
        )
    if not in_reward:
        return kl_penalty("none", 0)
    return _kl_in_reward(values)


def _kl_in_reward(values: Values) -> dict[str, Any]:
    ours = kl_penalty("reward", values["algorithm.kl_ctrl.kl_coef"])
    differs = []
    kind = str(values.get("algorithm.kl_penalty", "kl"))
    if kind.removesuffix("+") not in ("kl", "k1"):
        differs.append(f"kl_penalty {kind} there is k1 here")
    if values.get("algorithm.kl_ctrl.type", "fixed") != "fixed":
        differs.append("the coefficient changes there by target_kl, and is fixed here")
    advantages = str(values["algorithm.adv_estimator"]).removesuffix("_vectorized")
    is_scaled = advantages == "grpo" and values["algorithm.norm_adv_by_std_in_grpo"]
    if is_scaled or advantages == "reinforce_plus_plus_baseline":
        differs.append(
            "verl takes it from the reward, so that normalization scales it too; here it is taken "
            "from the normalized advantages. The coefficient over the standard deviation of "
            "rewards has the same weight"
        )
    return Nearest(ours, f"algorithm.kl: {'; '.join(differs)}") if differs else ours


def reward_kl(value: Any, values: Values) -> dict[str, Any]:
    if values["algorithm.use_kl_in_reward"] and values[f"{ACTOR}.use_kl_loss"]:
        raise NoCounterpart("the loss has a KL too: algorithm.kl has one placement")
    return kl(value, values)


def correction(_: Any, values: Values) -> dict[str, Any]:
    level = values.get(f"{CORRECTION}.rollout_is")
    if level is None:
        return NOTHING
    if level != "token":
        raise NoCounterpart("the product of a sequence's ratios; algorithm.correction has a mean")
    if values.get(f"{CORRECTION}.bypass_mode"):
        raise NoCounterpart("with bypass_mode the importance ratio itself is that to the engine")
    return truncated(values.get(f"{CORRECTION}.rollout_is_threshold", 2.0))
