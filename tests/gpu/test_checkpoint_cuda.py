"""A trainer on CUDA goes on from a checkpoint as if it had not stopped.

A row of docs/gpu-evidence.md. One GPU is enough.
"""

from pathlib import Path

import pytest

from megatron_rl.backend.environment import DETERMINISTIC
from tests.distributed import run_ranks
from tests.tiny_models import write_model
from tests.trainer.checkpoint.test_trainer_state import config, resumed_run, saving_run
from tests.trainer.test_reference import average_config, check_second_step

pytestmark = pytest.mark.gpu


DISTRIBUTED = "parallel.distributed_optimizer=true"


def test_deterministic_steps_are_the_same_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in DETERMINISTIC.items():
        monkeypatch.setenv(name, value)
    write_model(tmp_path / "model", hidden_size=256, intermediate_size=512, vocab_size=200)
    cfg = config(tmp_path / "model", "model.dtype=bfloat16", "train.deterministic=true")
    *expected, _ = run_ranks(saving_run, 1, cfg, tmp_path / "saved", timeout_s=300)[0]
    *taken, _ = run_ranks(resumed_run, 1, cfg, tmp_path / "saved", timeout_s=300)[0]
    assert taken == expected


def test_a_step_after_a_checkpoint_of_the_average_has_all_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in DETERMINISTIC.items():
        monkeypatch.setenv(name, value)
    write_model(tmp_path / "m", hidden_size=256, intermediate_size=512, vocab_size=200)
    # The average is in host memory, in float32.
    check_second_step(average_config(tmp_path / "m"), tmp_path / "c")


@pytest.mark.parametrize("extra", [[], [DISTRIBUTED], [DISTRIBUTED, "optimizer.offload=true"]])
def test_resumed_trainer_takes_the_same_steps(tmp_path: Path, extra: list[str]) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 200}
    write_model(tmp_path / "model", **sizes)
    cfg = config(tmp_path / "model", "model.dtype=bfloat16", *extra)
    *expected, _ = run_ranks(saving_run, 1, cfg, tmp_path / "saved", timeout_s=300)[0]
    *taken, _ = run_ranks(resumed_run, 1, cfg, tmp_path / "saved", timeout_s=300)[0]
    # Kernels that sum in no fixed order differ in the last bits of bfloat16.
    for step, step_expected in zip(taken, expected, strict=True):
        assert step == pytest.approx(step_expected, rel=1e-2)
