"""Sees every operation of torch on tensors without data, and answers in the device's place.

Values that the host reads are true where they are known (`values.py`), and else 1: a step goes on
as if every gradient were finite. Each read is recorded, as it makes a CUDA rank wait.
"""

import itertools
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_rl.rehearsal.collectives import (
    KINDS,
    AwaitedWork,
    answer,
    detail_of,
    given_by,
    group_name,
    group_of,
    name_of,
)
from megatron_rl.rehearsal.events import Event, HostRead, Stack, Trace
from megatron_rl.rehearsal.host_memory import HostTensor, makes_host_wait
from megatron_rl.rehearsal.memory import Memory
from megatron_rl.rehearsal.values import KnownValues, tensors_in

STACK_FRAMES = 14
_SKIPPED = ("/torch/", "/megatron_rl/rehearsal/", "/contextlib.py", "/functools.py",
            "/threading.py", "/concurrent/futures/")  # fmt: skip
"""Frames that say nothing of where a call comes from."""
aten = torch.ops.aten


class Tracer(TorchDispatchMode):
    """Records a rank's step. device: the one whose tensors are traced."""

    def __init__(self, device: torch.device, *, answers: bool = True) -> None:
        """answers: operations have no data, and collectives no peers; False: only watch."""
        super().__init__()
        self.device = device
        self.events: list[Event] = []
        self.groups: dict[str, list[int]] = {}
        self.memory = Memory()
        self.host = Memory()
        """Of the host, as far as its tensors have no data."""
        self.flops = 0
        self.kernels: Counter[str] = Counter()
        self.phase = ""
        self.received: Callable[[Tensor], Tensor | None] = lambda tensor: None
        """Values of integers that another rank sends."""
        self.told: Callable[[Tensor], Tensor] = lambda tensor: tensor
        """Values that another rank broadcasts to a tensor of host memory."""
        self.assumed: Callable[[Any, tuple[Any, ...]], Tensor | None] = lambda func, args: None
        """Values of a result that follows from unknown ones, where a step depends on it."""
        self.selected: Callable[[Tensor], int] = lambda mask: int(mask.numel())
        """Count of elements that an unknown mask selects."""
        self._answers = answers
        self._values = KnownValues(device)
        self._stacks: dict[Stack, int] = {}
        self._reads: Counter[tuple[str, int, bool]] = Counter()
        self._copied: Counter[str] = Counter()
        self._batch = self._batches = 0
        self._pending: dict[int, AwaitedWork] = {}
        self._thread = threading.local()

    # --- what was recorded ----------------------------------------------------------------------

    @property
    def stacks(self) -> list[Stack]:
        """All stacks; events and reads have places in it."""
        return list(self._stacks)

    @property
    def reads(self) -> list[HostRead]:
        """Places where the host waited, with their counts."""
        return [HostRead(*place, count) for place, count in self._reads.items()]

    def trace(
        self, rank: int, name: str, *, microbatches: int | None, parameters: int, seconds: float
    ) -> Trace:
        """All of it; the arguments are the trace's own."""
        return Trace(
            rank=rank,
            name=name,
            groups=self.groups,
            events=self.events,
            stacks=self.stacks,
            reads=self.reads,
            peak_bytes=self.memory.peak,
            peaks=dict(self.memory.peaks),
            peak_parts=self.memory.peak_parts,
            host_bytes=self.host.peak,
            copied_bytes=dict(self._copied),
            flops=self.flops,
            kernels=dict(self.kernels),
            microbatches=microbatches,
            parameters=parameters,
            seconds=seconds,
        )

    def begin_again(self) -> None:
        """Forget what was recorded; tensors that live still count."""
        self.events.clear()
        self.kernels.clear()
        self._reads.clear()
        self._copied.clear()
        self._pending.clear()
        self.flops = self._batches = 0
        self.memory.begin_again()

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """What follows belongs to this phase."""
        before = self.phase
        self.phase = self.memory.phase = name
        try:
            yield
        finally:
            self.phase = self.memory.phase = before

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Threads that are started within are traced too; only one of them may work at a time."""
        start, run = threading.Thread.start, threading.Thread.run
        starters: dict[threading.Thread, Stack] = {}

        def begin(thread: threading.Thread) -> None:
            starters[thread] = self._frames()
            start(thread)

        def work(thread: threading.Thread) -> None:
            self._thread.starter = starters.pop(thread)
            with self:
                run(thread)

        threading.Thread.start, threading.Thread.run = begin, work  # type: ignore[method-assign]
        try:
            yield
        finally:
            threading.Thread.start, threading.Thread.run = start, run  # type: ignore[method-assign]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Sends and receives within are issued at once."""
        self._batches += 1
        self._batch = self._batches
        try:
            yield
        finally:
            self._batch = 0

    def note_waits(self, *places: int) -> None:
        """The rank waits for these sends and receives; without places: for all that it issued."""
        for place in places or tuple(self._pending):
            if self._pending.pop(place, None):
                event = self.events[place]
                self.events[place] = msgspec.structs.replace(event, waited=len(self.events))

    def know(self, tensor: Tensor, values: Tensor) -> None:
        """Values of a tensor that the host has sent."""
        self._values.set(tensor, values)

    def add_flops(self, count: int) -> None:
        """Of an operation whose shapes torch's own counter does not know."""
        self.flops += count

    def lengths(self, bounds: Tensor) -> list[int]:
        """Lengths of packed sequences, as a kernel reads them from its device."""
        known = self._values.of(bounds)
        assert known is not None, "bounds of sequences come from the host"
        return known.diff().tolist()

    # --- operations -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if not self._answers:
            result = func(*args, **kwargs)
            self._note(func, args, kwargs, result)
            return result
        if func is aten._local_scalar_dense.default and self._is_ours(args[0]):
            return self._host_value(args[0]).reshape(()).item()
        if func is aten._to_copy.default and self._is_ours(args[0]) and _goes_to_host(kwargs):
            self._copied["to host"] += args[0].nbytes
            return self._host_value(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and self._is_ours(args[1]) and not self._is_ours(args[0]):
            return self._copy_to_host(*args, **kwargs)
        if func is aten.is_pinned.default:
            return isinstance(args[0], HostTensor) and args[0].is_in_pinned_memory
        if func is aten._pin_memory.default or kwargs.get("pin_memory"):
            return self._pinned(func, args, kwargs)
        if func is aten.index_put_.default and args[2].numel() == 1:
            # CUDA fills by the mask, and does not count its places.
            return args[0]
        args = self._without_masks(func, args)
        if func is aten.masked_select.default and self._is_ours(args[1]):
            result = self._masked_select(*args)
        else:
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        if (values := self.assumed(func, args)) is not None:
            self._values.set(result, values)
        elif not any(isinstance(each, HostTensor) for each in args):
            self._values.follow(func, args, kwargs, result)
        if func in (aten._to_copy.default, aten.copy_.default):
            self._brought(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count memory, FLOPs and kernels."""
        outputs = [each for each in tensors_in(result) if self._is_ours(each)]
        for each in outputs:
            self.memory.note(each)
        for each in tensors_in(result):
            if isinstance(each, HostTensor):
                self.host.note(each.held)
        if func._overloadpacket in flop_registry and outputs:
            factors = [each for each in args if isinstance(each, Tensor)]
            self.flops += flop_registry[func._overloadpacket](*factors, out_val=result)
        if outputs and not func.is_view and "empty" not in func._schema.name:
            self.kernels[self.phase] += 1

    def _is_ours(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.device.type == self.device.type

    def _host_value(self, tensor: Tensor) -> Tensor:
        """The value that the host reads, and a record that it waits."""
        self._note_wait()
        known = self._values.of(tensor)
        if known is not None:
            return known.clone()
        return torch.ones((), dtype=tensor.dtype).expand(tensor.shape)

    def _note_wait(self) -> None:
        self._reads[self.phase, self._stack(), _is_own_code()] += 1

    def _copy_to_host(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        self._copied["to host"] += source.nbytes
        if not isinstance(target, HostTensor):
            return target.copy_(self._host_value(source))
        if makes_host_wait(target, source, is_non_blocking=non_blocking):
            self._note_wait()
        return target

    def _pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> HostTensor:
        """Pinned memory: a copy, or new."""
        if func is aten._pin_memory.default:
            held = torch.empty_like(args[0], device=self.device)
        else:
            held = func(*args, **(kwargs | {"device": self.device, "pin_memory": False}))
        self.host.note(held)
        return HostTensor(held, is_pinned=True)

    def _brought(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """Values that came from the host are known. The host may have waited for the copy."""
        is_into = func is aten.copy_.default
        source = args[1] if is_into else args[0]
        if self._is_ours(source) or not self._is_ours(result):
            return
        self._copied["to device"] += result.nbytes
        is_non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        if makes_host_wait(source, result, is_non_blocking=is_non_blocking):
            self._note_wait()
        if not isinstance(source, HostTensor):
            self._values.set(result, source.expand(result.shape))
        elif is_into:
            self._values.forget(result)

    def _without_masks(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Indexing by a known mask as indexing by numbers, whose count the host must wait for."""
        if func not in (aten.index.Tensor, aten.index_put_.default, aten.nonzero.default):
            return args
        if func is aten.nonzero.default or args[1] is None:
            return args
        found: list[Tensor | None] = []
        for each in args[1]:
            if not (isinstance(each, Tensor) and each.dtype is torch.bool and self._is_ours(each)):
                found.append(each)
                continue
            places = self._host_value(each).nonzero(as_tuple=True)
            found += [place.to(self.device) for place in places]
        return (args[0], found, *args[2:])

    def _masked_select(self, tensor: Tensor, mask: Tensor) -> Tensor:
        """What the mask selects; the host waits for the count."""
        values = self._host_value(mask)
        is_known = self._values.of(mask) is not None
        return tensor.new_empty(int(values.sum()) if is_known else self.selected(mask))

    # --- collectives ----------------------------------------------------------------------------

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        kind = KINDS.get(name := name_of(func))
        if kind is None:
            raise NotImplementedError(f"a rehearsal does not know torch's collective {name}")
        group = group_of(args)
        given = given_by(name, args)
        ranks = dist.get_process_group_ranks(group)
        is_pair = kind in ("send", "recv")
        self.issued(
            group_name(group),
            ranks,
            kind=kind,
            bytes=sum(each.numel() * each.element_size() for each in given),
            dtype="" if kind == "barrier" else str(given[0].dtype).removeprefix("torch."),
            detail=detail_of(args, kind),
            peer=ranks[args[2]] if is_pair else -1,
            batch=self._batch if is_pair else 0,
        )
        if not self._answers:
            return func(*args, **kwargs)
        if given and not self._is_ours(given[0]):
            self._follow_on_host(kind, args, group.rank())
        else:
            self._follow(kind, name, args, ranks)
        place = len(self.events) - 1
        if is_pair and not self._batch:
            self._pending[place] = AwaitedWork(lambda: self.note_waits(place))
        return answer(func, args, self._pending.get(place))

    def issued(self, group: str, ranks: list[int], **fields: Any) -> None:
        """Record that the rank has issued something. fields: the others of an Event."""
        self.groups.setdefault(group, ranks)
        moment = {"phase": self.phase, "flops": self.flops, "stack": self._stack()}
        self.events.append(Event(group=group, **moment, **fields))

    def _follow_on_host(self, kind: str, args: tuple[Any, ...], rank: int) -> None:
        """Values after a collective of host memory: other ranks hold the same as this one."""
        if kind == "all_gather":
            for outputs, given in zip(*args[:2], strict=True):
                for each in outputs:
                    each.copy_(given)
        elif kind == "broadcast" and args[2] != rank:
            [tensor] = args[0]
            tensor.copy_(self.told(tensor))

    def _follow(self, kind: str, name: str, args: tuple[Any, ...], ranks: Sequence[int]) -> None:
        """Values after a collective: other ranks hold the same as this one."""
        if kind == "recv":
            for tensor in given_by(name, args):
                values = self.received(tensor)
                self._values.forget(tensor)
                if values is not None:
                    self._values.set(tensor, values)
        elif name == "_allgather_base_":
            own = self._values.of(args[1])
            if own is None:
                self._values.forget(args[0])
            else:
                repeated = own.reshape(-1).repeat(len(ranks)).reshape(args[0].shape)
                self._values.set(args[0], repeated)
        elif kind in ("all_to_all", "reduce_scatter", "all_gather"):
            for tensor in tensors_in(args[0]):
                self._values.forget(tensor)

    def _stack(self) -> int:
        """Place of the caller's stack."""
        return self._stacks.setdefault(self._frames(), len(self._stacks))

    def _frames(self) -> Stack:
        """The caller's stack, and that of what has started the thread."""
        found = []
        for frame in itertools.islice(_callers(), STACK_FRAMES):
            short = "/".join(frame.f_code.co_filename.rsplit("/", 3)[1:])
            found.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
        return (*found, *getattr(self._thread, "starter", ()))[:STACK_FRAMES]


def _callers() -> Iterator[types.FrameType]:
    """Frames from the innermost on, without those of torch and of this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if not any(part in frame.f_code.co_filename for part in _SKIPPED):
            yield frame
        frame = frame.f_back


def _is_own_code() -> bool:
    return "site-packages" not in next(_callers()).f_code.co_filename


def _goes_to_host(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "cpu"
