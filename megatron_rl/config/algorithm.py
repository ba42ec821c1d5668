"""Section of the configuration that says what is optimised; parts that can be mixed.

Imported by every process by way of `tree.py`. A preset (`presets.py`) fills in what is not given.
"""

import difflib
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.presets import PRESETS
from megatron_rl.config.section import Section

REGRESSIONS = ("regression", "cross_entropy")
"""Shapings that read the reference policy's logprobs."""


class Part(Section):
    """One part of an objective: a function and its parameters."""

    parameters: dict[str, Any] = {}
    """Of a function of your own, named as package.module:function; it reads them here."""


class CreditConfig(Part):
    """What each completion of a group is worth; the rollout queue computes it."""

    name: str = "group_mean"
    """Entry of CREDITS, or package.module:function."""
    k: PositiveInt = 4
    """pass_at_k and majority: how many samples are judged together."""
    temperature: PositiveFloat = 1e-3
    """soft_value: beta of beta * log mean exp(reward / beta)."""


class NormalizationConfig(Part):
    """How advantages are scaled; the rollout queue does it."""

    name: str = "minibatch"
    """Entry of NORMALIZATIONS (minibatch, group, none), or package.module:function."""


class AggregationConfig(Part):
    """What a token weighs in the loss; the rollout queue says it."""

    name: str = "group_tokens"
    """Entry of AGGREGATIONS (group_tokens, batch_tokens, sequence_mean, sequence_sum), or
    package.module:function."""


class SurrogateConfig(Part):
    """What is differentiated: the importance ratio and its clipping."""

    name: str = "clipped"
    """Entry of SURROGATES, or package.module:function."""
    level: Literal["token", "sequence"] = "token"
    """Whose importance ratio: each token's, or the geometric mean over its sequence."""
    eps_low: float = Field(default=0.2, gt=0, le=1)
    """The importance ratio is clipped below 1 - eps_low; 1: not at all."""
    eps_high: PositiveFloat = 0.28
    """The importance ratio is clipped above 1 + eps_high (clip-higher)."""
    dual_clip: float = Field(default=0.0, ge=0)
    """A token of negative advantage A costs no more than -dual_clip * A; 0: without this bound."""
    old_logprobs: Literal["generator", "recompute"] = "generator"
    """What the importance ratio divides by. recompute: the trainer's own logprobs before the first
    update of the batch, for one more forward pass."""

    @model_validator(mode="after")
    def _check_dual_clip(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip={self.dual_clip:g} would bound ratios that did not move: above 1, such "
                "as 3; 0 switches it off"
            )
        return self


class CorrectionConfig(Part):
    """Weights of tokens by how much likelier they are now than where they were sampled.

    The ratio is that of surrogate.old_logprobs="recompute" to the generator's; with "generator" it
    is the current policy's, held constant.
    """

    name: str = "none"
    """Entry of CORRECTIONS (none, truncated, masked), or package.module:function."""
    level: Literal["token", "sequence"] = "token"
    """Whose ratio: each token's, or the geometric mean over its sequence."""
    low: NonNegativeFloat = 0.5
    """masked: below it a token has no weight."""
    high: PositiveFloat = 2.0
    """truncated: the ratio counts no more than this; masked: above it a token has no weight."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.name == "masked" and self.low >= self.high:
            raise ValueError(f"low={self.low:g} is not below high={self.high:g}")
        return self


_WRONG = {
    ("loss", "k1"): "its expected gradient is 0, so nothing would hold the policy",
    ("loss", "k3"): (
        "differentiated, it follows KL(reference || policy), not KL(policy || reference): if that "
        'is what you want, its name is estimator="forward_kl"'
    ),
    ("reward", "k2"): "it would also penalise its own variance",
    ("reward", "k3"): "without its own derivative it follows no divergence",
    ("reward", "forward_kl"): "KL(reference || policy) is no expectation over the policy's samples",
}


class KlConfig(Part):
    """Distance to a reference policy, as a cost."""

    placement: Literal["none", "reward", "loss"] = "none"
    """reward: it is taken from the advantages; loss: it is added to the loss."""
    estimator: Literal["k1", "k2", "forward_kl"] = "k1"
    """Of log ratios l to the reference. placement "reward": k1. placement "loss": k2, half the
    square of a sequence's sum; or forward_kl, exp(-l) - 1 + l of each token."""
    horizon: Literal["to_go", "token"] = "to_go"
    """placement "reward": what a token answers for, all that follows in its sequence or itself."""
    coefficient: NonNegativeFloat = 1e-3
    """Beta; a sequence weighs as much as in the rest of the loss."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_wrong_gradients(cls, given: Any) -> Any:
        """Also fills in the estimator that fits the placement."""
        if not isinstance(given, dict):
            return given
        placement = given.get("placement", "none")
        right = "k2" if placement == "loss" else "k1"
        if reason := _WRONG.get((placement, given.get("estimator"))):
            raise ValueError(
                f'algorithm.kl.placement="{placement}" with estimator="{given["estimator"]}" is '
                f'wrong: {reason}. Take estimator="{right}" (docs/algorithms.md, KL)'
            )
        return {"estimator": right, **given}


class ShapingConfig(Part):
    """Advantages that depend on the policy as it is; the trainer computes them."""

    name: str = "none"
    """Entry of SHAPINGS (none, regression, cross_entropy), or package.module:function."""
    temperature: PositiveFloat = 1e-3
    """Beta of reward - beta * log(policy / reference), over whole sequences."""
    baseline: Literal["group", "none"] = "group"
    """regression: what is taken off, the mean of the others of a group, or nothing more."""
    top_reward: float = 1.1
    """cross_entropy: the largest reward that there is; others count relative to it."""


class ReferenceConfig(Section):
    """The policy that KL and regressions compare with."""

    policy: str = "none"
    """none; start: the weights that reinforcement learning began from; ema: their moving average;
    or a Hugging Face folder of the same architecture and sizes."""
    decay: float = Field(default=0.99, ge=0, lt=1)
    """ema: what is kept of the average at each step of the optimizer."""


class EntropyConfig(Section):
    """A bonus for entropy."""

    coefficient: NonNegativeFloat = 0.0
    """The loss falls by it times the mean entropy of tokens, in nats; 7e-4 in Magistral's
    ablation."""


class AlgorithmConfig(Section):
    """The objective: a preset, and what differs from it."""

    preset: str = "magistral"
    """Fills in every key below that is not given; see `megatron-rl algorithms`."""
    flat_groups: Literal["drop", "keep"] = "drop"
    """Groups whose rewards are all equal: dropped and counted, or trained on."""
    credit: CreditConfig = CreditConfig()
    normalization: NormalizationConfig = NormalizationConfig()
    aggregation: AggregationConfig = AggregationConfig()
    surrogate: SurrogateConfig = SurrogateConfig()
    correction: CorrectionConfig = CorrectionConfig()
    shaping: ShapingConfig = ShapingConfig()
    kl: KlConfig = KlConfig()
    entropy: EntropyConfig = EntropyConfig()
    reference: ReferenceConfig = ReferenceConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "magistral")
        if name not in PRESETS:
            nearest = difflib.get_close_matches(str(name), PRESETS, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(
                f"algorithm.preset={name!r} is none of {', '.join(sorted(PRESETS))}{hint}"
            )
        return _merged(PRESETS[name].values, given)

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self._reads_reference and self.reference.policy == "none":
            user = "kl" if self.kl.placement != "none" else "shaping"
            raise ValueError(
                f"algorithm.{user} (preset {self.preset!r}) compares with a reference policy and "
                'algorithm.reference.policy="none": set it to "start", "ema" or a folder'
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's logprobs are computed: a part reads them, or they are asked for,
        for metrics or a function of one's own."""
        return self._reads_reference or self.reference.policy != "none"

    @property
    def _reads_reference(self) -> bool:
        return self.kl.placement != "none" or self.shaping.name in REGRESSIONS


def _merged(preset: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The preset's values, with those that are given in their place; sections key by key."""
    merged = dict(preset)
    for key, value in given.items():
        old = merged.get(key)
        is_section = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merged(old, value) if is_section else value
    return merged
