"""Ranks that may not compile do not load torch's compiler, nor wandb; others keep both."""

import os
import subprocess
import sys

PROGRAM = """
import sys
import megatron_rl.trainer.train
import torch
print("torch._inductor.compile_fx" in sys.modules or "wandb.sdk" in sys.modules)
double = torch.compile(lambda x: 2 * x)
named = torch.compile(dynamic=True)(abs)
print(double(3), named is abs)
"""


def test_a_rank_that_may_not_compile_leaves_compiler_and_wandb_out() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "TORCHELASTIC_RUN_ID": "one"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "6", "True"], done.stderr


def test_a_process_that_may_compile_keeps_torchs_own_function() -> None:
    program = "import torch; c = torch.compile; import megatron_rl.backend.no_compiler\n"
    done = subprocess.run(
        [sys.executable, "-c", program + "print(torch.compile is c)"],
        env={k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stdout.strip() == "True", done.stderr
