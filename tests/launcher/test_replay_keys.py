"""A replay accepts the keys that change what the trainer does with a recorded batch."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.launcher.replay_keys import check_keys


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The configuration of a run."""
    path = tmp_path / "config.toml"
    path.write_text(dump_toml(load_config(None, ["model.path=m", f"run.dir={tmp_path}"])))
    return path


@pytest.mark.parametrize(
    "given",
    [
        "algorithm.advantage_estimator.name=reward", "algorithm.normalization.name=none",
        "algorithm.aggregation.name=sequence_sum", "algorithm.zero_variance_groups=keep",
        "reward.length=0.5", "sampling.temperature=0.5", "train.minibatches=2", "train.steps=5",
        "train.group_size=4", "expert.generator.max_restarts=1", "eval.prompts=2", "run.dir=x",
    ],
)  # fmt: skip
def test_a_key_that_the_recorded_batch_or_no_process_reads_is_refused(
    source: Path, given: str
) -> None:
    with pytest.raises(InputError) as caught:
        check_keys(source, ["optimizer.lr=1e-3", given])
    key = given.partition("=")[0]
    assert str(caught.value).startswith(f"{key} has no effect on a replay")
    assert "optimizer.lr" not in str(caught.value)


def test_keys_of_the_training_step_are_accepted(source: Path) -> None:
    given = [
        "optimizer.lr=1e-3", "algorithm.policy_loss.eps_high=0.1", "algorithm.kl.placement=loss",
        "algorithm.kl.estimator=k2",
        "algorithm.reference.policy=start", "algorithm.entropy.coefficient=0.1",
        "expert.train.record_tokens=true", "parallel.tensor=2", "model.dtype=float32",
    ]  # fmt: skip
    assert check_keys(source, given) == []


def test_optimizer_steps_count_where_the_learning_rate_decays(source: Path) -> None:
    given = ["train.minibatches=2", "train.steps=5"]
    assert check_keys(source, [*given, "optimizer.lr_schedule=linear"]) == []
    with pytest.raises(InputError, match=r"^train.minibatches, train.steps have no effect"):
        check_keys(source, given)


def test_a_preset_names_which_of_its_keys_take_effect(source: Path) -> None:
    # Magistral has the clipped loss with eps 0.2 and another upper one, and is normalized by
    # minibatch; CISPO has its own loss, normalization by group and batch_tokens.
    [note] = check_keys(source, ["algorithm.preset=cispo"])
    effective, _, kept = note.partition("; the recorded batch keeps its values of ")
    assert "algorithm.policy_loss.name" in effective and "policy_loss.eps_low" in effective
    assert "algorithm.normalization.name" in kept and "algorithm.normalization" not in effective
    assert "policy_loss" not in kept
    with pytest.raises(InputError, match="changes only algorithm.advantage_estimator.name"):
        check_keys(source, ["algorithm.preset=pass_at_k"])


def test_a_key_without_effect_that_another_one_needs_is_accepted(source: Path) -> None:
    # Without SGLang, which returns the experts, router replay is refused.
    source.write_text(source.read_text().replace('engine = "sglang"', 'engine = "hf"'))
    given = ["train.router_replay=true", "generator.engine=sglang"]
    [note] = check_keys(source, given)
    assert note.startswith("note: generator.engine: no effect on a replay")
