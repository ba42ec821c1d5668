"""Objectives by name: the values that each preset of `[algorithm]` sets.

Other keys have the defaults of their section, which are Magistral's.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A published objective."""

    source: str
    use: str
    """When to take it."""
    values: dict[str, Any] = field(default_factory=dict)


_REINFORCE = {"name": "reinforce"}
_NONE = {"name": "none"}
_GROUP = {"name": "group"}
_SUM = {"name": "sequence_sum"}
_SYMMETRIC = {"eps_low": 0.2, "eps_high": 0.2}
_RECOMPUTED = {"old_logprobs": "recompute"}
_SUMMED = {"normalization": _NONE, "aggregation": _SUM, "policy_loss": _REINFORCE}
_REGRESSION = {**_SUMMED, "reference": {"policy": "start"}, "zero_variance_groups": "keep"}

PRESETS: dict[str, Preset] = {
    "magistral": Preset(
        "Magistral, arXiv 2506.10910, section 2.1",
        "the default: verifiable rewards, staleness of a few versions",
    ),
    "grpo": Preset(
        "DeepSeekMath, arXiv 2402.03300, eq. 3 and 4",
        "to compare with published GRPO; its k3 penalty is the forward KL",
        {
            "normalization": _GROUP,
            "aggregation": {"name": "sequence_mean"},
            "policy_loss": _SYMMETRIC,
            "kl": {"placement": "loss", "estimator": "forward_kl", "coefficient": 0.04},
            "reference": {"policy": "start"},
        },
    ),
    "dapo": Preset(
        "DAPO, arXiv 2503.14476, eq. 8",
        "long completions: every token of the batch weighs the same",
        {"normalization": _GROUP, "aggregation": {"name": "batch_tokens"}},
    ),
    "dr_grpo": Preset(
        "Understanding R1-Zero-Like Training, arXiv 2503.20783, section 3.2",
        "no bias by length or by the difficulty of a prompt",
        {"normalization": _NONE, "aggregation": _SUM, "policy_loss": _SYMMETRIC},
    ),
    "rloo": Preset(
        "Back to Basics, arXiv 2402.14740, section 3.2",
        "on-policy and unbiased; needs max_staleness 0",
        {**_SUMMED, "advantage_estimator": {"name": "leave_one_out"}},
    ),
    "reinforce": Preset(
        "Williams, Machine Learning 8 (1992), eq. 4",
        "the baseline of baselines: no group is needed, and its variance is large",
        {
            **_SUMMED,
            "advantage_estimator": {"name": "reward"},
            "zero_variance_groups": "keep",
        },
    ),
    "aipo": Preset(
        "LlamaRL, arXiv 2505.24034, section 5",
        "large staleness: no token counts more than `correction.high` times",
        {
            "normalization": _NONE,
            "policy_loss": _REINFORCE,
            "correction": {"name": "truncated", "high": 5.0},
        },
    ),
    "tis": Preset(
        "Truncated importance sampling, fengyao.notion.site/off-policy-rl (2025)",
        "engines whose logprobs differ from the trainer's (quantised ones)",
        {"policy_loss": _RECOMPUTED, "correction": {"name": "truncated", "high": 2.0}},
    ),
    "icepop": Preset(
        "Ring-1T, arXiv 2510.18855, section on IcePop",
        "mixtures of experts: tokens on which engine and trainer disagree do not count",
        {"policy_loss": _RECOMPUTED, "correction": {"name": "masked", "low": 0.5, "high": 5.0}},
    ),
    "cispo": Preset(
        "MiniMax-M1, arXiv 2506.13585, eq. 4",
        "rare tokens keep their gradient whatever their ratio",
        {
            "normalization": _GROUP,
            "aggregation": {"name": "batch_tokens"},
            "policy_loss": {"name": "cispo", "eps_low": 1.0, "eps_high": 4.0},
        },
    ),
    "gspo": Preset(
        "Group Sequence Policy Optimization, arXiv 2507.18071, eq. 5",
        "mixtures of experts, long completions: ratios of whole sequences",
        {
            "normalization": _GROUP,
            "aggregation": {"name": "sequence_mean"},
            "policy_loss": {"level": "sequence", "eps_low": 3e-4, "eps_high": 4e-4, **_RECOMPUTED},
        },
    ),
    "decoupled_ppo": Preset(
        "Batch size-invariance, arXiv 2110.00641, eq. 7; AReaL, arXiv 2505.24298, eq. 5",
        "large staleness and several minibatches",
        {
            "aggregation": {"name": "batch_tokens"},
            "policy_loss": {**_SYMMETRIC, **_RECOMPUTED},
            "correction": {"name": "truncated", "high": float("inf")},
        },
    ),
    "pass_at_k": Preset(
        "Inference-time objectives, arXiv 2503.19595; estimator: arXiv 2505.15201",
        "when k answers may be tried: variety is worth more than the mean",
        {"advantage_estimator": {"name": "pass_at_k"}, "normalization": _NONE, "aggregation": _SUM},
    ),
    "majority": Preset(
        "Inference-time objectives, arXiv 2503.19595",
        "when the most frequent of k answers will be taken",
        {"advantage_estimator": {"name": "majority"}, "normalization": _NONE, "aggregation": _SUM},
    ),
    "agro": Preset(
        "AGRO, arXiv 2503.19612, section 3",
        "off-policy data of any age, without importance ratios",
        {
            **_REGRESSION,
            "advantage_estimator": {"name": "leave_one_out"},
            "shaping": {"name": "regression", "baseline": "group"},
        },
    ),
    "spo": Preset(
        "Soft Policy Optimization, arXiv 2503.05453, section 3",
        "off-policy data; variety rather than the mean",
        {
            **_REGRESSION,
            "advantage_estimator": {"name": "reward"},
            # A soft value above most rewards lowers logprobs, which only the reference opposes. At
            # 1e-3, the default for a group's mean, it weighs too little: the policy collapses.
            "shaping": {"name": "regression", "baseline": "soft", "temperature": 0.3},
        },
    ),
    "dro": Preset(
        "DRO, arXiv 2405.19107, section 3.2",
        "recorded single completions with rewards, such as thumbs: no groups are needed",
        {
            **_REGRESSION,
            "advantage_estimator": {"name": "reward"},
            "shaping": {"name": "regression", "baseline": "value", "temperature": 1.0},
        },
    ),
    "jepo": Preset(
        "JEPO, arXiv 2503.19618, section 4 and appendix B",
        "answers that nothing can verify, such as proofs: thoughts count by how likely they make "
        "the reference answer",
        {
            "advantage_estimator": {"name": "well_formed"},
            "aggregation": _SUM,
            "policy_loss": _REINFORCE,
            "shaping": {"name": "jepo"},
            "kl": {"placement": "reward", "coefficient": 1e-3},
            "reference": {"policy": "start"},
            "zero_variance_groups": "keep",
            "gold": {"groups": "all"},
        },
    ),
    "jepo_mixed": Preset(
        "JEPO, arXiv 2503.19618, section 5; Magistral, arXiv 2506.10910",
        "hard prompts: groups without a right completion learn from the reference answer",
        {"shaping": {"name": "jepo"}, "gold": {"groups": "unrewarded"}},
    ),
    "sft": Preset(
        "maximum likelihood",
        "supervised phases: every token of the response counts the same, whatever its reward",
        {
            "advantage_estimator": {"name": "reward"},
            "normalization": _NONE,
            "aggregation": {"name": "batch_tokens"},
            "policy_loss": {"name": "supervised"},
            "zero_variance_groups": "keep",
        },
    ),
    "distill": Preset(
        "On-policy distillation (GKD), arXiv 2306.13649, eq. 2 with reverse KL",
        "a teacher is at hand: give its folder as algorithm.reference.policy; groups of 2 and "
        "small batches do (train.group_size)",
        {
            "advantage_estimator": {"name": "zero"},
            "normalization": _NONE,
            "aggregation": {"name": "batch_tokens"},
            "policy_loss": _REINFORCE,
            "kl": {
                "placement": "loss",
                "estimator": "exact",
                "horizon": "token",
                "coefficient": 1.0,
            },
            "zero_variance_groups": "keep",
        },
    ),
}
