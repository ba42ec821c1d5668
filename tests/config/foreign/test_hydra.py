"""YAML files of verl are read as Hydra composes them; what they do not tell is named."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.foreign.read import read_foreign
from megatron_rl.config.foreign.settings import Unread
from tests.config.foreign.imported import accounted, imported, written

TRAINER = """
hydra:
  searchpath: [pkg://verl.trainer.config]
defaults:
  - ppo_megatron_trainer
  - mathematics
  - actor@actor_rollout_ref.actor: long
  - _self_
data:
  train_files: [/data/a.parquet, /data/b.parquet]
  val_files: null
  max_response_length: 2048
  apply_chat_template_kwargs: {enable_thinking: false}
actor_rollout_ref:
  model: {path: /models/m, lora_rank: 0}
  actor:
    _target_: verl.workers.config.McoreActorConfig
    optim: {lr: 1e-5, min_lr: 1e-6, lr_decay_style: cosine}
    ppo_max_token_len_per_gpu: ${actor_rollout_ref.rollout.response_length}
    checkpoint: {save_contents: [model], load_contents: "${.save_contents}"}
    ppo_micro_batch_size_per_gpu: null
  rollout:
    name: ???
    n: 8
    response_length: ${oc.select:data.max_response_length,512}
    top_k: ${oc.select:no.such,7}
    max_num_seqs: ${data.absent}
    temperature: ${oc.env:HEAT,0.5}
algorithm: {adv_estimator: grpo}
trainer:
  project_name: maths
  default_local_dir: runs/${.project_name}-${trainer.total_epochs}/a
  total_epochs: 2
  nnodes: 1
"""
MATHEMATICS = "data: {train_batch_size: 64, max_response_length: 7}\ntrainer: {total_epochs: 9}\n"
ACTOR = "use_dynamic_bsz: true\nppo_mini_batch_size: 32\nuse_kl_loss: true\n"


def test_a_yaml_of_verl_with_the_files_it_names(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    written(tmp_path, "mathematics.yaml", MATHEMATICS)
    written(tmp_path / "actor", "long.yaml", ACTOR)
    path = written(tmp_path, "trainer.yaml", TRAINER)
    found, ours = imported(path, words=("data.max_response_length=4096", "trainer.seed=1"))
    # A word of the command line wins, also where another key refers to it.
    assert ours.sampling.max_new_tokens == ours.train.microbatch_tokens == 4096
    # 512 tokens of prompt, as verl has by itself.
    assert ours.generator.context_tokens == 4608
    assert (ours.train.prompts_per_batch, ours.train.group_size, ours.train.minibatches) == (
        64, 8, 2,
    )  # fmt: skip
    assert (ours.train.epochs, str(ours.run.dir)) == (2, "runs/maths-2/a")
    assert [str(one.path) for one in ours.prompts] == ["/data/a.parquet", "/data/b.parquet"]
    # verl draws from all rows alike.
    assert any(line.startswith("prompts.weight: verl joins") for line in found.to_check)
    optimizer = ours.optimizer
    assert (optimizer.lr, optimizer.lr_schedule) == (1e-5, "cosine")
    assert optimizer.min_lr_ratio == pytest.approx(0.1)  # 1e-6 of 1e-5
    assert ours.render.chat_template_kwargs == {"enable_thinking": False}
    # verl's own values, which this file leaves alone.
    algorithm = ours.algorithm
    assert (algorithm.aggregation.name, algorithm.normalization.name) == ("batch_tokens", "group")
    assert (algorithm.kl.placement, algorithm.kl.coefficient) == ("loss", 0.001)
    assert (algorithm.policy_loss.eps_high, algorithm.policy_loss.dual_clip) == (0.2, 3.0)
    assert "loss_agg_mode is not given: the default of verl" in found.toml()
    rollout = "actor_rollout_ref.rollout"
    assert "data.absent has no value" in found.no_counterpart[f"{rollout}.max_num_seqs"]
    assert "the environment tells HEAT" in found.no_counterpart[f"{rollout}.temperature"]
    # The trainer's file, which is not here, may have a value in place of the 7.
    assert "a file that is not here" in found.no_counterpart[f"{rollout}.top_k"]
    assert "has to be given" in found.no_counterpart[f"{rollout}.name"]
    assert "data.val_files" in found.default_here and set(found.unknown) == {"trainer.seed"}
    assert not any("defaults" in key for key in found.no_counterpart)


def test_a_script_counts_above_the_yaml_that_it_names(tmp_path: Path) -> None:
    yaml = "defaults: [ppo_trainer]\ndata: {train_batch_size: 32, max_prompt_length: 100}\n"
    yaml += "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 4}}\n"
    script = "python3 -m verl.trainer.main_ppo --config-path=conf --config-name grpo \\\n"
    script += "    data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size='${data."
    script += "train_batch_size}' | tee log\n"
    paths = written(tmp_path, "run.sh", script), written(tmp_path, "grpo.yaml", yaml)
    found, ours = imported(*paths)
    assert (ours.train.prompts_per_batch, ours.train.minibatches, ours.train.group_size) == (
        16, 1, 4,
    )  # fmt: skip
    assert ours.generator.context_tokens == 100 + 512
    assert "--config-name" not in found.given
    # The script alone says that its YAML is missing.
    alone = accounted(paths[0])
    assert "name it too" in alone.no_counterpart["--config-name"]
    # A trainer's file of verl itself is not missing.
    own = written(tmp_path, "own.sh", script.replace("grpo", "ppo_trainer.yaml"))
    assert "--config-name" in accounted(own).default_here


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    text = "defaults:\n  - base\n  - optional x: absent\ntrainer: {nnodes: 1}\n"
    text += "data: {max_response_length: '${data.max_prompt_length}'}\n"
    found = accounted(written(tmp_path, "a.yaml", text))
    assert {"defaults.base", "defaults.x/absent"} <= found.no_counterpart.keys()
    # verl's 512 may not count: base may have another value.
    assert "has no value" in found.no_counterpart["data.max_response_length"]


def test_an_estimator_with_a_critic_is_to_check(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {rollout: {n: 2}}\n"
    found = accounted(written(tmp_path, "a.yaml", text))
    assert any("gae needs a critic" in line for line in found.to_check)


def test_interpolations_end(tmp_path: Path) -> None:
    text = "data: {seed: '${data.seed}', a: '${data.b} ${data.b}', b: '${data.a}'}\n"
    values = read_foreign([written(tmp_path, "a.yaml", text)]).values
    assert all(isinstance(value, Unread) for value in values.values())
    double = "".join(
        f"  k{n}: {{x: '${{data.k{n + 1}}}', y: '${{data.k{n + 1}}}'}}\n" for n in range(15)
    )
    with pytest.raises(InputError, match="more than 10000 values"):
        read_foreign([written(tmp_path, "b.yaml", f"data:\n{double}  k15: 1\n")])
    around = written(tmp_path, "c.yaml", "defaults: [c]\ndata: {seed: 1}\n")
    with pytest.raises(InputError, match="more than 64 files"):
        read_foreign([around])


def test_engines_that_generate_while_verl_trains(tmp_path: Path) -> None:
    line = "python -m recipe.fully_async_policy.fully_async_main algorithm.adv_estimator=grpo "
    line += "actor_rollout_ref.rollout.n=4 trainer.nnodes=1 trainer.n_gpus_per_node=8 "
    line += "rollout.nnodes=2 rollout.n_gpus_per_node=8 async_training.staleness_threshold=0.5"
    found, ours = imported(written(tmp_path, "run.sh", line))
    # 16 GPUs of engines of two, besides the 8 that train.
    assert (ours.parallel.data, ours.generator.replicas, ours.generator.colocate) == (8, 8, False)
    assert ours.queue.max_staleness == 2
    assert "policy versions" in found.no_counterpart["async_training.staleness_threshold"]
    # verl's batch of such scripts is 0: a minibatch of 256.
    assert (ours.train.prompts_per_batch, ours.train.minibatches) == (256, 1)


ASYNC = """
python -m recipe.fully_async_policy.fully_async_main algorithm.adv_estimator=grpo \\
    data.train_batch_size=0 data.gen_batch_size=1 data.max_response_length=8192 \\
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.hybrid_engine=False \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \\
    actor_rollout_ref.actor.use_rollout_log_probs=True \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 \\
    trainer.nnodes=1 trainer.n_gpus_per_node=4 rollout.nnodes=1 rollout.n_gpus_per_node=4 \\
    rollout.total_rollout_steps=51200 rollout.total_epochs=10 rollout.test_freq=10 \\
    async_training.staleness_threshold=0.1 async_training.trigger_parameter_sync_step=4 \\
    async_training.require_batches=4 async_training.partial_rollout=True
"""


def test_a_fully_asynchronous_script_of_verl_loads(tmp_path: Path) -> None:
    found, ours = imported(written(tmp_path, "run.sh", ASYNC))
    # 4 minibatches of 32 prompts; 51200 prompts are 400 such batches.
    train = ours.train
    assert (train.prompts_per_batch, train.minibatches, train.group_size) == (128, 4, 16)
    assert (train.steps, train.epochs) == (400, 0)
    # Every 10 weight syncs, each after 4 batches.
    assert ours.eval.every_steps == 40
    assert ours.optimizer.warmup_steps == 80  # 0.05 of 400 * 4
    assert ours.algorithm.policy_loss.old_logprobs == "generator"
    assert (ours.parallel.data, ours.generator.replicas) == (4, 2)
    assert found.unknown == {}
    assert not any(line.startswith("algorithm.policy_loss.old") for line in found.to_check)
    assert any("every 4 batches" in line for line in found.to_check)
    _, ours = imported(written(tmp_path, "b.sh", ASYNC.replace("=True", "=False")))
    assert ours.algorithm.policy_loss.old_logprobs == "recompute"


def test_turns_of_verl_are_environments_here(tmp_path: Path) -> None:
    text = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref:\n  rollout:\n    n: 2\n"
    text += "    multi_turn: {enable: true, max_assistant_turns: 5}\n    agent: {num_workers: 8}\n"
    found, _ = imported(written(tmp_path, "a.yaml", text))
    rollout = "actor_rollout_ref.rollout"
    for key in ("multi_turn.enable", "multi_turn.max_assistant_turns", "agent.num_workers"):
        assert "reward.tasks.NAME.environment" in found.no_counterpart[f"{rollout}.{key}"]
    assert any(line.startswith("reward.tasks: without an env") for line in found.to_check)


def test_old_logprobs_are_to_check_unless_the_file_gives_them(tmp_path: Path) -> None:
    key = "algorithm.policy_loss.old_logprobs"
    plain = "algorithm: {adv_estimator: grpo}\nactor_rollout_ref: {rollout: {n: 2}}\n"
    found, _ = imported(written(tmp_path, "a.yaml", plain))
    assert any(line.startswith(key) for line in found.to_check)
    corrected = plain.replace("grpo", "grpo, rollout_correction: {rollout_is: token}")
    found, ours = imported(written(tmp_path, "b.yaml", corrected))
    assert ours.algorithm.policy_loss.old_logprobs == "recompute"
    assert not any(line.startswith(key) for line in found.to_check)


@pytest.mark.parametrize(
    ("optim", "steps", "expected"),
    [
        # 64 prompts in minibatches of 16 are 4 optimizer steps of a batch.
        ("lr_warmup_steps_ratio: 0.1", 50, 20),
        ("lr_warmup_steps_ratio: 0.1", None, 0),
        ("lr_warmup_steps: 5", None, 20),
        ("lr_warmup_steps: -1", 50, 0),
    ],
)
def test_warmup_of_verl_counts_batches(
    tmp_path: Path, optim: str, steps: int | None, expected: int
) -> None:
    text = "algorithm: {adv_estimator: grpo}\ndata: {train_batch_size: 64}\n"
    text += "actor_rollout_ref:\n  rollout: {n: 2}\n"
    text += f"  actor: {{ppo_mini_batch_size: 16, optim: {{{optim}}}}}\n"
    text += f"trainer: {{total_training_steps: {steps or 'null'}}}\n"
    found, ours = imported(written(tmp_path, "a.yaml", text))
    assert ours.optimizer.warmup_steps == expected
    is_open = "ratio" in optim and steps is None
    assert any("0.1 of all optimizer steps" in line for line in found.to_check) == is_open


def test_a_kl_in_reward_and_loss_is_named(tmp_path: Path) -> None:
    text = "algorithm: {adv_estimator: grpo, use_kl_in_reward: true, kl_ctrl: {kl_coef: 0.05}}\n"
    text += "actor_rollout_ref: {rollout: {n: 2}, actor: {use_kl_loss: true, kl_loss_coef: 0.01}}\n"
    found, ours = imported(written(tmp_path, "a.yaml", text))
    assert (ours.algorithm.kl.placement, ours.algorithm.kl.coefficient) == ("loss", 0.01)
    assert {"algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"} <= set(found.no_counterpart)
    [note] = [line for line in found.to_check if line.startswith("algorithm.kl:")]
    assert "in the reward too, with coefficient 0.05" in note


def test_correction_of_verl_needs_the_trainers_logprobs(tmp_path: Path) -> None:
    text = "algorithm:\n  adv_estimator: grpo\n"
    text += "  rollout_correction: {rollout_is: LEVEL, rollout_is_threshold: 3.0}\n"
    text += "actor_rollout_ref: {rollout: {n: 2}}\n"
    _, ours = imported(written(tmp_path, "a.yaml", text.replace("LEVEL", "token")))
    assert (ours.algorithm.correction.name, ours.algorithm.correction.high) == ("truncated", 3.0)
    assert ours.algorithm.policy_loss.old_logprobs == "recompute"
    found, ours = imported(written(tmp_path, "b.yaml", text.replace("LEVEL", "sequence")))
    assert ours.algorithm.correction.name == "none"
    assert "product" in found.no_counterpart["algorithm.rollout_correction.rollout_is"]
    found, _ = imported(written(tmp_path, "c.yaml", text.replace("LEVEL", "null")))
    assert "algorithm.rollout_correction.rollout_is" in found.default_here


def test_defaults_of_a_scripts_variables_may_name_others(tmp_path: Path) -> None:
    script = 'ROOT=${ROOT:-"/data/verl"}\nMODEL=${MODEL:-"${ROOT}/models/m"}\nTP=${TP:=2}\n'
    script += "A=100; new=$((1024 * 2))\nall=$(((new + 1024)))\n"
    script += "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n"
    script += '    actor_rollout_ref.model.path="${MODEL}" data.train_files=$ROOT/a.parquet \\\n'
    script += "    data.max_response_length=${new} actor_rollout_ref.rollout.n=4 \\\n"
    script += "    actor_rollout_ref.actor.use_dynamic_bsz=True \\\n"
    script += "    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$all \\\n"
    script += "    actor_rollout_ref.actor.megatron.context_parallel_size=$TP \\\n"
    script += "    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 \\\n"
    script += (
        "    actor_rollout_ref.actor.optim.lr_warmup_steps=-1 trainer.total_training_steps=30 \\\n"
    )
    script += (
        "    reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=128 \\\n"
    )
    script += "    reward_model.overlong_buffer.penalty_factor=1.0\n"
    found, ours = imported(written(tmp_path, "run.sh", script))
    assert str(ours.model.path) == "/data/verl/models/m"
    assert str(ours.prompts[0].path) == "/data/verl/a.parquet"
    # 3072 tokens on each of 2 context ranks.
    assert (ours.sampling.max_new_tokens, ours.train.microbatch_tokens) == (2048, 6144)
    # A tenth of 30 * 4 optimizer steps: 1024 prompts in minibatches of 256.
    assert ours.optimizer.warmup_steps == 12
    assert (ours.reward.length_margin_tokens, ours.reward.length) == (128, 1.0)
    assert any(line.startswith("reward.length:") for line in found.to_check)


def test_the_column_of_questions_is_that_of_every_file(tmp_path: Path) -> None:
    script = """python3 -m verl.trainer.main_ppo data.prompt_key=asked \\
        algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 \\
        data.train_files="['/a.parquet', '/b.parquet']" data.val_files="['/c.jsonl', '/d.jsonl']"
    """
    _, ours = imported(written(tmp_path, "run.sh", script))
    held = [one.prompts for one in ours.eval.sets]
    assert [str(one.path) for one in held] == ["/c.jsonl", "/d.jsonl"]
    assert [one.columns.question for one in [*ours.prompts, *held]] == ["asked"] * 4
    # Without files of validation there is no evaluation set.
    alone = script.partition("data.val_files")[0]
    _, ours = imported(written(tmp_path, "alone.sh", alone + "data.val_files=null"))
    assert [one.columns.question for one in ours.prompts] == ["asked"] * 2
    assert ours.eval.sets == []
