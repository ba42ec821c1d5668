"""The parameters of an SGLang engine's ranks, and what SGLang loads into them; without weights.

`python -m generation.sglang_trace` reads a Question for each engine from stdin, and answers with a
RankTrace for each of its ranks, as JSON. It imports SGLang once and forks a process for each rank.
A rank builds SGLang's own model on torch's device "meta", in groups of torch's "fake" backend, and
has SGLang load a checkpoint of tensors that have no memory either. It notes every copy into a
parameter.

No GPU is needed, and none is used. Sizes come from config.json, the server's arguments and the
rank. The codes that an FP8 layer makes when it is complete depend on the GPU, and are not seen.
"""

import multiprocessing
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from megatron_rl.protocol.process import die_with_parent
from megatron_rl.weights.layout.slices import Slice

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    # SGLang's CPU mode pads and packs weights as no GPU does.
    "SGLANG_USE_CPU_ENGINE": "0",
    # This queue of small messages between ranks waits for peers.
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
    # Our patches for speed on the CPU rearrange weights.
    "MEGATRON_RL_SGLANG_PATCHES": "needed",
}
"""Variables of the child's environment."""


class Question(msgspec.Struct, frozen=True):
    """An engine, as the child needs to know it."""

    command: list[str]
    """Arguments of the server's command line."""
    environment: dict[str, str]
    """All variables of its ranks, of which some name the model's class."""
    ranks: int
    dtype: str
    """Of the checkpoint's tensors."""
    tensors: dict[str, tuple[int, ...]]
    """Name and shape of each tensor of the checkpoint."""


class RankTrace(msgspec.Struct, frozen=True):
    """One rank of the engine."""

    parameters: dict[str, tuple[tuple[int, ...], str]]
    """Shape and dtype of each parameter that slices fill, by name; FP8 layers before the codes."""
    loaded: list[Slice]
    """SGLang's copies from the checkpoint into parameters."""
    odd: list[str]
    """Copies by SGLang that are not rectangles of a tensor, in words."""


def trace_rank(question: Question, rank: int) -> bytes:
    """Build one rank; return its RankTrace as JSON. Call it once in a process."""
    import torch

    from generation.sglang_loader import targets_of

    model = _build(question, rank)
    loaded, odd = _load(model, question)
    targets = targets_of(model)
    for name, tensor in targets.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: SGLang stores it with strides {tensor.stride()}")
    assert all(tensor.device == torch.device("meta") for tensor in targets.values())
    parameters = {name: (tuple(one.shape), _name_of(one.dtype)) for name, one in targets.items()}
    return msgspec.json.encode(RankTrace(parameters, loaded, odd))


def _build(question: Question, rank: int) -> "Module":
    """SGLang's model of one rank, on the device "meta"."""
    import torch
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(question.command)
    # The role of SGLang's other process that builds a model without a scheduler.
    publish(args, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    initialize_moe_config()
    _open_groups(question.ranks, rank)
    initialize_dp_attention(args)
    config, load_config = ModelConfig.from_server_args(args), LoadConfig()
    quantization = loader._get_quantization_config(config, load_config)
    with set_default_torch_dtype(config.dtype), torch.device("meta"):
        return loader._initialize_model(config, load_config, quantization)


def _open_groups(ranks: int, rank: int) -> None:
    """SGLang's groups of one rank whose peers do not exist."""
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.rotary_embedding import base as rotary
    from sglang.srt.layers.rotary_embedding import rope_variant
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Without a GPU it looks for vLLM's kernel. Rotary embeddings have no parameter.
    rotary._is_cpu = True
    # DeepSeek's asks for the GPU.
    rope_variant.get_device = lambda: "meta"
    new_group = dist.new_group

    def fake_group(members: list[int], backend: str = "", **options: Any) -> Any:
        # SGLang asks for gloo beside the device's backend, which would wait for peers. A group's
        # members decide the shapes of a rank, its backend none.
        options.pop("pg_options", None)
        return new_group(members, backend="fake", **options)

    dist.new_group = fake_group
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    # It would exchange handles of GPU memory with peers.
    parallel_state.set_custom_all_reduce(False)
    parallel_state.init_distributed_environment(
        world_size=ranks, rank=rank, local_rank=0, backend="fake"
    )
    parallel_state.initialize_model_parallel()


def _load(model: Any, question: Question) -> tuple[list[Slice], list[str]]:
    """Have SGLang load the checkpoint; return its copies, and those that are no rectangles."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from megatron_rl.weights.layout.engine_layout import paired

    copies: list[tuple[Tensor, Tensor]] = []
    zeroed: set[int] = set()
    joined: list[tuple[Tensor, list[Tensor]]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.ops.aten.zero_.default:
                zeroed.add(args[0].untyped_storage()._cdata)
            # SGLang also copies tensors that it made itself, of zeros.
            elif (
                function is torch.ops.aten.copy_.default
                and args[1].untyped_storage()._cdata not in zeroed
            ):
                copies.extend(_parts_of(args[0], args[1], joined))
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.cat.default:
                joined.append((result, args[0]))
            return result

    dtype = getattr(torch, question.dtype)
    checkpoint = {
        name: torch.empty(shape, dtype=dtype, device="meta")
        for name, shape in question.tensors.items()
    }
    with torch.no_grad(), Copies():
        model.load_weights(iter(checkpoint.items()))
    targets = paired(type(model).__name__, dict(model.named_parameters()))
    target_of, source_of = _finder(targets), _finder(checkpoint)
    experts_of = _expert_finder(checkpoint)
    found = [
        (target_of(part), place or source_of(source))
        for target, source in copies
        for part, place in experts_of(target, source)
    ]
    loaded, odd = [], []
    for to, of in found:
        if isinstance(to, str) or isinstance(of, str) or to[3:] != of[3:]:
            odd.append(f"{of if isinstance(of, str) else of[0]} to "
                       f"{to if isinstance(to, str) else to[0]}")  # fmt: skip
        else:
            loaded.append(Slice(*of, *to[:3]))
    return loaded, odd


def _parts_of(
    target: "Tensor", source: "Tensor", joined: "list[tuple[Tensor, list[Tensor]]]"
) -> "Iterator[tuple[Tensor, Tensor]]":
    """A copy as copies of the tensors that were joined for it, if they lie one below the other.

    joined: each result that SGLang made of tensors, and these.
    """
    for result, parts in joined:
        if source is result and all(part.shape[1:] == source.shape[1:] for part in parts):
            yield from zip(target.split([len(part) for part in parts]), parts, strict=True)
            return
    yield target, source


_FUSED = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?$")
"""Tensors of a checkpoint that hold all experts of a layer."""
_Place = tuple[str, int, int, int, int]
"""Name, first row, first column, rows and columns of a part of a tensor; see `Slice`."""


def _finder(tensors: "dict[str, Tensor]") -> "Callable[[Tensor], _Place | str]":
    """Function that says which part of which tensor a view is; in words for no rectangle."""
    # A view of a tensor without memory shares its storage all the same.
    by_storage = {one.untyped_storage()._cdata: (name, one) for name, one in tensors.items()}

    def find(view: "Tensor") -> _Place | str:
        if view.untyped_storage()._cdata not in by_storage:
            return f"a temporary tensor {list(view.shape)}"
        name, whole = by_storage[view.untyped_storage()._cdata]
        width = whole.shape[-1] if whole.dim() > 1 else 1
        rows, columns = (*view.shape, 1)[:2]
        strides = (width, 1)[: view.dim()]
        if view.dim() not in (1, 2) or (view.stride() != strides and view.numel() > 1):
            return f"{name} as {list(view.shape)} with strides {list(view.stride())}"
        row, column = divmod(view.storage_offset(), width)
        return name, row, column, rows, columns

    return find


def _expert_finder(
    checkpoint: "dict[str, Tensor]",
) -> "Callable[[Tensor, Tensor], Iterator[tuple[Tensor, _Place | None]]]":
    """Function that cuts a copy of fused experts (`fused_experts.py`) into parts of single ones.

    The function yields the parts of the target, each with the place of its source. For a copy of
    anything else it yields the target and None.
    """
    fused = {
        one.untyped_storage()._cdata: (matched, one)
        for name, one in checkpoint.items()
        if (matched := _FUSED.match(name))
    }

    def cut(target: "Tensor", source: "Tensor") -> "Iterator[tuple[Tensor, _Place | None]]":
        matched, whole = fused.get(source.untyped_storage()._cdata, (None, None))
        if matched is None or whole is None or target.dim() != whole.dim():
            yield target, None
            return
        block, part, bias = matched.groups()
        kind, words = "bias" if bias else "weight", part.split("_")
        first, rest = divmod(source.storage_offset(), whole.stride(0))
        column, row = divmod(rest, whole.shape[-1])
        # A file has outputs last, a parameter has them first.
        in_order = whole.transpose(1, -1).stride()
        if source.stride() != in_order or row % len(words):
            yield target, None
            return
        for number, one in enumerate(target):
            for place, word in enumerate(words):
                mine = one[place :: len(words)]
                name = f"{block}.{first + number}.{word}_proj.{kind}"
                yield mine, (name, row // len(words), column, *(*mine.shape, 1)[:2])

    return cut


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Entry of the child."""
    die_with_parent()
    # SGLang may print: the answer goes where stdout went, everything else to stderr.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    # Imported before the forks, which then share it.
    import sglang.srt.distributed.parallel_state
    import sglang.srt.model_loader.loader  # noqa: F401

    traces = (b"[" + b",".join(_forked(question)) + b"]" for question in questions)
    with answer:
        answer.write(b"[" + b",".join(traces) + b"]")


def _forked(question: Question) -> Iterator[bytes]:
    """The answers of all ranks, each of a process of its own; as many at once as cores."""
    lanes = len(os.sched_getaffinity(0))
    waiting: deque[_Rank] = deque()
    for rank in range(question.ranks):
        waiting.append(_start(question, rank))
        if len(waiting) == lanes:
            yield _finish(waiting.popleft())
    while waiting:
        yield _finish(waiting.popleft())


class _Rank(NamedTuple):
    process: multiprocessing.Process
    answer: Connection


def _start(question: Question, rank: int) -> _Rank:
    ours, its = multiprocessing.Pipe(duplex=False)

    def trace() -> None:
        die_with_parent()
        os.environ.clear()
        os.environ.update(question.environment)
        its.send_bytes(trace_rank(question, rank))

    # No pool: it forks from a thread, and SGLang's next import then waits for a lock forever.
    process = multiprocessing.get_context("fork").Process(target=trace)
    process.start()
    its.close()
    return _Rank(process, ours)


def _finish(rank: _Rank) -> bytes:
    """The rank's answer; ends this process if the rank failed, which has said why."""
    with rank.answer:
        try:
            answer = rank.answer.recv_bytes()
        except EOFError:
            raise SystemExit(1) from None
    rank.process.join()
    return answer


if __name__ == "__main__":
    main()
