"""The section `[algorithm]`: the objective, in parts. Part of the configuration tree.

A preset (`presets.py`) fills in keys that are not given.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.lookup import nearest
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.section import Section, merged

REGRESSIONS = ("regression", "cross_entropy")
"""Shapings that read the reference policy's logprobs."""


class Part(Section):
    """One part of an objective: a function and its parameters."""

    parameters: dict[str, Any] = {}
    """Parameters of your function (package.module:function), which reads its parameters here."""


class AdvantageEstimatorConfig(Part):
    """Computes the advantage of each completion of a group, in the rollout queue."""

    name: str = "group_mean"
    """Entry of ADVANTAGE_ESTIMATORS, or package.module:function."""
    k: PositiveInt = 4
    """pass_at_k and majority: number of samples that are judged together."""
    temperature: PositiveFloat = 1e-3
    """soft_value: beta of beta * log mean exp(reward / beta), of the reference's samples."""


class NormalizationConfig(Part):
    """Scales the advantages, in the rollout queue."""

    name: str = "minibatch"
    """Entry of NORMALIZATIONS (minibatch, group, none), or package.module:function."""


class AggregationConfig(Part):
    """Sets the weight of a token in the loss, in the rollout queue."""

    name: str = "group_tokens"
    """Entry of AGGREGATIONS (group_tokens, batch_tokens, sequence_mean, sequence_sum), or
    package.module:function."""


class PolicyLossConfig(Part):
    """The loss per token: the importance ratio and its clipping."""

    name: str = "clipped"
    """Entry of POLICY_LOSSES, or package.module:function."""
    level: Literal["token", "sequence"] = "token"
    """Compute the importance ratio per token, or per sequence (geometric mean)."""
    eps_low: float = Field(default=0.2, gt=0, le=1)
    """Clip the importance ratio below 1 - eps_low; 1: no lower clipping."""
    eps_high: PositiveFloat = 0.28
    """Clip the importance ratio above 1 + eps_high (clip-higher)."""
    dual_clip: float = Field(default=0.0, ge=0)
    """Limit the loss of a token with negative advantage A to -dual_clip * A; 0: no limit."""
    max_log_ratio: float = Field(default=20.0, gt=0, le=40)
    """Log ratios of probabilities are cut at +-max_log_ratio before exp, in policy losses,
    corrections and KL estimates: values and gradients stay finite. A token beyond the bound has no
    gradient through its ratio; `dual_clip` bounds less extreme ratios of negative advantages."""
    old_logprobs: Literal["generator", "recompute"] = "generator"
    """Logprobs in the denominator of the importance ratio. generator: the generator's logprobs;
    recompute: the trainer's logprobs before the first update of the batch, at the cost of one
    forward pass."""

    @model_validator(mode="after")
    def _check_dual_clip(self) -> Self:
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip must be above 1, such as 3, or 0 for none; got {self.dual_clip:g}"
            )
        return self


class CorrectionConfig(Part):
    """Weights tokens by the ratio of their probability now to their probability when sampled.

    The ratio is that of policy_loss.old_logprobs="recompute" to the generator's; with
    "generator" it is the current policy's, held constant.
    """

    name: str = "none"
    """Entry of CORRECTIONS (none, truncated, masked), or package.module:function. auto: that of the
    preset; without one, truncated where policy_loss.old_logprobs="recompute" and
    queue.max_staleness is above 0 at any stage, else none."""
    level: Literal["token", "sequence"] = "token"
    """Compute the ratio per token, or per sequence (geometric mean)."""
    low: NonNegativeFloat = 0.5
    """masked: a token with a smaller ratio gets weight 0."""
    high: PositiveFloat = 2.0
    """truncated: larger ratios are cut to this value; masked: a token with a larger ratio gets
    weight 0."""

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
    ("reward", "exact"): (
        "it differentiates the KL of each position, which no advantage does; with "
        'placement="loss" it adds to the advantages, too'
    ),
}


class KlConfig(Part):
    """Distance to a reference policy, as a cost."""

    placement: Literal["none", "reward", "loss"] = "none"
    """Place of the KL cost. reward: it is subtracted from the advantages; loss: it is added to
    the loss."""
    estimator: Literal["k1", "k2", "forward_kl", "exact"] = "k1"
    """Estimator of the KL from log ratios l to the reference. placement "reward": k1. placement
    "loss": k2, half the square of a sequence's sum; forward_kl, exp(-l) - 1 + l of each token; or
    exact. exact sums over the whole vocabulary: least variance, twice the output layer's cost."""
    horizon: Literal["to_go", "token"] = "to_go"
    """KL cost charged to a token, for placement "reward" and estimator "exact". to_go: the cost
    of all following positions; token: the cost of its position."""
    coefficient: NonNegativeFloat = 1e-3
    """Coefficient of the KL cost (beta). Sequences have the same weight as in the policy loss."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_wrong_gradients(cls, given: Any) -> Any:
        """Also fill in the estimator that fits the placement."""
        if not isinstance(given, dict):
            return given
        placement = given.get("placement", "none")
        right = "k2" if placement == "loss" else "k1"
        if reason := _WRONG.get((placement, given.get("estimator", ""))):
            raise ValueError(
                f'algorithm.kl.placement="{placement}" with estimator="{given["estimator"]}" is '
                f'wrong: {reason}. Take estimator="{right}" (docs/algorithms.md, KL)'
            )
        return {"estimator": right, **given}

    @property
    def is_exact(self) -> bool:
        """Whether it reads logprobs of the whole vocabulary, of policy and reference."""
        return self.placement == "loss" and self.estimator == "exact"

    @property
    def adds_to_advantages(self) -> bool:
        """Whether advantages include at least a part of it."""
        return self.placement == "reward" or (self.is_exact and self.horizon == "to_go")


class ShapingConfig(Part):
    """Advantages that depend on the current policy; the trainer computes them."""

    name: str = "none"
    """Entry of SHAPINGS (none, regression, cross_entropy, jepo), or package.module:function."""
    temperature: PositiveFloat = 1e-3
    """Beta of reward - beta * log(policy / reference), over whole sequences."""
    baseline: Literal["group", "none", "value", "soft"] = "group"
    """Baseline subtracted from the reward in a regression. group: mean of the group's others; none.
    value: a learned value per prompt (train/value_*), for data with single completions. soft: the
    soft value under the reference policy, from the group's others (also for cross_entropy)."""
    value_lr: PositiveFloat = 1e-2
    """baseline value: constant learning rate of the value, in units of reward."""
    top_reward: float = 1.1
    """cross_entropy: the largest possible reward; other rewards count relative to it."""
    support: NonNegativeFloat = 1e-2
    """jepo: weight of learning the reference answer itself, in addition to the thoughts that
    make it likely. The paper uses up to 1e-2 for short answers and 1 for long ones."""
    bound: PositiveFloat = 1.0
    """jepo: upper bound of the advantages of thoughts, in standard deviations. These advantages
    are heavy-tailed."""


class ReferenceConfig(Section):
    """The reference policy of KL and regressions."""

    policy: str = Field(default="none", min_length=1)
    """none; start: the weights that reinforcement learning began from; ema: their moving average;
    or a Hugging Face folder with the same tokenizer, of any size."""
    source: Literal["trainer", "engine"] = "trainer"
    """Process that computes the reference's logprobs. trainer: the reference's weights replace
    the policy's for one forward pass. engine: a frozen engine, set in `[scorer]`, for start or a
    folder; the model need not fit the trainer's GPUs."""
    decay: float = Field(default=0.99, ge=0, lt=1)
    """ema: decay of the moving average per optimizer step."""

    @property
    def folder(self) -> Path | None:
        """The folder of `policy`; None for another policy."""
        return None if self.policy in ("none", "start", "ema") else Path(self.policy)


class EntropyConfig(Section):
    """An entropy bonus."""

    coefficient: NonNegativeFloat = 0.0
    """Coefficient of the mean token entropy (nats), which is subtracted from the loss.
    Magistral's ablation uses 7e-4."""


class GoldConfig(Section):
    """Learning from the reference answer, which replaces the answer that a completion gave."""

    groups: Literal["none", "unrewarded", "all"] = "none"
    """Groups that learn the reference answer: groups without a right completion, or all. Needs
    shaping jepo."""
    opening: str = Field(default="\\boxed{", min_length=1)
    """Text after which an answer begins; the last occurrence in a completion counts. Use
    "</think>" for answers that are long texts."""
    closing: str = "}"
    """Text after the answer, which is learned with it; empty: the end of the sequence."""


_WITH_A_CRITIC = ("ppo", "gae", "vapo", "vc_ppo", "a2c", "reinforce_pp_critic")


class AlgorithmConfig(Section):
    """The objective: a preset, and what differs from it."""

    preset: str = "magistral"
    """Preset that sets every key below that is not given. `megatron-rl algorithms` lists the
    presets."""
    zero_variance_groups: Literal["drop", "keep"] = "drop"
    """Treatment of groups whose rewards (with majority: verdicts) are all equal. Where replies are
    rewarded, returns of replies at the same turn index count. drop: the queue drops and counts
    such groups; keep: the trainer trains on them."""
    advantage_estimator: AdvantageEstimatorConfig = AdvantageEstimatorConfig()
    normalization: NormalizationConfig = NormalizationConfig()
    aggregation: AggregationConfig = AggregationConfig()
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    shaping: ShapingConfig = ShapingConfig()
    kl: KlConfig = KlConfig()
    entropy: EntropyConfig = EntropyConfig()
    reference: ReferenceConfig = ReferenceConfig()
    gold: GoldConfig = GoldConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        name = given.get("preset", "magistral")
        if name not in PRESETS:
            hint = nearest(str(name), PRESETS)
            if str(name).lower() in _WITH_A_CRITIC:
                hint = (
                    ". There is no critic here: advantages come from groups of completions. For "
                    "the clipped loss of PPO take 'grpo', for a learnt value of each prompt 'dro'"
                )
            raise ValueError(
                f"algorithm.preset={name!r} is none of {', '.join(sorted(PRESETS))}{hint}"
            )
        return merged(PRESETS[name].values, given)

    @model_validator(mode="after")
    def _check_reference(self) -> Self:
        if self._reads_reference and self.reference.policy == "none":
            user = "kl" if self.kl.placement != "none" else "shaping"
            raise ValueError(
                f"algorithm.{user} (preset {self.preset!r}) compares with a reference policy and "
                'algorithm.reference.policy="none": set it to "start", "ema" or a folder'
            )
        return self

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if self.reference.source == "trainer" or not self.needs_reference:
            return self
        given = 'algorithm.reference.source="engine"'
        if self.reference.policy in ("none", "ema"):
            raise ValueError(
                f'{given} holds weights that stay as they are, and algorithm.reference.policy="'
                f'{self.reference.policy}": set it to "start" or a folder, or source="trainer"'
            )
        if self.kl.is_exact:
            raise ValueError(
                f'{given} gives logprobs of given tokens, and algorithm.kl.estimator="exact" reads '
                'those of the whole vocabulary: set algorithm.kl.placement="reward" and '
                'algorithm.kl.estimator="k1", or source="trainer"'
            )
        if self.learns_value:
            raise ValueError(
                f'{given} gives logprobs alone, and algorithm.shaping.baseline="value" reads the '
                'reference\'s hidden states: take another baseline, or source="trainer"'
            )
        return self

    @model_validator(mode="after")
    def _check_kl_is_read(self) -> Self:
        if self.kl.adds_to_advantages and self.policy_loss.name == "supervised":
            fix = 'horizon="token"' if self.kl.is_exact else 'placement="loss"'
            raise ValueError(
                'algorithm.kl is taken from the advantages, and algorithm.policy_loss.name="'
                f'supervised" reads none: set algorithm.kl.{fix}'
            )
        return self

    @model_validator(mode="after")
    def _check_gold(self) -> Self:
        if self.gold.groups == "none" and self.shaping.name == "jepo":
            raise ValueError(
                'algorithm.shaping.name="jepo" learns from reference answers and '
                'algorithm.gold.groups="none": set it to "unrewarded" or "all"'
            )
        if self.gold.groups != "none" and self.shaping.name in ("none", *REGRESSIONS):
            raise ValueError(
                f'algorithm.gold.groups="{self.gold.groups}" puts reference answers into what is '
                f'trained on, and algorithm.shaping.name="{self.shaping.name}" gives them no '
                'advantage: set it to "jepo"'
            )
        return self

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if not (self.learns_value or self.has_soft_value):
            return self
        baseline = self.shaping.baseline
        if (self.advantage_estimator.name, self.normalization.name) != ("reward", "none"):
            raise ValueError(
                f'algorithm.shaping.baseline="{baseline}" is in units of rewards, and advantage '
                f"estimator {self.advantage_estimator.name!r} with normalization "
                f"{self.normalization.name!r} is not: set algorithm.advantage_estimator.name="
                '"reward" and algorithm.normalization.name="none"'
            )
        shapings = ("regression",) if self.learns_value else REGRESSIONS
        if self.shaping.name not in shapings:
            raise ValueError(
                f'algorithm.shaping.baseline="{baseline}" is of {" and ".join(shapings)}, not of '
                f'algorithm.shaping.name="{self.shaping.name}"'
            )
        return self

    @property
    def learns_value(self) -> bool:
        """Whether the baseline is a learned value per prompt."""
        return self.shaping.name != "none" and self.shaping.baseline == "value"

    @property
    def has_soft_value(self) -> bool:
        """Whether the baseline is the soft value under the reference."""
        return self.shaping.name != "none" and self.shaping.baseline == "soft"

    @property
    def used_gold(self) -> GoldConfig | None:
        """Settings of learning from reference answers; None: off."""
        return None if self.gold.groups == "none" else self.gold

    @property
    def needs_reference(self) -> bool:
        """Whether the reference's logprobs are computed, also for metrics or a user's function."""
        return self._reads_reference or self.reference.policy != "none"

    @property
    def needs_scorer(self) -> bool:
        """Whether a separate engine computes the reference's logprobs."""
        return self.needs_reference and self.reference.source == "engine"

    @property
    def reads_generator_logprobs(self) -> bool:
        """Whether the objective reads the generator's logprobs."""
        has_ratio = self.policy_loss.name not in ("reinforce", "supervised")
        is_own = self.policy_loss.old_logprobs == "recompute"
        is_compared = (has_ratio and not is_own) or self.correction.name != "none"
        return is_compared or self.has_soft_value

    @property
    def _reads_reference(self) -> bool:
        return self.kl.placement != "none" or self.shaping.name in REGRESSIONS
