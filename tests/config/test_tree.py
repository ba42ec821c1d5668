"""Settings that exclude each other are refused when the configuration is loaded."""

import pytest

from megatron_rl.config.files import ConfigError, load_config

SHARDED = "parallel.distributed_optimizer=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("parallel.virtual_stages=2", "needs several stages.*nearest possible: 1"),
        (
            # Of 8 groups the buffer, which is empty at first, may give 6.
            "train.prompts_per_batch=8 train.minibatches=3 replay.share=0.75 "
            "replay.buffer_groups=16",
            "minibatches=3 is more than the 2 groups of the first batch .*; lower train.minib",
        ),
        (
            f"{SHARDED} expert.parallel.overlap_parameters=true",
            "parallel.overlap_gradients=true: set",
        ),
        (
            "reward.tasks.a.environment=m2.ok",
            "'m2.ok' is no package.module:function; expected such as 'my_agents:guess'",
        ),
        (
            "reward.tasks.a.environment=e/m2.py:ok",
            r"reward.tasks.a.environment: .*'e/m2.py:ok' is no package.module:function; expected",
        ),
        (
            'reward.extra=[{name="a",function="ok"}]',
            "'ok' is no package.module:function; expected such as 'my_agents:guess'",
        ),
        ("optimizer.offload=true", "optimizer.offload=true needs parallel.distributed_optimizer"),
        (
            f"{SHARDED} optimizer.offload=true model.dtype=float32",
            "optimizer.offload=true needs model.dtype='bfloat16', or no run could resume: set it",
        ),
        (
            f"{SHARDED} sft.optimizer.offload=true model.dtype=float32",
            "sft.optimizer.offload=true needs model.dtype='bfloat16'",
        ),
        (
            f"{SHARDED} model.fp8=blockwise expert.model.fp8_parameters=true model.megatron_path=m",
            "model.megatron_path does not fill",
        ),
        ("model.megatron_path=m sft.steps=2", "without sft.steps and with train.steps: make a HF"),
        ("model.megatron_path=m train.steps=0", "without sft.steps and with train.steps"),
        ("train.profile_steps=[3,2]", r"train.profile_steps=\[3, 2\].*set \[2, 3\]"),
        ("sft.profile_steps=[3,2]", r"sft.profile_steps=\[3, 2\].*set \[2, 3\]"),
        ("sft.optimizer.offload=true", "sft.optimizer.offload=true needs"),
        (
            "model.head_dtype=float32 generator.engine=hf",
            "head_dtype='float32' with generator.engine='hf', which rounds logits to model.dtype",
        ),
        (
            "generator.engine=vllm generator.tensor_parallel=2",
            "generator.tensor_parallel=2: generator.engine='vllm' has one rank",
        ),
        (
            "generator.engine=vllm generator.quantization=fp8",
            "generator.quantization='fp8' needs an engine that quantises",
        ),
        (
            "generator.engine=vllm train.router_replay=true",
            "train.router_replay needs an engine that returns its expert choices",
        ),
        ("model.fp8=blockwise expert.model.layers=local", "'blockwise' needs expert.model.layers="),
        ("model.fp8=tensorwise model.dtype=float32", "'tensorwise' needs model.dtype='bfloat16'"),
        ("expert.model.fp8_parameters=true", "need FP8, and model.fp8='none'"),
        ("expert.model.fp8_bf16_edge_layers=1", "need FP8, and model.fp8='none'"),
        (
            "model.fp8=delayed expert.model.fp8_bf16_edge_layers=2",
            "edge_layers=2 .* possible: 0, or",
        ),
        (
            f"{SHARDED} model.fp8=delayed expert.model.fp8_parameters=true",
            "no scales for loaded weights; nearest possible: model.fp8='tensorwise'",
        ),
        (
            "model.fp8=blockwise expert.model.fp8_parameters=true",
            "needs parallel.distributed_optimizer",
        ),
        (
            f"{SHARDED} model.fp8=blockwise expert.model.fp8_parameters=true "
            "optimizer.offload=true",
            "exclude each other",
        ),
    ],
)
def test_settings_that_exclude_each_other_are_refused(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides.split())


@pytest.mark.parametrize(
    "overrides",
    [
        "parallel.virtual_stages=2 parallel.pipeline=2",
        "train.prompts_per_batch=8 train.minibatches=2 replay.share=0.75 replay.buffer_groups=16",
        # Files always give their share.
        "train.prompts_per_batch=8 train.minibatches=3 replay.share=0.75 replay.runs=['r']",
        "model.head_dtype=float32",
        "model.head_dtype=float32 model.dtype=float32 generator.engine=hf",
        f"{SHARDED} parallel.overlap_gradients=true expert.parallel.overlap_parameters=true",
        f"{SHARDED} optimizer.offload=true",
        f"{SHARDED} model.fp8=blockwise expert.model.fp8_parameters=true "
        "expert.model.fp8_bf16_edge_layers=1",
    ],
)
def test_settings_that_agree_are_taken(overrides: str) -> None:
    load_config(None, overrides.split())


def test_a_copy_with_other_values_leaves_the_rest_and_the_original_as_they_are() -> None:
    config = load_config(None, ["expert.ports.prompts=21000", "train.steps=3"])
    copy = config.replaced(ports={"label": "a", "weights": 21002}, train={"steps": 4})
    assert (copy.ports.label, copy.ports.prompts, copy.ports.weights) == ("a", 21000, 21002)
    assert (config.ports.label, config.ports.weights, config.train.steps) == ("", 0, 3)
    assert copy.train.steps == 4 and copy.model is config.model
