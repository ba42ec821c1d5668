"""Presets, what overrides them, and what is refused."""

from pathlib import Path

import pytest

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.aliases import ALIASES
from megatron_rl.config.files import ConfigError, _known_keys, dump_toml, load_config
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.tree import Config


def test_the_default_is_magistral() -> None:
    cfg = load_config(None).algorithm
    assert cfg == AlgorithmConfig(preset="magistral")
    assert (cfg.advantage_estimator.name, cfg.normalization.name) == ("group_mean", "minibatch")
    assert (cfg.aggregation.name, cfg.policy_loss.name) == ("group_tokens", "clipped")
    assert (cfg.policy_loss.eps_low, cfg.policy_loss.eps_high) == (0.2, 0.28)


def test_a_key_differs_from_its_preset_and_the_others_stay() -> None:
    cfg = load_config(
        None, ["algorithm.preset=gspo", "algorithm.policy_loss.eps_high=0.01"]
    ).algorithm
    assert (cfg.policy_loss.eps_low, cfg.policy_loss.eps_high) == (3e-4, 0.01)
    assert cfg.policy_loss.level == "sequence" and cfg.normalization.name == "group"


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_resolved_file_states_all_and_reads_back_equal(preset: str, tmp_path: Path) -> None:
    given = [f"algorithm.preset={preset}", "train.group_size=8"]
    if preset == "distill":
        given.append("algorithm.reference.policy=teacher")
    config = load_config(None, given)
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(config))
    assert load_config(path) == config
    for part in ("advantage_estimator", "aggregation", "policy_loss", "kl", "reference"):
        assert f"[algorithm.{part}]" in path.read_text()


def test_a_preset_named_on_the_command_line_replaces_that_of_a_resolved_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(load_config(None)))
    given = ["algorithm.kl.coefficient=0.5", "algorithm.preset=grpo"]
    found = load_config(path, given).algorithm
    expected = load_config(None, given).algorithm
    assert found == expected and found.normalization.name == "group"
    # The same preset again changes nothing.
    path.write_text(dump_toml(load_config(None, ["algorithm.policy_loss.eps_low=0.1"])))
    kept = load_config(path, ["algorithm.preset=magistral"]).algorithm
    assert kept.policy_loss.eps_low == 0.1


EXACT = [
    "algorithm.kl.placement=loss",
    "algorithm.kl.estimator=exact",
    "algorithm.reference.policy=start",
]


def test_exact_kl_answers_for_what_follows_and_in_distillation_for_itself() -> None:
    assert load_config(None, EXACT).algorithm.kl.adds_to_advantages
    kl = load_config(None, ["algorithm.preset=distill", *EXACT]).algorithm.kl
    assert kl.is_exact and not kl.adds_to_advantages
    alone = load_config(None, ["algorithm.preset=sft", *EXACT, "algorithm.kl.horizon=token"])
    assert alone.algorithm.kl.is_exact


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.preset=gpso"], "did you mean 'gspo'"),
        (["algorithm.preset=distill"], 'reference.policy="none": set it to "start"'),
        (["algorithm.kl.placement=reward"], "compares with a reference policy"),
        (
            ["algorithm.preset=pass_at_k", "algorithm.advantage_estimator.k=32"],
            "more than train.group_size=16",
        ),
        (
            ["algorithm.preset=majority", "algorithm.advantage_estimator.k=17"],
            "more than train.group_size=16",
        ),
        (["algorithm.shaping.name=jepo"], 'set it to "unrewarded" or "all"'),
        (["algorithm.gold.groups=all"], 'gives them no advantage: set it to "jepo"'),
        (["algorithm.preset=jepo", "train.router_replay=true"], "no generator chose experts"),
        (["algorithm.preset=jepo_mixed", "reward.format=0"], "needs reward.format above 0"),
        (["algorithm.preset=jepo", "algorithm.reference.policy=none"], "with a reference policy"),
        (["algorithm.kl.placement=loss", "algorithm.kl.estimator=k1"], "expected gradient is 0"),
        (["algorithm.kl.placement=loss", "algorithm.kl.estimator=k3"], "KL(reference || policy)"),
        (["algorithm.kl.placement=reward", "algorithm.kl.estimator=k3"], "follows no divergence"),
        (
            ["algorithm.kl.placement=reward", "algorithm.kl.estimator=exact"],
            'which no advantage does; with placement="loss"',
        ),
        (["algorithm.preset=sft", *EXACT], 'reads none: set algorithm.kl.horizon="token"'),
        (
            ["algorithm.preset=sft", "algorithm.kl.placement=reward", EXACT[-1]],
            'reads none: set algorithm.kl.placement="loss"',
        ),
        (
            ["algorithm.preset=spo", "algorithm.advantage_estimator.name=group_mean"],
            "baseline=\"soft\" is in units of rewards, and advantage estimator 'group_mean'",
        ),
        (
            ["algorithm.preset=dro", "algorithm.shaping.name=cross_entropy"],
            'baseline="value" is of regression, not of algorithm.shaping.name="cross_entropy"',
        ),
        (["algorithm.policy_loss.dual_clip=0.5"], "dual_clip must be above 1"),
        (
            ["algorithm.correction.name=masked", "algorithm.correction.low=3"],
            "low=3 is not below high=2",
        ),
        (["algorithm.normalisation.name=group"], "did you mean 'algorithm.normalization'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_fix(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    assert words in str(caught.value)


SFT_EXAMPLES = 'replay.datasets=["t.jsonl"]'


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["replay.share=0.5"], "has nothing to draw from"),
        ([SFT_EXAMPLES], "replay.share=0 takes none of it"),
        ([SFT_EXAMPLES, "replay.share=0.5", "replay.buffer_groups=8"], "set one of them"),
        (["replay.buffer_groups=8", "replay.share=1"], "leaves no group to be sampled"),
        (["replay.buffer_groups=8", "replay.share=0.3"], "is 4.8 groups"),
        (["replay.buffer_groups=8", "replay.share=1.5"], "less than or equal to 1"),
        (
            ["replay.buffer_groups=8", "replay.share=0.5", "queue.record_tokens=false"],
            "set queue.record_tokens=true",
        ),
        (
            ["replay.buffer_groups=8", "replay.share=0.5", "train.router_replay=true"],
            "choices of experts are not recorded",
        ),
        (
            ["replay.buffer_groups=8", "replay.share=0.5", "algorithm.preset=jepo"],
            "recorded rollouts hold no reference answers",
        ),
        (
            [SFT_EXAMPLES, "replay.share=0.5"],
            "no generator's logprobs, which algorithm.policy_loss.name",
        ),
        (
            [SFT_EXAMPLES, "replay.share=0.5", "algorithm.preset=spo"],
            "advantage_estimator.name='soft_value', shaping.baseline='none'",
        ),
        (
            [SFT_EXAMPLES, "replay.share=0.5", "algorithm.preset=tis"],
            "algorithm.correction.name='truncated' read",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_with_the_fix(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["train.prompts_per_batch=16", *overrides])
    assert words in str(caught.value)


@pytest.mark.parametrize("preset", ["agro", "dro", "sft", "reinforce", "rloo"])
def test_examples_suit_objectives_without_importance_ratios(preset: str) -> None:
    given = [
        SFT_EXAMPLES,
        "replay.share=0.25",
        "train.prompts_per_batch=16",
        f"algorithm.preset={preset}",
    ]
    assert load_config(None, given).sampled_groups == 12


def test_examples_of_the_reference_suit_spo_with_the_value_of_their_group() -> None:
    given = [
        SFT_EXAMPLES,
        "replay.share=0.25",
        "train.prompts_per_batch=16",
        "algorithm.preset=spo",
    ]
    own = ["algorithm.advantage_estimator.name=soft_value", "algorithm.shaping.baseline=none"]
    assert load_config(None, [*given, *own]).sampled_groups == 12


def test_a_preset_with_a_critic_is_told_that_there_is_none() -> None:
    with pytest.raises(ConfigError, match="There is no critic here.*PPO take 'grpo'"):
        load_config(None, ["algorithm.preset=ppo"])
    with pytest.raises(ConfigError, match="did you mean 'spo'"):
        load_config(None, ["algorithm.preset=sppo"])


def test_every_alias_stands_for_a_key() -> None:
    known = set(_known_keys(Config, ""))
    assert set(ALIASES) <= known
    names = [name for text in ALIASES.values() for name in text.split()]
    assert len(set(names)) == len(names) and not known & {n for n in names if "." in n}
