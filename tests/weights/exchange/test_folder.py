"""Parcels as files: whole, or the difference to the version that an engine holds."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from megatron_rl.protocol.types import Receive
from megatron_rl.weights.exchange.engine_rank import EngineRank
from megatron_rl.weights.exchange.folder import Folder
from megatron_rl.weights.exchange.folder_transport import FolderTransport
from megatron_rl.weights.exchange.group import open_store
from megatron_rl.weights.exchange.orders import Call, Ready, Report, key
from megatron_rl.weights.exchange.parcels import outgoing
from megatron_rl.weights.exchange.plan import EngineKind, Layouts
from megatron_rl.weights.exchange.transport import FOLDER
from megatron_rl.weights.layout.place import Place, place_of
from megatron_rl.weights.layout.slices import Share
from megatron_rl.weights.layout.trainer_layout import trainer_slices
from megatron_rl.weights.sync.reshard import Sender
from tests.weights.made_up import SHAPE, allocate

CPU, LIMIT_S, SYNCER = torch.device("cpu"), 20.0, "weights-1"
WIDE = replace(SHAPE, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=4096)
TRAINERS, ENGINE_RANKS = 2, 2


@dataclass
class Play:
    """Two trainer ranks that each hold everything, and engines of two ranks, as threads."""

    url: str
    dtype: torch.dtype
    engines: dict[str, list[EngineRank]] = field(default_factory=dict)
    held: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    transports: list[FolderTransport] = field(default_factory=list)
    call: int = 0
    number: int = -1
    """Of the layouts."""

    def __post_init__(self) -> None:
        self.store = open_store("127.0.0.1", 0, is_master=True, timeout_s=LIMIT_S)
        self.lay_out(100_000)
        like = self.layouts.like
        self.slices = [
            trainer_slices(WIDE, place_of(rank, TRAINERS, like)) for rank in range(TRAINERS)
        ]
        weights = {
            name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
            for name, tensor in sorted(allocate(self.slices[0]).items())
        }
        self.weights = {name: tensor.to(self.dtype) for name, tensor in weights.items()}
        self.senders = [self._sender(rank) for rank in range(TRAINERS)]

    def lay_out(self, bucket: int) -> None:
        """Let transfers follow new layouts, with so many elements in a round."""
        like, kind = Place(Share(0, 1), Share(0, 1), Share()), EngineKind("scripted", ENGINE_RANKS)
        size = self.dtype.itemsize
        self.layouts = Layouts(WIDE, like, TRAINERS, kind, size, bucket * size, False)
        self.plan, self.number = self.layouts.plan(), self.number + 1
        self.store.set(key("layouts", self.number), msgspec.json.encode(self.layouts))

    def _sender(self, rank: int) -> Sender:
        store = open_store("127.0.0.1", self.store.port, is_master=False, timeout_s=LIMIT_S)
        transport = FolderTransport(store, rank, CPU, Folder(self.url), self.dtype, SYNCER)
        self.transports.append(transport)
        return Sender(store, transport, rank=rank, dtype=self.dtype, patience_s=LIMIT_S)

    def start(self, name: str) -> None:
        """An engine, which begins without weights."""
        slices = [self.layouts.kind.slices(WIDE, rank) for rank in range(ENGINE_RANKS)]
        held = [
            # As transformers' parameters: copies of them may not be recorded.
            {key: tensor.to(self.dtype).requires_grad_() for key, tensor in allocate(each).items()}
            for each in slices
        ]
        self.held[name] = held
        self.engines[name] = [
            EngineRank(lambda mine=mine: mine, rank, self.dtype, may_pad_ffn=False)
            for rank, mine in enumerate(held)
        ]

    def train(self, share: float) -> None:
        """A step that changes this share of all elements."""
        generator = torch.Generator().manual_seed(self.call + 5)
        for tensor in self.weights.values():
            chosen = torch.rand(tensor.shape, generator=generator) < share
            tensor[chosen] *= 1.5

    def sync(
        self, version: int, *, base: int = -1, needs_whole: bool = True, keeps: bool = True
    ) -> dict[str, list[Report]]:
        """A transfer to all engines; the order is rank 0's."""
        call, names = self.call, tuple(self.engines)
        self.call += 2
        order = Call(
            call, version, self.number, "group", names, LIMIT_S, LIMIT_S, base, needs_whole, keeps
        )
        with ThreadPoolExecutor(16) as pool:
            taking = [
                pool.submit(rank.take, self._receive(name, version, call))
                for name, ranks in self.engines.items()
                for rank in ranks
            ]
            sending = [
                pool.submit(self._send, rank, sender) for rank, sender in enumerate(self.senders)
            ]
            self.ready = {
                name: [self._read(key("ready", call, name, rank), Ready) for rank in range(2)]
                for name in names
            }
            self.store.set(key("go", call), msgspec.json.encode(order))
            for each in taking:
                each.result(LIMIT_S)
            self.store.set(key("go", call + 1), msgspec.json.encode(Call(call + 1, is_end=True)))
            for each in sending:
                each.result(LIMIT_S)
        return {
            name: [self._read(key("done", call, name, rank), Report) for rank in range(2)]
            for name in names
        }

    def _send(self, rank: int, sender: Sender) -> None:
        rounds = self.plan.of_sender(rank)
        ends = outgoing(rounds, self.weights, self.dtype, stages_all=True)
        sender.serve({self.number: ends}, {self.number: self.plan})

    def _receive(self, name: str, version: int, call: int) -> Receive:
        port = self.store.port
        return Receive(
            "127.0.0.1", port, SYNCER, name, self.number, FOLDER, call, version, LIMIT_S, self.url
        )

    def _read(self, key: str, kind: type) -> object:
        return msgspec.json.decode(self.store.get(key), type=kind)

    def is_held(self, name: str) -> bool:
        """Whether the engine's ranks hold exactly the trainer's weights."""
        [whole] = [trainer_slices(WIDE, Place())]
        at = {(each.hf, each.row, each.column): each for each in whole}
        found = []
        for rank, held in enumerate(self.held[name]):
            for each in self.layouts.kind.slices(WIDE, rank):
                source = next(
                    one for key, one in at.items()
                    if key[0] == each.hf and key[1] <= each.row < key[1] + one.rows
                    and key[2] <= each.column < key[2] + one.columns
                )  # fmt: skip
                row = each.row - source.row + source.local_row
                column = each.column - source.column + source.local_column
                wanted = _matrix(self.weights[source.local])[row:, column:]
                got = _matrix(held[each.local])[each.local_row :, each.local_column :]
                found.append(
                    torch.equal(
                        got[: each.rows, : each.columns], wanted[: each.rows, : each.columns]
                    )
                )
        assert found
        return all(found)

    def close(self) -> None:
        for ranks in self.engines.values():
            for rank in ranks:
                rank.leave()
        for transport in self.transports:
            transport.close()


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(tensor.shape[0], -1)


@contextmanager
def play(folder: Path | str, dtype: torch.dtype = torch.bfloat16) -> Iterator[Play]:
    found = Play(str(folder), dtype)
    try:
        yield found
    finally:
        found.close()


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of the files, by kind."""
    found: dict[str, int] = {}
    for path in (folder / SYNCER).iterdir():
        kind = path.suffix[1:]
        found[kind] = found.get(kind, 0) + path.stat().st_size
    return found


def is_good(reports: dict[str, list[Report]]) -> bool:
    return all(not each.error and not each.damaged for ranks in reports.values() for each in ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_that_changes_little_sends_little_whatever_the_number_of_engines(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    with play(tmp_path, dtype) as run:
        run.start("a")
        run.start("b")
        reports = run.sync(0)
        assert is_good(reports) and run.is_held("a") and run.is_held("b")
        # Each file is read by one rank of each engine.
        read = {name: sum(each.payload_bytes for each in reports[name]) for name in "ab"}
        assert read == dict.fromkeys("ab", sum(sizes(tmp_path).values()))
        assert [each.holds for each in run.ready["a"]] == [-1, -1]
        first = sizes(tmp_path)
        model = sum(tensor.nbytes for tensor in run.weights.values())
        # Both ranks of an engine hold the norms; random mantissas do not compress.
        assert list(first) == ["whole"] and 0.5 * model < first["whole"] < 1.01 * model
        for version in (1, 2):
            run.train(0.01)
            assert is_good(run.sync(version, base=version - 1, needs_whole=False))
            assert [each.holds for each in run.ready["b"]] == [version - 1] * 2
            assert run.is_held("a") and run.is_held("b")
            # The files of the version before are gone.
            later = sizes(tmp_path)
            # 1 % of the elements, each with at least a byte and its place.
            changed = 0.01 * model / dtype.itemsize
            assert list(later) == ["difference"]
            assert changed < later["difference"] < 0.1 * first["whole"]


def test_an_engine_that_comes_late_gets_whole_files_beside_the_differences(tmp_path: Path) -> None:
    with play(tmp_path) as run:
        run.start("a")
        run.sync(0)
        run.train(0.02)
        run.start("late")
        assert is_good(run.sync(1, base=0, needs_whole=True))
        assert run.is_held("a") and run.is_held("late")
        found = sizes(tmp_path)
        assert found["difference"] < 0.2 * found["whole"]


def test_engines_that_let_go_of_their_weights_get_whole_files(tmp_path: Path) -> None:
    with play(tmp_path) as run:
        run.start("a")
        for version in (0, 1):
            assert is_good(run.sync(version, keeps=False)) and run.is_held("a")
            assert list(sizes(tmp_path)) == ["whole"]
            assert not run.transports[0]._sent


def test_a_difference_to_other_parameters_than_claimed_is_damaged(tmp_path: Path) -> None:
    with play(tmp_path) as run:
        run.start("a")
        run.sync(0)
        run.train(0.02)
        with torch.no_grad():
            next(iter(run.held["a"][1].values()))[0] += 1
        reports = run.sync(1, base=0, needs_whole=False)
        assert [each.damaged > 0 for each in reports["a"]] == [False, True]
        # It claims nothing any more, and the senders hold the version themselves.
        assert is_good(run.sync(1)) and run.is_held("a")
        assert [each.holds for each in run.ready["a"]] == [1, -1]


def test_new_layouts_are_followed_from_the_next_transfer(tmp_path: Path) -> None:
    with play(tmp_path) as run:
        run.start("a")
        assert is_good(run.sync(0))
        rounds = len(run.plan.rounds)
        run.lay_out(50_000)
        assert len(run.plan.rounds) > rounds
        run.train(0.5)
        assert is_good(run.sync(1)) and run.is_held("a")


def test_a_file_that_changed_on_its_way_ends_in_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with play(tmp_path) as run:
        run.start("a")
        read = Folder.read

        def read_changed(self: Folder, name: str) -> bytes:
            content = bytearray(read(self, name))
            content[len(content) // 2] ^= 4
            return bytes(content)

        monkeypatch.setattr(Folder, "read", read_changed)
        reports = run.sync(0)
        assert all(each.error or each.damaged for each in reports["a"])
        monkeypatch.undo()
        assert is_good(run.sync(0)) and run.is_held("a")


def test_an_object_store_serves_as_a_folder(tmp_path: Path) -> None:
    """fsspec's store in this process' memory: no folder, no rename, no file."""
    with play("memory://bucket/run-1") as run:
        run.start("a")
        assert is_good(run.sync(0))
        run.train(0.02)
        assert is_good(run.sync(1, base=0, needs_whole=False)) and run.is_held("a")
        files, place = Folder(run.url)._files, f"bucket/run-1/{SYNCER}"
        assert len(files.ls(place, detail=False)) > 3
    assert files.ls(place, detail=False) == []


def test_the_files_of_earlier_syncers_go_and_nothing_else(tmp_path: Path) -> None:
    for name in ("weights-17", "weights-23", "mine", "weights-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    Folder(str(tmp_path)).remove_all()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "weights-x"]
    Folder(str(tmp_path / "absent")).remove_all()


def test_a_folder_that_cannot_be_written_fails_the_transfer_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeError, match=r"cannot write .*file/x/weights-1/0"):
        Folder(str(tmp_path / "file" / "x")).write(f"{SYNCER}/0", b"")


class UnreachableEndpoint(Exception):
    """As botocore's errors of a network, which s3fs passes on: no OSError."""


@contextmanager
def unreachable(files: Any, call: str) -> Iterator[None]:
    def fail(*args: Any, **named: Any) -> None:
        raise UnreachableEndpoint("no route")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(files), call, fail)
        yield


def test_an_engine_outlives_an_object_store_that_is_not_reached() -> None:
    with play("memory://bucket/run-2") as run:
        run.start("a")
        assert is_good(run.sync(0))
        files = Folder(run.url)._files
        with unreachable(files, "cat_file"):
            reports = run.sync(1)
        assert all("UnreachableEndpoint: no route" in each.error for each in reports["a"])
        # Files that stay fail nothing.
        with unreachable(files, "rm"):
            assert is_good(run.sync(2))
        # A transfer that failed may have overwritten a part of version 0.
        assert [each.holds for each in run.ready["a"]] == [-1, -1]
        assert is_good(run.sync(3)) and run.is_held("a")


def test_an_object_store_that_is_not_reached_fails_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = Folder("memory://bucket/run-3")
    reason = "UnreachableEndpoint: no route"
    with unreachable(folder._files, "pipe_file"), pytest.raises(RuntimeError, match=reason):
        folder.write(f"{SYNCER}/0", b"")
    with unreachable(folder._files, "ls"):
        folder.remove_all()
    assert f"old files may stay in /bucket/run-3: {reason}" in caplog.text
    with pytest.raises(RuntimeError, match="cannot open nonsense://x: ValueError: Protocol"):
        Folder("nonsense://x")
