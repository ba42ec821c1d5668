"""Which further arguments SGLang's server may be given, by SGLang's own parser, in a child."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from generation.sglang_arguments import check_extras
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import ConfigError, load_config
from megatron_rl.config.tree import Config

_JUDGE_ALL = """
import json, sys
from sglang.srt.server_args import ServerArgs
from generation.sglang_arguments import Question, _Parser, judge
parser = _Parser(allow_abbrev=False)
ServerArgs.add_cli_args(parser)
command, asked = json.load(sys.stdin)
print(json.dumps([judge(Question(command, extra), parser) for extra in asked]))
"""
COMMAND = ["--model-path=/m", "--tp-size=2", "--stream-interval=1", "--device", "cpu"]
SET_BY_THE_RUN = "the run sets it itself; leave it out"
BY_WEIGHTS = "the trainer's weights would not reach all that computes; leave it out"
BY_LOGPROBS = (
    "tokens would be drawn from another distribution than their logprobs say; leave it out"
)
BY_SYNCS = "SGLang would refuse every weight sync; leave it out"
BY_VERSIONS = "tokens could come from weights of another version than they say; leave it out"


def test_what_breaks_a_run_is_refused_and_the_rest_is_sglangs_to_judge() -> None:
    expected = {
        "mem-fraction-static": (0.8, ""),
        "chunked_prefill_size": (4096, ""),
        "disable-radix-cache": (True, ""),
        "cuda-graph-bs-decode": ([1, 2, 4], ""),
        "tensor-parallel-size": (2, SET_BY_THE_RUN),
        "model": ("/other", SET_BY_THE_RUN),
        "stream-interval": (1, SET_BY_THE_RUN),
        "disable-overlap-schedule": (True, SET_BY_THE_RUN),
        "tokenizer-worker-num": (2, SET_BY_THE_RUN),
        "api-key": ("x", SET_BY_THE_RUN),
        # Of a model without experts too: the command there does not give it.
        "moe-runner-backend": ("flashinfer_trtllm", SET_BY_THE_RUN),
        "dp-size": (2, BY_WEIGHTS),
        "pp-size": (2, BY_WEIGHTS),
        "weight-loader-disable-mmap": (True, BY_WEIGHTS),
        "load-format": ("dummy", BY_WEIGHTS),
        "speculative-algorithm": ("EAGLE", BY_WEIGHTS),
        "enable-lora": (True, BY_WEIGHTS),
        "enable-waterfill": (True, BY_WEIGHTS),
        "enforce-shared-experts-fusion": (True, SET_BY_THE_RUN),
        "moe-a2a-backend": ("deepep", BY_WEIGHTS),
        "enable-nvidia-megakernel": (True, BY_SYNCS),
        "enable-amd-monokernel": (True, BY_SYNCS),
        # The same by an older name.
        "monokernel-backend": ("amd", BY_SYNCS),
        "enable-watermark": (True, BY_LOGPROBS),
        "watermark-config": ("{}", BY_LOGPROBS),
        "enable-hierarchical-cache": (True, BY_VERSIONS),
        "disaggregation-mode": ("prefill", BY_VERSIONS),
        # A name is never completed: --tp would be --tp-size.
        "tp": (2, "SGLang's server has no argument --tp; did you mean 'tp-size'?"),
        "page-size": ("many", "argument --page-size: invalid int value: 'many'"),
        "enable-mixed-chunk": (3, "argument --enable-mixed-chunk: ignored explicit argument '3'"),
    }
    asked = [{name: value} for name, (value, _) in expected.items()]
    done = subprocess.run(
        [sys.executable, "-c", _JUDGE_ALL],
        input=json.dumps([COMMAND, asked]), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for (name, (_, words)), fault in zip(
        expected.items(), json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        of_value = words.startswith("argument")
        prefix = "generator.extra_args: " if of_value else f"generator.extra_args.{name}: "
        assert fault == (prefix + words if words else ""), name


def config_of(folder: Path, *overrides: str) -> Config:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return load_config(None, [f"model.path={folder}", *overrides])


def test_the_launcher_asks_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"extra_args\.weight-version: the run sets it itself"):
        check_extras(config_of(tmp_path, "generator.extra_args.weight-version=3"))
    check_extras(config_of(tmp_path, "generator.env.NCCL_DEBUG=INFO"))
    for name in (
        "SGLANG_TIMEOUT_KEEP_ALIVE", "SGLANG_RETURN_ORIGINAL_LOGPROB", "CUDA_VISIBLE_DEVICES",
        "MEGATRON_RL_ORDERS",
    ):  # fmt: skip
        with pytest.raises(InputError, match=rf"generator\.env\.{name}: the run sets it itself"):
            check_extras(config_of(tmp_path, f"generator.env.{name}=x"))


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn"])
def test_fused_rotations_are_refused_with_scaled_positions(
    rope_type: str, key: str, tmp_path: Path
) -> None:
    config = config_of(tmp_path, "generator.extra_args.enable_fused_qk_norm_rope=true")
    table = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 32768}
    values = {"architectures": ["Qwen3MoeForCausalLM"], key: table}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if rope_type == "default":
        check_extras(config)
        return
    with pytest.raises(InputError, match=r"enable-fused-qk-norm-rope: where config.json scales"):
        check_extras(config)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("generator.extra_args.enable-metrics=false", "or true for an argument without one"),
        ("generator.extra_args.--page-size=2", "without dashes in front"),
        ("sampling.top_k=4", "samples with top_k = 0 alone"),
        ("eval.min_p=0.1", "samples with min_p = 0 alone"),
        ("generator.env.A=1", "generator.env is for SGLang's server"),
    ],
)
def test_what_no_engine_can_do_is_refused_at_load(override: str, words: str) -> None:
    engine = [] if "extra_args" in override else ["generator.engine=hf"]
    with pytest.raises(ConfigError, match=words):
        load_config(None, [*engine, override])
