"""Given keys without effect, and losses that older policies' completions bias, are warned of."""

from pathlib import Path

import pytest

from megatron_rl.config.expert import public_key
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.presets import PRESETS
from megatron_rl.config.unused import late_stages, off_policy_bias, unused_keys

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGURATIONS = sorted(path for path in EXAMPLES.rglob("*.toml") if path.parent.name != "sweeps")
FIXED = {"distill": ["algorithm.reference.policy=teacher"]}


def own(key: str) -> str:
    """A setting of `[algorithm]`, under its public name."""
    name, value = key.split("=")
    return f"{public_key(f'algorithm.{name}')}={value}"


def keys_of(*given: str) -> list[str]:
    """Keys that the warnings name, without "algorithm."."""
    warnings = unused_keys(load_config(None, list(given)))
    named = [text.removeprefix("warning: ").split(" has no effect")[0] for text in warnings]
    return [key.removeprefix("expert.").removeprefix("algorithm.") for key in named]


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        (["kl.coefficient=1e-3"], ["kl.coefficient"]),
        (["kl.coefficient=0.1", "kl.placement=loss", "reference.policy=start"], []),
        (["preset=grpo", "kl.placement=none", "kl.coefficient=0.1"], ["kl.coefficient"]),
        (["preset=grpo", "kl.placement=none"], []),
        (["preset=rloo", "policy_loss.eps_high=0.3"], ["policy_loss.eps_high"]),
        (["preset=cispo", "policy_loss.dual_clip=3"], ["policy_loss.dual_clip"]),
        (["preset=aipo", "correction.low=0.1"], ["correction.low"]),
        (["shaping.baseline=none"], ["shaping.baseline"]),
        (["shaping.value_lr=0.1"], ["shaping.value_lr"]),
        (["preset=dro", "shaping.value_lr=0.1"], []),
        (["advantage_estimator.k=2"], ["advantage_estimator.k"]),
        (["preset=pass_at_k", "advantage_estimator.k=2"], []),
        (["reference.policy=start", "reference.decay=0.9"], ["reference.decay"]),
        (["policy_loss.name=own:f", "policy_loss.eps_low=0.1"], []),
        (["shaping.bound=2", "gold.closing=x"], ["shaping.bound", "gold.closing"]),
    ],
)  # fmt: skip
def test_given_keys_that_nothing_reads_are_named(given: list[str], unused: list[str]) -> None:
    assert keys_of("train.group_size=8", *map(own, given)) == unused


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_what_a_preset_or_a_run_wrote_is_not_warned_of(preset: str, tmp_path: Path) -> None:
    given = [f"algorithm.preset={preset}", "train.group_size=8", *FIXED.get(preset, [])]
    assert keys_of(*given) == []
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(load_config(None, [*given, "train.steps=7"])))
    assert unused_keys(load_config(path)) == []


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_the_examples_have_no_such_key(path: Path) -> None:
    config = load_config(path)
    assert unused_keys(config) + off_policy_bias(config) == []


DISTILL = ["algorithm.preset=distill", "algorithm.reference.policy=start"]


@pytest.mark.parametrize(
    ("given", "causes"),
    [
        (["algorithm.preset=rloo"], ["queue.max_staleness"]),
        (["algorithm.preset=rloo", "train.minibatches=2"], ["queue.max_staleness", "train.mini"]),
        (["algorithm.preset=rloo", "queue.max_staleness=0"], []),
        (["algorithm.preset=aipo"], []),
        (["algorithm.preset=agro"], []),
        (["algorithm.preset=jepo"], ["queue.max_staleness"]),
        (["algorithm.preset=jepo", "algorithm.correction.name=truncated"], []),
        # Its KL of each position has no ratio that a correction could multiply.
        ([*DISTILL, "algorithm.kl.horizon=token"], []),
        ([*DISTILL, "algorithm.kl.horizon=to_go"], ["queue.max_staleness"]),
        (
            [*DISTILL, "algorithm.kl.placement=reward", "algorithm.kl.estimator=k1"],
            ["queue.max_staleness"],
        ),
        (["algorithm.preset=sft"], []),
        ([], []),
    ],
)
def test_a_loss_without_importance_ratio_needs_fresh_completions(
    given: list[str], causes: list[str]
) -> None:
    found = off_policy_bias(load_config(None, ["train.group_size=8", *given]))
    assert len(found) == bool(causes) and all(one in found[0] for one in causes)


def test_a_stage_may_make_completions_stale(tmp_path: Path) -> None:
    path = tmp_path / "staged.toml"
    path.write_text("[[stages]]\nat_step = 5\nqueue = {max_staleness = 3}\n")
    given = ["algorithm.preset=rloo", "queue.max_staleness=0"]
    (found,) = off_policy_bias(load_config(path, given))
    assert "queue.max_staleness = 3" in found and "minibatches =" not in found.split("trains")[0]
    path.write_text("[[stages]]\nat_step = 5\ntrain = {minibatches = 2}\n")
    (found,) = off_policy_bias(load_config(path, given))
    assert "train.minibatches = 2" in found and "staleness =" not in found.split("trains")[0]


@pytest.mark.parametrize(
    ("steps", "late"),
    # Stage 1 begins with batch 5, stage 2 with batch 5 + 2 * 4 at the earliest, stage 3 with 20.
    [(21, []), (20, ["stage 3"]), (13, ["stage 2", "stage 3"]), (14, ["stage 3"]),
     (5, ["stage 1", "stage 2", "stage 3"]), (0, [])],
)  # fmt: skip
def test_stages_that_the_run_is_too_short_for_are_named(steps: int, late: list[str]) -> None:
    stages = [
        "stages.0.at_step=5", "stages.1.plateau={window=4,min_gain=0.1}", "stages.2.at_step=20",
    ]  # fmt: skip
    warnings = late_stages(load_config(None, [f"train.steps={steps}", *stages]))
    assert [text.removeprefix("warning: ").split(" never begins")[0] for text in warnings] == late
