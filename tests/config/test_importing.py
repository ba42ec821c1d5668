"""Settings of verl, TRL and prime-rl become ours, and each of their keys is accounted for."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.foreign.read import read_foreign
from megatron_rl.config.importing import import_settings
from tests.config.foreign.imported import imported, written

VERL = r"""#!/usr/bin/env bash
set -xeuo pipefail
# don't start this twice
project_name='math'
max_prompt_length=$((1024 * 2))
DATA=${DATA:-/data}
train_files="['$DATA/gsm8k/train.parquet', '$DATA/math/train.parquet']"
MACHINES=(
    trainer.n_gpus_per_node=8   # of one node
    trainer.nnodes=2
)
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.val_files=${DATA}/gsm8k/test.parquet \
    data.train_batch_size=1024 \
    data.max_prompt_length=${max_prompt_length} data.max_response_length=1024 \
    actor_rollout_ref.model.path=$UNSET/model \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
    actor_rollout_ref.actor.megatron.sequence_parallel=False \
    +actor_rollout_ref.actor.clip_ratio_high=0.28 ++actor_rollout_ref.actor.clip_ratio_low=0.2 \
    trainer.logger='["console","wandb"]' trainer.project_name=$project_name \
    trainer.test_freq=-1 trainer.save_freq=10 trainer.total_epochs=15 \
    trainer.wibble=3 "${MACHINES[@]}" $@ 2>&1 | tee to=run.log
"""
TRL = """
import os
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

open({marker!r}, "w").write("run")
__import__("pathlib").Path({marker!r}).write_text("run")
SIZE = 8

def main():
    dataset = load_dataset("openai/gsm8k", "main", split="train")
    dataset = dataset.map(lambda row: {{"prompt": row["question"]}})
    held = load_dataset("parquet", data_files="held.parquet", split="train")
    args = GRPOConfig(output_dir="out", num_generations=SIZE, per_device_train_batch_size=16,
        gradient_accumulation_steps=5, learning_rate=5e-6, beta=0.0, epsilon=0.3,
        loss_type="dr_grpo", scale_rewards=False, max_prompt_length=256,
        max_completion_length=SIZE * 64, max_steps=200, temperature=0.9, top_k=None, bf16=True,
        warmup_ratio=0.1, seed=int(os.environ["SEED"]), wibble=1)
    GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=[os.system], args=args,
        train_dataset=dataset, eval_dataset=held).train()
"""
PRIME = """
max_steps = 70
seq_len = 4096
max_async_level = 1
[model]
name = "Qwen/Qwen3-0.6B"
[trainer.optim]
lr = 3e-6
[orchestrator]
batch_size = 256
rollouts_per_example = 8
[orchestrator.sampling]
max_tokens = 2048
[[orchestrator.env]]
id = "primeintellect/math-env"
[inference.parallel]
tp = 2
[wibble]
a = 1
"""


def test_a_script_of_verl(tmp_path: Path) -> None:
    found, ours = imported(written(tmp_path, "run.sh", VERL))
    train, generator, algorithm = ours.train, ours.generator, ours.algorithm
    assert (train.prompts_per_batch, train.group_size, train.minibatches) == (1024, 5, 4)
    assert (train.epochs, train.microbatch_tokens) == (15, 4 * (2048 + 1024))
    assert (ours.sampling.max_new_tokens, generator.context_tokens) == (1024, 3072)
    # 16 GPUs, each for trainer and engines.
    assert (ours.parallel.tensor, ours.parallel.data) == (4, 4)
    assert ours.parallel.sequence is False  # the default is true with tensor 4
    assert (generator.tensor_parallel, generator.replicas, generator.colocate) == (2, 8, True)
    assert (algorithm.preset, algorithm.normalization.name) == ("grpo", "group")
    assert (algorithm.aggregation.name, algorithm.kl.placement) == ("batch_tokens", "loss")
    assert (algorithm.kl.estimator, algorithm.kl.coefficient) == ("forward_kl", 0.002)
    loss = algorithm.policy_loss
    assert (loss.eps_low, loss.eps_high, loss.dual_clip) == (0.2, 0.28, 3.0)
    assert (ours.optimizer.lr, ours.optimizer.weight_decay) == (3e-6, 0.01)
    assert (ours.checkpoint.every_steps, ours.eval.every_steps) == (10, 0)
    assert [str(one.path) for one in ours.prompts] == [
        "/data/gsm8k/train.parquet", "/data/math/train.parquet",
    ]  # fmt: skip
    assert [one.held_out_share for one in ours.prompts] == [0, 0]
    [held] = ours.eval.sets
    assert (held.name, str(held.prompts.path)) == ("gsm8k-test", "/data/gsm8k/test.parquet")
    assert (ours.metrics.wandb, ours.metrics.wandb_project) == ("online", "math")
    assert ours.queue.max_staleness == 0
    assert "$UNSET has no value" in found.no_counterpart["actor_rollout_ref.model.path"]
    assert "to" not in found.unknown and "trainer.wibble" in found.unknown
    assert "trainer.test_freq" in found.default_here


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=False", ("none", "batch_tokens", 0.2, "group")),
        ("algorithm.use_kl_in_reward=True", ("reward", "batch_tokens", 0.2, "group")),
        ("reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=128 "
         "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
         ("none", "batch_tokens", 0.2, "group")),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
         "reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
         ("none", "batch_tokens", 0.2, "group")),
        ("actor_rollout_ref.actor.clip_ratio=0.1", ("none", "batch_tokens", 0.1, "group")),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean "
         "algorithm.norm_adv_by_std_in_grpo=False", ("none", "sequence_mean", 0.2, "none")),
    ],
)  # fmt: skip
def test_objectives_of_verl(tmp_path: Path, words: str, expected: tuple[object, ...]) -> None:
    line = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
    line += f"actor_rollout_ref.rollout.n=4 {words}"
    _, ours = imported(written(tmp_path, "run.sh", line))
    ours_is = ours.algorithm
    assert (
        ours_is.kl.placement, ours_is.aggregation.name, ours_is.policy_loss.eps_high,
        ours_is.normalization.name,
    ) == expected  # fmt: skip
    assert ours.reward.length_margin_tokens == (128 if "overlong" in words else 0)
    assert ours.optimizer.offload == ("offload" in words)
    # verl's own defaults: 8 GPUs, engines of two; 512 tokens of prompt and of response.
    assert (ours.parallel.data, ours.generator.replicas) == (8, 4)
    assert (ours.sampling.max_new_tokens, ours.generator.context_tokens) == (512, 1024)
    assert ours.eval.samples == 1 and ours.generator.release_memory
    # Without filter_groups verl trains on every group.
    assert ours_is.zero_variance_groups == "keep"


def test_a_script_of_trl_is_read_and_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    found, ours = imported(written(tmp_path, "grpo.py", TRL.format(marker=str(marker))))
    assert not marker.exists()
    # 16 * 5 completions of one process are 10 groups of 8.
    assert (ours.train.prompts_per_batch, ours.train.group_size, ours.train.steps) == (10, 8, 200)
    assert any("number" in line and "process" in line for line in found.to_check)
    assert (ours.sampling.max_new_tokens, ours.generator.context_tokens) == (512, 768)
    assert (ours.sampling.temperature, ours.sampling.top_k) == (0.9, 0)
    assert (ours.optimizer.lr, ours.optimizer.lr_schedule) == (5e-6, "linear")
    assert ours.optimizer.warmup_steps == 20  # 0.1 of 200
    algorithm = ours.algorithm
    assert (algorithm.aggregation.name, algorithm.normalization.name) == ("sequence_sum", "none")
    assert (algorithm.policy_loss.eps_low, algorithm.policy_loss.eps_high) == (0.3, 0.3)
    assert algorithm.kl.placement == "none"
    assert str(ours.model.path) == "Qwen/Qwen2.5-0.5B-Instruct"
    [source] = ours.prompts
    named = (str(source.path), source.subset, source.dataset_split)
    assert named == ("openai/gsm8k", "main", "train")
    assert ours.eval.sets[0].prompts.path == tmp_path / "held.parquet"
    assert "is read, not run" in found.no_counterpart["seed"]
    assert set(found.unknown) == {"wibble"}


def test_a_script_of_trl_with_an_environment(tmp_path: Path) -> None:
    script = "args = GRPOConfig(num_generations=4, num_train_epochs=1, warmup_ratio=0.05)\n"
    script += "GRPOTrainer(model='a/b', args=args, environment_factory=CounterEnv, tools=[add])\n"
    found, ours = imported(written(tmp_path, "grpo.py", script))
    assert found.unknown == {}
    for key in ("environment_factory", "tools"):
        assert "docs/moving.md" in found.no_counterpart[key]
    assert any(line.startswith("reward.tasks: without an env") for line in found.to_check)
    # The file does not tell the number of steps.
    assert (ours.train.epochs, ours.optimizer.warmup_steps) == (1, 0)
    assert any("0.05 of all optimizer steps" in line for line in found.to_check)
    _, ours = imported(written(tmp_path, "share.py", "GRPOConfig(max_steps=50, warmup_steps=0.1)"))
    assert ours.optimizer.warmup_steps == 5


def test_a_yaml_of_trl(tmp_path: Path) -> None:
    text = "model_name_or_path: m/m\ndataset_name: a/b\nlearning_rate: 1e-5\nnum_generations: 4\n"
    text += "beta: 0.01\nper_device_train_batch_size: 2\n"
    text += 'save_steps: 50\nsave_strategy: "no"\neval_steps: 25\neval_strategy: steps\n'
    found, ours = imported(written(tmp_path, "grpo.yaml", text))
    assert (ours.optimizer.lr, ours.algorithm.kl.coefficient) == (1e-5, 0.01)
    assert (ours.algorithm.kl.placement, ours.train.epochs) == ("loss", 3)
    assert (ours.checkpoint.every_steps, ours.eval.every_steps) == (0, 25)
    assert "0.5 groups of 4" in found.no_counterpart["per_device_train_batch_size"]
    assert ours.algorithm.zero_variance_groups == "keep" and ours.eval.prompts == "auto"
    # 20 optimizer steps, two for each batch.
    counted = "model_name_or_path: m/m\ndataset_name: a/b\nnum_generations: 4\nmax_steps: 20\n"
    counted += "per_device_train_batch_size: 4\nsteps_per_generation: 2\nsave_steps: 10\n"
    _, ours = imported(written(tmp_path, "two.yaml", counted))
    assert (ours.train.steps, ours.train.minibatches, ours.checkpoint.every_steps) == (10, 2, 5)
    _, ours = imported(written(tmp_path, "full.yaml", f"{counted}bf16: false\n"))
    assert ours.model.dtype == "float32"
    assert ours.eval.prompts == 0, "TRL evaluates nothing without eval_strategy"


def test_files_of_prime_rl(tmp_path: Path) -> None:
    found, ours = imported(written(tmp_path, "rl.toml", PRIME))
    assert (ours.train.prompts_per_batch, ours.train.group_size) == (32, 8)
    assert (ours.train.steps, ours.queue.max_staleness, ours.optimizer.lr) == (70, 1, 3e-6)
    assert (ours.generator.context_tokens, ours.sampling.max_new_tokens) == (4096, 2048)
    assert (ours.generator.tensor_parallel, str(ours.model.path)) == (2, "Qwen/Qwen3-0.6B")
    assert "[[prompts]]" in found.no_counterpart["orchestrator.env.0.id"]
    assert set(found.unknown) == {"wibble.a"}
    model = '[model]\nname = "a/b"\n'
    several = [
        written(tmp_path, "train.toml", f"max_steps = 9\n{model}"),
        written(tmp_path, "orch.toml", f"max_steps = 8\n{model}"),
    ]
    found, ours = imported(*several)
    assert (ours.train.steps, str(ours.model.path)) == (9, "a/b")
    assert "gives train.steps = 9 already" in found.no_counterpart["orch: max_steps"]
    # These files leave the optimizer and the staleness to prime-rl's defaults.
    assert (ours.optimizer.lr, ours.optimizer.weight_decay) == (1e-6, 0.01)
    assert (ours.optimizer.beta2, ours.queue.max_staleness) == (0.999, 8)
    assert "optim.betas2 is not given: the default of prime-rl" in found.toml()
    assert any("sample 1 completion" in text for text in found.to_check)


def test_data_sets_of_environments_of_prime_rl_become_prompts(tmp_path: Path) -> None:
    text = PRIME.replace(
        'id = "primeintellect/math-env"',
        'id = "a/math"\nargs = {dataset_name = "a/b", dataset_subset = "s", question_key = "q"}\n'
        '[[orchestrator.env]]\nid = "a/judge"\nargs = {judge_model = "j", answer_key = "a"}\n'
        '[[orchestrator.env]]\nid = "a/more"\nargs = {dataset_name = "c/d"}',
    )  # fmt: skip
    found, ours = imported(written(tmp_path, "rl.toml", text))
    assert [(str(p.path), p.subset, p.columns.question) for p in ours.prompts] == [
        ("a/b", "s", "q"),
        ("c/d", "", ""),
    ]
    # The second environment names no data set.
    assert {
        "orchestrator.env.1.args.judge_model",
        "orchestrator.env.1.args.answer_key",
    } <= found.no_counterpart.keys()


def test_what_does_not_hold_is_said(tmp_path: Path) -> None:
    line = "python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.seed=[a]"
    found = import_settings(read_foreign([written(tmp_path, "run.sh", line)]))
    # verl samples one completion unless told otherwise.
    assert "train.group_size" in found.fault and "run.seed" in found.fault
    assert "# It does not load yet:" in found.toml() and "run.seed" in found.toml()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", "echo hello=1\n", "no command of verl"),
        ("run.py", "x = 1\n", "neither GRPOConfig"),
        ("run.py", "GRPOConfig(", "no valid Python"),
        ("run.yaml", "a: &a [1]\nb: *a\n", "aliases"),
        ("run.yaml", "- 1\n", "no settings"),
        ("run.yaml", "zero_stage: 1\n", "neither a YAML of `trl grpo`"),
        ("run.toml", "a =\n", "no valid TOML"),
        ("run.sh", "A=aa\n" + "A=$A$A\n" * 40, "has more than 4096 characters"),
        ("run.sh", "A=(a a)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40, "has more than 10000 words"),
        ("run.sh", "A=(\n", "has no end"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_foreign([written(tmp_path, name, text)])


def test_hostile_values_stay_small_and_in_their_line(tmp_path: Path) -> None:
    double = "x = 2\n" + "x = x * x\n" * 60 + "y = [x, x]\n" + "y = [y, y]\n" * 60
    script = double + 'GRPOConfig(seed=x, top_p=y, run_name="a\\n[run]\\nseed = 4", beta=0.5)\n'
    found, ours = imported(written(tmp_path, "grpo.py", script))
    assert {"seed", "top_p"} <= set(found.no_counterpart)
    assert (ours.run.seed, ours.metrics.wandb_name) == (0, "a\n[run]\nseed = 4")
