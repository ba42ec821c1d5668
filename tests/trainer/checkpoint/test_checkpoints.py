"""Checkpoints are written in the background, one at a time, and a failure leaves the older ones."""

import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner
from safetensors.torch import load_file
from torch.distributed.checkpoint.utils import _DistWrapper

from megatron_rl.algorithms.objective import find_objective
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.tree import Config
from megatron_rl.protocol.checkpoint_folder import (
    CHECKPOINTS,
    complete_checkpoints,
    read_queue_state,
)
from megatron_rl.protocol.queue_state import PromptCursor, QueueState
from megatron_rl.protocol.stop_request import clear_stop, request_stop
from megatron_rl.protocol.wire import DeadlineExceeded
from megatron_rl.trainer.checkpoint import background_save
from megatron_rl.trainer.checkpoint.background_save import SavePlans
from megatron_rl.trainer.checkpoint.checkpoints import Checkpoints
from megatron_rl.trainer.checkpoint.trainer_state import restore
from megatron_rl.trainer.model.policy import open_policy
from megatron_rl.trainer.step import Trainer
from megatron_rl.weights.sync.control import Control
from tests.distributed import run_ranks
from tests.full_disk import fill_disk
from tests.tiny_models import PLAIN, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, num_hidden_layers=2)
    return folder


def config(model: Path, run_dir: Path, *overrides: str) -> Config:
    common = [*PLAIN, f"model.path={model}", f"run.dir={run_dir}", "model.dtype=float32"]
    return load_config(None, [*common, "checkpoint.every_steps=2", *overrides])


def state_at(step: int) -> QueueState:
    return QueueState(step, PromptCursor(step, [step], [9], 0), step, [], [])


def open_all(cfg: Config, policy: Any, last_step: int = 100) -> tuple[Trainer, Checkpoints]:
    trainer = Trainer(policy, find_objective(cfg.algorithm), cfg.optimizer, 10)
    control = Control(policy.backend.host_group(60))
    checkpoints = Checkpoints(
        cfg.checkpoint, cfg.run.dir, control, companion=state_at, last_step=last_step
    )
    return trainer, checkpoints


def planning_of_saves(cfg: Config) -> tuple[list[int], list[bool]]:
    """Collectives that plan, of each of four saves; and whether each is read back as it was."""
    plans: list[int] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            plans[-1] += 1
            return real(*args, **options)

        return call

    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        parameters = list(policy.chunks[0].parameters())
        begin = SavePlans.begin
        SavePlans.begin = lambda *args: plans.append(0) or begin(*args)
        dist.all_gather_object = counted(dist.all_gather_object)
        _DistWrapper.reduce_scatter = counted(_DistWrapper.reduce_scatter)
        is_read = []
        for step in (2, 4, 6, 8):
            for parameter in parameters:
                parameter.data.fill_(step)
            checkpoints.save_if_due(step, trainer)
            found = list(plans)
            checkpoints._await_save()
            for parameter in parameters:
                parameter.data.zero_()
            plans.append(0)
            restore(trainer, cfg.run.dir / CHECKPOINTS / f"step_{step:06}")
            is_read.append(all(bool((parameter == step).all()) for parameter in parameters))
            plans = found
    return plans, is_read


def test_the_third_checkpoint_of_a_run_is_not_planned_again(model: Path, tmp_path: Path) -> None:
    """Of four, the last two are kept, and the one that the configuration names."""
    named = tmp_path / CHECKPOINTS / "step_000002"
    distributed = ["parallel.data=2", "parallel.distributed_optimizer=true"]
    cfg = config(model, tmp_path, *distributed, f"checkpoint.resume={named}")
    for plans, is_read in run_ranks(planning_of_saves, 2, cfg):
        assert plans[0] > plans[1] > 0 and plans[2:] == [0, 0]
        assert is_read == [True] * 4
    assert [*complete_checkpoints(tmp_path / CHECKPOINTS)] == [2, 6, 8]


def reads_of_replicas(cfg: Config) -> int:
    """Bytes of tensors that this rank reads from the files of a checkpoint."""
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        with checkpoints:
            checkpoints.save_if_due(2, trainer)
        found = [0]
        real = MCoreLoadPlanner.resolve_tensor

        def resolved(self: Any, item: Any) -> torch.Tensor:
            tensor = real(self, item)
            found[0] += tensor.nbytes
            return tensor

        MCoreLoadPlanner.resolve_tensor = resolved
        restore(trainer, cfg.run.dir / CHECKPOINTS / "step_000002")
        return found[0]


def test_each_replica_reads_a_part_of_what_all_hold(model: Path, tmp_path: Path) -> None:
    alone = run_ranks(reads_of_replicas, 1, config(model, tmp_path / "one"))[0]
    both = run_ranks(reads_of_replicas, 2, config(model, tmp_path / "two", "parallel.data=2"))
    assert sum(both) == alone
    assert max(both) < 2 * min(both)


def run_of_seven_steps(cfg: Config) -> list[str]:
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy, last_step=7)
        with checkpoints:
            assert checkpoints.resume(trainer) == 0
            for step in range(1, 8):
                trainer.steps_done = step
                checkpoints.save_if_due(step, trainer)
    return sorted(path.name for path in (cfg.run.dir / CHECKPOINTS).iterdir())


def test_due_steps_and_the_last_one_are_saved_and_old_ones_go(model: Path, tmp_path: Path) -> None:
    cfg = config(model, tmp_path, "checkpoint.keep_every=4", "parallel.data=2")
    expected = ["step_000004", "step_000006", "step_000007"]
    assert run_ranks(run_of_seven_steps, 2, cfg) == [expected] * 2
    assert run_ranks(resumed, 2, cfg)[0][:2] == (7, 7)
    folder = tmp_path / CHECKPOINTS
    assert read_queue_state(folder / "step_000006") == state_at(6)
    # Both replicas wrote a part of what they hold in common.
    sizes = [(folder / "step_000007" / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert max(sizes) < 2 * min(sizes)


def saved_when_asked(cfg: Config) -> list[bool]:
    """Whether a checkpoint follows the last step but one, the last step, and the last one again."""
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy, last_step=7)
        found = []
        for step, is_asked in ((6, True), (7, False), (7, True)):
            if is_asked and dist.get_rank() == 0:
                request_stop(cfg.run.dir)
            with checkpoints:
                checkpoints.save_if_due(step, trainer)
                checkpoints.save_last_if_asked(step, trainer)
            found.append(bool(complete_checkpoints(cfg.run.dir / CHECKPOINTS)))
            # Before the other rank may ask again.
            clear_stop(cfg.run.dir)
            dist.barrier()
    return found


def test_the_last_step_is_saved_when_the_run_is_asked_to_stop(model: Path, tmp_path: Path) -> None:
    # Rank 0 alone sees the request, as on a file system that shows a file late.
    cfg = config(model, tmp_path, "checkpoint.every_steps=0", "parallel.data=2")
    assert run_ranks(saved_when_asked, 2, cfg) == [[False, False, True]] * 2


def slow_writer(cfg: Config) -> list[Any]:
    """Rank 1's writer is held back."""
    gate = threading.Event()
    write_data = background_save.FileSystemWriter.write_data

    def held_back(*args: Any) -> Any:
        gate.wait(30)
        return write_data(*args)

    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        if checkpoints._control.rank == 1:
            background_save.FileSystemWriter.write_data = held_back
        folder = cfg.run.dir / CHECKPOINTS
        with torch.no_grad():
            for parameter in policy.chunks[0].parameters():
                parameter.fill_(2.0)
        checkpoints.save_if_due(2, trainer)
        with torch.no_grad():
            for parameter in policy.chunks[0].parameters():
                parameter.fill_(3.0)
        found = []
        for step in (3, 5):
            checkpoints.save_if_due(step, trainer)
            found.append(list(complete_checkpoints(folder)))
        # Step 4 is due while step 2 is in flight: it waits until the gate opens.
        threading.Timer(1.0, gate.set).start()
        started = time.monotonic()
        checkpoints.save_if_due(4, trainer)
        waited = time.monotonic() - started
        found.append(list(complete_checkpoints(folder)))
        with checkpoints:
            pass
        found.append(list(complete_checkpoints(folder)))
    return [found, waited > 0.9]


def exporting_run(cfg: Config, first: int, last: int) -> tuple[int, list[str], float]:
    """Steps up to `last`; weights are set to the step's number before each."""
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy, last_step=8)
        checkpoints.export = partial(policy.export, cfg)
        with checkpoints:
            resumed_at = checkpoints.resume(trainer)
            for step in range(first, last + 1):
                assert checkpoints.is_due(step) == (step in (2, 3, 4, 6, 8))
                for parameter in policy.chunks[0].parameters():
                    parameter.data.fill_(step)
                checkpoints.save_if_due(step, trainer)
    folder = cfg.run.dir / "hf"
    newest = max(folder.iterdir())
    (value,) = {
        float(tensor.mean())
        for file in newest.glob("*.safetensors")
        for tensor in load_file(file).values()
    }
    return resumed_at, sorted(path.name for path in folder.iterdir()), value


def test_models_are_exported_on_the_way_thinned_and_kept_by_a_resumed_run(
    model: Path, tmp_path: Path
) -> None:
    every = ["checkpoint.export_every_steps=2", "checkpoint.every_steps=3"]
    cfg = config(model, tmp_path, *every, "checkpoint.keep_every=0", "parallel.data=2")
    (tmp_path / "hf" / "cold_start").mkdir(parents=True)
    cold = "cold_start"
    names = [cold, "step_000002", "step_000004"]
    assert run_ranks(exporting_run, 2, cfg, 1, 4) == [(0, names, 4.0)] * 2
    # It resumes after step 3, so the export of step 4 is of steps that are taken again.
    names = [cold, "step_000004", "step_000006"]
    assert run_ranks(exporting_run, 2, cfg, 4, 8) == [(3, names, 6.0)] * 2
    (tmp_path / "hf" / "step_000006").rename(tmp_path / "hf" / "step_000008")
    assert run_ranks(exporting_run, 2, cfg, 9, 8)[0][1] == [cold, "step_000004", "step_000008"]


def resumed(cfg: Config) -> tuple[int, int, set[float]]:
    """Step of the checkpoint, the optimizer's, and the values of all parameters."""
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        step = checkpoints.resume(trainer)
        values = {float(v) for p in policy.chunks[0].parameters() for v in (p.min(), p.max())}
        return step, trainer.steps_done, values


def test_training_goes_on_while_files_are_written_and_one_save_waits_for_another(
    model: Path, tmp_path: Path
) -> None:
    cfg = config(model, tmp_path, "parallel.tensor=2")
    assert run_ranks(slow_writer, 2, cfg) == [[[[], [], [2], [2, 4]], True]] * 2
    # What was trained after the copy is not in the checkpoint.
    for step, value in ((4, 3.0), (2, 2.0)):
        folder = tmp_path / CHECKPOINTS / f"step_{step:06d}"
        cfg = config(model, tmp_path, f"checkpoint.resume={folder}")
        assert run_ranks(resumed, 1, cfg) == [(step, 0, {value})]


def never_written(cfg: Config) -> str:
    background_save.FileSystemWriter.write_data = lambda *args: time.sleep(600)
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        checkpoints.save_if_due(2, trainer)
        with pytest.raises(DeadlineExceeded) as error:
            checkpoints.save_if_due(4, trainer)
        return str(error.value)


def test_a_save_that_takes_too_long_ends_the_run(model: Path, tmp_path: Path) -> None:
    cfg = config(model, tmp_path, "expert.checkpoint.write_timeout_s=0.5")
    [message] = run_ranks(never_written, 1, cfg)
    assert "step 2 was not on the disk within 0 s (expert.checkpoint.write_timeout_s)" in message


def full_disk(cfg: Config) -> list[Any]:
    """Rank 1 may not write files of more than 20 kB, from the second checkpoint on."""
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        checkpoints.save_if_due(2, trainer)
        checkpoints._await_save()
        if checkpoints._control.rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        checkpoints.save_if_due(4, trainer)
        with pytest.raises(InputError) as error:
            checkpoints._await_save()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        checkpoints._control.all(True)
        left = sorted(path.name for path in (cfg.run.dir / CHECKPOINTS).iterdir())
        checkpoints._control.all(True)
        checkpoints.save_if_due(6, trainer)
        checkpoints._await_save()
        return [str(error.value), left, list(complete_checkpoints(cfg.run.dir / CHECKPOINTS))]


def test_full_disk_is_a_clear_error_and_leaves_the_older_checkpoint(
    model: Path, tmp_path: Path
) -> None:
    outcomes = run_ranks(full_disk, 2, config(model, tmp_path, "parallel.tensor=2"))
    for message, left, afterwards in outcomes:
        assert message.startswith(f"the checkpoint of step 4 could not be written to {tmp_path}")
        assert left == ["step_000002"] and afterwards == [2, 6]
    assert "rank 1: " in outcomes[0][0] and "File too large" in outcomes[0][0]


def crowded_disk(cfg: Config) -> list[Any]:
    """The disk is full while this rank writes its part, and again before the metadata."""
    write_data, tries = background_save.FileSystemWriter.write_data, []

    def crowded(*args: Any) -> Any:
        if not tries:
            fill_disk(cfg.run.dir, left_bytes=20_000)
        tries.append(1)
        return write_data(*args)

    background_save.FileSystemWriter.write_data = crowded
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        with torch.no_grad():
            for parameter in policy.chunks[0].parameters():
                parameter.fill_(2.0)
        checkpoints.save_if_due(2, trainer)
        save, until = checkpoints._saving.save, time.monotonic() + 60
        while len(tries) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        found = [save.is_written]
        (cfg.run.dir / "filler").unlink()
        found.append(save.wait(until))
        threading.Timer(1.0, fill_disk(cfg.run.dir).unlink).start()
        started = time.monotonic()
        checkpoints._await_save()
        return [*found, time.monotonic() - started > 0.9]


def test_a_full_disk_is_waited_for_and_the_checkpoint_is_whole(
    model: Path, make_disk: Callable[[int], Path]
) -> None:
    run_dir = make_disk(40)
    cfg = config(model, run_dir)
    assert run_ranks(crowded_disk, 1, cfg) == [[False, True, True]]
    assert [path.name for path in (run_dir / CHECKPOINTS).iterdir()] == ["step_000002"]
    names = {path.name for path in (run_dir / CHECKPOINTS / "step_000002").iterdir()}
    assert ".room" not in names and "__0_0.distcp" in names
    assert run_ranks(resumed, 1, cfg) == [(2, 0, {2.0})]


def resume(cfg: Config) -> str:
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        with pytest.raises(InputError) as error:
            checkpoints.resume(trainer)
        return str(error.value)


def save_once(cfg: Config) -> None:
    with open_policy(cfg) as policy:
        trainer, checkpoints = open_all(cfg, policy)
        with checkpoints:
            checkpoints.save_if_due(2, trainer)


def test_damaged_and_foreign_checkpoints_are_refused(model: Path, tmp_path: Path) -> None:
    run_ranks(save_once, 1, config(model, tmp_path / "run"))
    write_model(tmp_path / "larger", num_hidden_layers=2, hidden_size=128)
    [message] = run_ranks(resume, 1, config(tmp_path / "larger", tmp_path / "run"))
    assert "holds another model than model.path: its hidden is 64, that of model.path is 128" in (
        message
    )
    weights = tmp_path / "run" / CHECKPOINTS / "step_000002" / "__0_0.distcp"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    for message in run_ranks(resume, 2, config(model, tmp_path / "run", "parallel.data=2")):
        assert f"{weights} is damaged" in message and "the checkpoint before it" in message
