"""Writes a sharded state in Megatron's format "torch_dist" while the trainer continues.

Runs in trainer ranks.

| thread | does                                                           | waits for             |
|--------|----------------------------------------------------------------|-----------------------|
| main   | plans with all ranks, until two checkpoints had the same plan; | the writer, in `wait` |
|        | copies to host memory; later writes the metadata with all      | with its deadline     |
|        | ranks                                                          |                       |
| writer | one a save: writes this rank's file, syncs it, takes its digest | nothing              |

The writer touches only the copies and issues no collective. On a full disk it removes its file and
starts again when there is room. A thread rather than Megatron's forked
writers: these need a manager process that imports the program anew, and fork a process that
computes. It cannot outlive the rank: after a kill nothing still writes.
"""

import io
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.api import _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_rl.protocol.checkpoint_folder import FileRecord, record_file
from megatron_rl.protocol.disk_room import WriteFailed, os_errors_of, write_when_room


class SaveFailed(RuntimeError):
    """A rank could not write its part."""


class BackgroundSave:
    """One save in flight on this rank."""

    def __init__(
        self, state: dict[str, Any], folder: Path, plans: "SavePlans", *, limit_s: float = 0.0
    ) -> None:
        """Copy the state and start writing it to an empty folder. Collective over all ranks.

        limit_s: how long a full disk is waited for.
        """
        self._finalize, self._writer = plans.begin(state, folder)
        write = partial(self._writer.write, limit_s)
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._started = time.monotonic()
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's writer has ended, with or without an error."""
        return not self._thread.is_alive()

    @property
    def files(self) -> dict[str, FileRecord]:
        """The files that this rank wrote."""
        return self._writer.files

    @property
    def write_s(self) -> float:
        """How long this rank's writer took."""
        return self._writer.ended - self._started

    def wait(self, deadline: float) -> bool:
        """Wait for this rank's writer until time.monotonic() is `deadline`; whether it is done."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.is_written

    def finalize(self) -> None:
        """Write the metadata after all ranks have written. Collective over all ranks.

        Raises SaveFailed on every rank when one rank could not write.
        """
        try:
            for finalize in self._finalize:
                finalize()
        except CheckpointException as error:
            # Only rank 0 has the causes.
            causes = "; ".join(f"rank {rank}: {why[0]}" for rank, why in error.failures.items())
            raise SaveFailed(causes or "another rank could not write its part") from error


class SavePlans:
    """Which rank writes which part; all checkpoints of a run hold the same tensors."""

    def __init__(self) -> None:
        self._strategy = _HostCopyStrategy("torch_dist", 1)
        self._is_first = True
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # Each replica writes a part of the state that all replicas hold.
        self._shared = FullyParallelSaveStrategyWrapper(
            self._strategy, group, do_cache_distribution=True
        )

    def begin(
        self, state: dict[str, Any], folder: Path
    ) -> tuple[list[Callable[..., None]], "_HostCopyWriter"]:
        """The save's finalization, and its writer with copies. Collective over all ranks."""
        request = dist_checkpointing.save(
            state,
            str(folder),
            self._shared,
            async_sharded_save=True,
            # All ranks tell each other all their shards.
            validate_access_integrity=self._is_first,
        )
        self._is_first = False
        assert request is not None and self._strategy.writer is not None
        return request.finalize_fns, self._strategy.writer


class _HostCopyStrategy(TorchDistSaveShardedStrategy):
    """Megatron's strategy with another writer, which does not fork."""

    writer: "_HostCopyWriter | None" = None
    _cached: tuple[SavePlan | None, SavePlan | None, bool] = (None, None, False)
    """This rank's part of the global plan, its local plan, and whether all ranks may reuse them."""
    _metadata: Metadata | None = None
    """The global plan's metadata, on rank 0."""

    def async_save(
        self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path
    ) -> AsyncRequest:
        """Plan with all ranks and copy; as the overridden method of megatron-core 0.16.1 does."""
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        self.writer = _HostCopyWriter(checkpoint_dir)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        is_known = self._cached[2]
        (writer, metadata, wrapper), *plans, is_same, _ = save_state_dict_async_plan(
            mcore_to_pyt_state_dict(flat, False),
            self.writer,
            None,
            0,
            planner=planner,
            cached_ckpt_structure=self._cached,
        )
        if not is_known:
            self._metadata = metadata
            self._cached = (*plans, _on_all_ranks(is_same))
        finalize = partial(save_state_dict_async_finalize, writer, self._metadata, wrapper)
        return AsyncRequest(None, (), [finalize])


def _on_all_ranks(claim: bool) -> bool:
    """Whether the claim holds on all ranks: a rank that plans waits for the others."""
    claims = [False] * dist.get_world_size()
    dist.all_gather_object(claims, claim)
    return all(claims)


class _HostCopyWriter(FileSystemWriter):
    """torch's writer of one file a rank, which writes from copies made beforehand."""

    can_run_decentralized_global_plan = False

    def prepare_write_data(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Copy what this rank has to write to host memory."""
        self._plan = plan
        self._copies = _Copies(
            {item.index: _copy(planner.resolve_data(item)) for item in plan.items}
        )
        self._outcome: list[WriteResult] | Any = None
        self.files: dict[str, FileRecord] = {}
        self.ended = 0.0

    def write(self, limit_s: float) -> None:
        """Write the copies, once the disk has room for them.

        limit_s: how long that is waited for. `retrieve_write_results` returns the outcome, also an
        error.
        """
        path = Path(self.path)
        try:
            self._outcome = write_when_room(
                path, self._write_copies, limit_s=limit_s, undo=self._remove_files
            )
            names = {result.storage_data.relative_path for result in self._outcome}
            self.files = {name: record_file(path / name) for name in names}
        except WriteFailed as error:
            self._outcome = _wrap_exception(RuntimeError(error.fault))
        except (OSError, RuntimeError) as error:
            self._outcome = _wrap_exception(error)
        finally:
            self._copies = _Copies({})
            self.ended = time.monotonic()

    def _write_copies(self) -> list[WriteResult]:
        if not self._plan.items:
            return []
        # torch's archive writer turns a failed write into a RuntimeError.
        with os_errors_of(RuntimeError):
            return self.write_data(self._plan, self._copies).wait()

    def _remove_files(self) -> None:
        for path in Path(self.path).glob(f"{self._plan.storage_data.prefix}*"):
            path.unlink()

    def retrieve_write_results(self) -> Any:
        """The place of each written item, or the error; Megatron's finalization asks for it."""
        return self._outcome


class _Copies:
    """The part of a planner that torch's writer asks for data."""

    def __init__(self, values: dict[Any, torch.Tensor | io.BytesIO]) -> None:
        self._values = values

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The copy of an item."""
        return self._values[item.index]


def _copy(value: torch.Tensor | io.BytesIO) -> torch.Tensor | io.BytesIO:
    if isinstance(value, io.BytesIO):
        return value
    value = value.detach()
    return value.clone() if value.device.type == "cpu" else value.cpu()
