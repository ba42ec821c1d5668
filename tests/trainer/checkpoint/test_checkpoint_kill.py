"""SIGKILL at any moment of a checkpoint: resuming finds the newest complete one."""

import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch

from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, PARTIAL, complete_checkpoints
from megatron_rl.trainer.model.policy import open_policy
from tests.distributed import RanksFailed, run_ranks
from tests.tiny_models import write_model
from tests.trainer.checkpoint.test_checkpoints import config, open_all


def fill(trainer_policy: object, value: float) -> None:
    with torch.no_grad():
        for parameter in trainer_policy.chunks[0].parameters():
            parameter.fill_(value)


def save_until_killed(cfg: Config, victim: int, delay_s: float, resumed_at: int) -> None:
    """Resume, check what was resumed, then save every step; the victim kills itself meanwhile."""
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        step = checkpoints.resume(trainer)
        assert step == trainer.steps_done == resumed_at
        values = {float(v) for p in policy.chunks[0].parameters() for v in (p.min(), p.max())}
        assert step == 0 or values == {float(step)}
        if checkpoints._control.rank == victim:
            kill = threading.Timer(delay_s, os.kill, [os.getpid(), signal.SIGKILL])
            kill.start()
        while True:
            step += 1
            fill(policy, step)
            trainer.steps_done = step
            checkpoints.save_if_due(step, trainer)


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.exhaustive)])
@pytest.mark.timeout(900)
def test_resuming_finds_the_newest_complete_checkpoint_after_a_kill(
    tmp_path: Path, kills: int
) -> None:
    write_model(tmp_path / "model", num_hidden_layers=2)
    cfg = config(tmp_path / "model", tmp_path, "checkpoint.every_steps=1", "parallel.tensor=2")
    folder = tmp_path / CHECKPOINTS
    chance = random.Random(kills)
    newest, cut_off = 0, 0
    for done in range(4 * kills):
        # Enough of them must have come amid a save.
        if done >= kills and cut_off >= kills // 2:
            break
        with pytest.raises(RanksFailed, match=f"wait status {signal.SIGKILL}"):
            run_ranks(
                save_until_killed, 2, cfg, chance.randrange(2), chance.uniform(0.1, 1.5), newest
            )
        names = {path.name for path in folder.iterdir()}
        cut_off += any(name.endswith(PARTIAL) for name in names)
        # Whatever bears the final name is complete.
        named = [int(name.removeprefix("step_")) for name in names if "." not in name]
        assert sorted(complete_checkpoints(folder)) == sorted(named)
        assert max(named, default=0) >= newest
        newest = max(named, default=0)
    assert newest > 0 and cut_off >= kills // 2
