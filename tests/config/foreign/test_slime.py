"""Launch scripts of slime: lists of flags, and what their counts mean."""

from pathlib import Path

import pytest

from tests.config.foreign.imported import imported, written

SCRIPT = r"""#!/bin/bash
pkill -9 sglang
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/models/qwen3-4B.sh"
CP=${1:-2}
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   #--hf-checkpoint /root/other
   --save /root/out/
)
ROLLOUT_ARGS=(
   --prompt-data "/data/train.jsonl"
   --input-key prompt --label-key label
   --apply-chat-template
   --apply-chat-template-kwargs '{"enable_thinking": false}'
   --rm-type math
   --num-rollout 300
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --rollout-top-k -1
   --global-batch-size 128   # half of them
   --rollout-stop "</s>" "User:"
)
MORE=(
   --eval-prompt-data aime /data/aime.jsonl gsm /data/gsm.jsonl
   --n-samples-per-eval-prompt 16
   --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size ${CP}
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
   --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl
   --eps-clip 0.2 --eps-clip-high 0.28
   --lr 2e-6 --lr-decay-style cosine --min-lr 1e-6
   --rollout-num-gpus-per-engine 4
   --wibble 3
)
RUNTIME="{
  \"env_vars\": {\"A\": \"1\"}
}"
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \
   --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate \
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${MORE[@]} 2>&1 | tee log
"""


def test_a_script_of_slime(tmp_path: Path) -> None:
    found, ours = imported(written(tmp_path, "run.sh", SCRIPT))
    train, generator = ours.train, ours.generator
    # 32 * 8 completions in batches of 128; 9216 tokens on each of 2 context ranks.
    assert (train.prompts_per_batch, train.group_size, train.minibatches) == (32, 8, 2)
    assert (train.steps, train.microbatch_tokens) == (300, 18432)
    # 16 GPUs over 2 * 2 ranks, and over engines of 4.
    assert (ours.parallel.data, ours.parallel.context, generator.replicas) == (4, 2, 4)
    assert (generator.tensor_parallel, generator.colocate) == (4, True)
    assert (str(ours.model.path), str(ours.run.dir)) == ("/root/Qwen3-4B", "/root/out")
    [source] = ours.prompts
    assert (source.columns.question, source.columns.answer) == ("prompt", "label")
    assert source.held_out_share == 0
    assert [one.name for one in ours.eval.sets] == ["aime", "gsm"]
    # Evaluations sample as rollouts do, unless told otherwise.
    assert (ours.eval.temperature, ours.eval.samples) == (0.8, 16)
    assert (ours.sampling.top_k, ours.sampling.stop) == (0, ["</s>", "User:"])
    assert ours.render.chat_template_kwargs == {"enable_thinking": False}
    # slime takes the model's own context.
    assert generator.context_tokens == 8192 + 1024
    assert any(line.startswith("generator.context_tokens") for line in found.to_check)
    algorithm = ours.algorithm
    assert (algorithm.normalization.name, algorithm.aggregation.name) == (
        "group", "sequence_mean",
    )  # fmt: skip
    assert (algorithm.kl.placement, algorithm.kl.coefficient) == ("loss", 0.01)
    assert (algorithm.policy_loss.eps_low, algorithm.policy_loss.eps_high) == (0.2, 0.28)
    assert (algorithm.zero_variance_groups, ours.queue.max_staleness) == ("keep", 0)
    assert (ours.optimizer.lr_schedule, ours.optimizer.min_lr_ratio) == ("cosine", 0.5)
    assert ours.optimizer.warmup_steps == 0
    assert "list of another file" in found.no_counterpart["${MODEL_ARGS[@]}"]
    assert set(found.unknown) == {"wibble"}


@pytest.mark.parametrize(
    ("flags", "key", "expected"),
    [
        ("--use-kl-loss --kl-loss-coef 0.0", "kl.placement", "none"),
        ("--kl-coef 0.01", "kl.placement", "reward"),
        ("--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k2", "kl.coefficient", 0.01),
        ("--use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k2", "kl.horizon", "token"),
        ("--calculate-per-token-loss", "aggregation.name", "batch_tokens"),
        ("--disable-grpo-std-normalization", "normalization.name", "none"),
        ("--advantage-estimator gspo", "policy_loss.level", "sequence"),
        ("--advantage-estimator cispo", "preset", "cispo"),
        ("--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
         "normalization.name", "minibatch"),
        ("--use-tis --tis-clip 3.0", "correction.high", 3.0),
        ("--use-tis", "policy_loss.old_logprobs", "recompute"),
        ("--dynamic-sampling-filter-path a.check_reward_nonzero_std", "zero_variance_groups",
         "drop"),
    ],
)  # fmt: skip
def test_objectives_of_slime(tmp_path: Path, flags: str, key: str, expected: object) -> None:
    line = f"python train_async.py --rollout-batch-size 4 --n-samples-per-prompt 4 {flags} "
    line += "--actor-num-gpus-per-node 4 --rollout-num-gpus 2"
    found, ours = imported(written(tmp_path, "run.sh", line))
    value = ours.algorithm
    for part in key.split("."):
        value = getattr(value, part)
    assert value == expected
    is_open = any("old_logprobs: slime recomputes" in line for line in found.to_check)
    assert is_open == (ours.algorithm.policy_loss.old_logprobs == "generator")
    # One step of rollouts ahead; engines on GPUs of their own.
    assert (ours.queue.max_staleness, ours.generator.colocate) == (1, False)
    assert (ours.parallel.data, ours.generator.replicas) == (4, 2)
