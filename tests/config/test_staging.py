"""Each stage stands for a whole configuration, which is possible or refused by its name."""

from pathlib import Path

import pytest

from megatron_rl.config.files import ConfigError, dump_toml, load_config
from megatron_rl.config.staging import longest_stage, optimizer_steps, resolve_stages

STAGED = """
[train]
steps = 20
prompts_per_batch = 8
minibatches = 2

[sampling]
max_new_tokens = 100

[reward]
length_margin_tokens = 20

[[prompts]]
kind = "reasoning_gym"
name = "chain_sum"

[[prompts]]
path = "hard.jsonl"
weight = 0

[[stages]]
name = "longer"
at_step = 5
sampling = {max_new_tokens = 200}
train = {prompts_per_batch = 4, minibatches = 1}

[[stages]]
at_step = 12
sampling = {temperature = 0.8}
reward = {length_margin_tokens = 50}
weights = {chain_sum = 0.0, 1 = 2.0}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "staged.toml"
    path.write_text(text)
    return path


def test_a_stage_keeps_what_the_stage_before_it_changed(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, STAGED))
    stages = resolve_stages(config)
    assert [s.sampling.max_new_tokens for s in stages] == [100, 200, 200]
    assert [s.sampling.temperature for s in stages] == [1.0, 1.0, 0.8]
    assert [s.reward.length_margin_tokens for s in stages] == [20, 20, 50]
    assert [s.train.prompts_per_batch for s in stages] == [8, 4, 4]
    assert [[p.weight for p in s.prompts] for s in stages] == [[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]]
    assert stages[0] == config.model_copy(update={"stages": []})
    assert longest_stage(config) == stages[1]
    # 5 batches of two optimizer steps, 15 of one.
    assert optimizer_steps(config) == 25
    assert optimizer_steps(load_config(write(tmp_path, STAGED), ["train.steps=3"])) == 6


def test_steps_of_a_part_of_a_run_add_up_to_those_of_all(tmp_path: Path) -> None:
    for last in (3, 20):
        config = load_config(write(tmp_path, STAGED), [f"train.steps={last}"])
        of_batches, whole = ([2] * 5 + [1] * 15)[:last], optimizer_steps(config)
        for first in range(last + 1):
            assert optimizer_steps(config, first) == sum(of_batches[first:])
            assert sum(of_batches[:first]) + optimizer_steps(config, first) == whole


def test_stages_survive_the_saved_configuration(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, STAGED))
    assert load_config(write(tmp_path, dump_toml(config))) == config
    changed = load_config(write(tmp_path, STAGED), ["stages.0.at_step=7"])
    assert [stage.at_step for stage in changed.stages] == [7, 12]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.1.sampling.max_new_tokens=2048", "stage 2 is impossible: generator.context_token"),
        ("stages.0.sampling.max_new_tokens=1500 generator.kv_tokens=1500", "stage 1 .longer.*kv_"),
        ("stages.0.train.minibatches=5", "stage 1 .longer. is impossible: train.minibatches=5"),
        ("stages.1.reward.length_margin_tokens=300", "stage 2 is impossible: reward.length_margin"),
        ("stages.1.at_step=5", "stage 2 has at_step=5: it must be above that .*, 5"),
        ("stages.1.weights.gone=1", "stage 2: weights.gone names no source .*chain_sum"),
        ("stages.1.weights.1=0", "stage 2: all sources of prompts have weight 0"),
        ("stages.1.plateau={window=2,min_gain=0.1}", "needs one of at_step and plateau"),
        ("stages.0.samplings={}", "unknown key 'stages.0.samplings'"),
        (
            "stages.0.optimizer.lr=1",
            r"'stages.0.optimizer': a stage has the keys name, at_step, .*, train.group_size, .*, "
            "queue.max_staleness, weights; all other keys hold for the whole run",
        ),
        (
            "algorithm.reference.policy=start algorithm.reference.source=engine",
            "stage 2 is impossible: sampling.temperature=0.8 with algorithm.reference.source",
        ),
        ("replay.buffer_groups=9 replay.share=0.5", "means .2, 4. groups of a batch"),
    ],
)
def test_an_impossible_stage_is_refused_by_its_name(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, STAGED), override.split())


def test_a_linear_schedule_needs_to_know_the_optimizer_steps(tmp_path: Path) -> None:
    text = STAGED.replace("at_step = 5", "plateau = {window = 3, min_gain = 0.01}")
    load_config(write(tmp_path, text))
    with pytest.raises(ConfigError, match='lr_schedule="linear" needs to know'):
        load_config(write(tmp_path, text), ["optimizer.lr_schedule=linear"])
