"""Fills quantised models of SGLang slice by slice; a script, run without CUDA and CPU engine.

Neither being there, SGLang loads and quantises as on a GPU: no padding, no packing for the CPU. Its
Triton kernels run in Triton's interpreter. A kernel that it has for CUDA alone is written here in
torch. Prints what each case compared, as JSON.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Module

from generation.sglang_quantised import QuantisingParameters
from megatron_rl.weights.exchange.plan import Move, make_plan
from megatron_rl.weights.layout.engine_checks import check_slices
from megatron_rl.weights.layout.engine_layout import engine_slices
from megatron_rl.weights.layout.slices import Share, Slice, as_matrix
from tests.generation.layout_models import shape_of, write_model

BUCKET_BYTES = 1 << 14
CASES = {
    # Name: family, whether a GPU with FP8 (a scale per row), a seed to mix slices.
    "qwen2": ("Qwen2", True, None),
    "qwen3": ("Qwen3", True, None),
    "qwen3-mixed": ("Qwen3", True, 7),
    "llama-per-tensor": ("Llama", False, None),
    "mixtral": ("Mixtral", True, None),
    "moe": ("Qwen3Moe", True, None),
}


def open_sglang(folder: Path) -> None:
    """What SGLang needs in a process before it makes a model."""
    from sglang.kernels.ops.quantization import fp8_kernel
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.rotary_embedding import base as rotary
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(folder), device="cpu", dtype="bfloat16", quantization="fp8",
        skip_tokenizer_init=True, attention_backend="torch_native", moe_runner_backend="triton",
    )  # fmt: skip
    publish(args, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    initialize_moe_config()
    meeting = f"file://{tempfile.mkdtemp()}/ranks"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method=meeting, local_rank=0, backend="gloo"
    )
    parallel_state.initialize_model_parallel()
    initialize_dp_attention(args)
    # Else it looks for vLLM's kernel.
    rotary._is_cpu = True
    fp8_kernel.sgl_per_tensor_quant_fp8 = quantise_tensor


def quantise_tensor(values: Tensor, codes: Tensor, scale: Tensor, is_static: bool) -> None:
    """SGLang's CUDA kernel of this name, in torch: one dynamic scale."""
    assert not is_static
    scale.copy_(values.abs().max().float() / torch.finfo(codes.dtype).max)
    codes.copy_((values.float() / scale).to(codes.dtype))


def load(folder: Path) -> Module:
    """The model as SGLang's own loader fills it from the folder."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import get_model_loader

    config = ModelConfig(model_path=str(folder), dtype="bfloat16", quantization="fp8")
    loader = get_model_loader(LoadConfig(), config)
    return loader.load_model(model_config=config, device_config=DeviceConfig("cpu", gpu_id=-1))


def stored(model: Module) -> dict[str, Tensor]:
    """All tensors of a model's layers, by name."""
    return {
        f"{name}.{local}": value
        for name, module in model.named_modules()
        for local, value in {**module._parameters, **module._buffers, **vars(module)}.items()
        if isinstance(value, Tensor)
    }


def moves_to(folder: Path, parameters: QuantisingParameters, seed: int | None) -> list[Move]:
    """A plan's moves from whole tensors of the folder: layer by layer, or mixed by the seed."""
    tensors = load_file(folder / "model.safetensors")
    slices = engine_slices(shape_of(folder), Share())
    check_slices(slices, parameters)
    held = {name: as_matrix(tensor).shape for name, tensor in tensors.items()}
    senders = {0: [Slice(name, 0, 0, *size, name, 0, 0) for name, size in held.items()]}
    plan = make_plan(senders, {1: slices}, itemsize=2, bucket_bytes=BUCKET_BYTES)
    moves = [move for each in plan.rounds for parcel in each for move in parcel.moves]
    if seed is None:
        places = {part.local: place for place, part in enumerate(slices)}
        return sorted(moves, key=lambda move: places[move.target])
    order = torch.randperm(len(moves), generator=torch.Generator().manual_seed(seed))
    return [moves[place] for place in order.tolist()]


@torch.no_grad()
def fill(parameters: QuantisingParameters, folder: Path, moves: list[Move]) -> None:
    """Copy the moves into the parameters, as a receiver does."""
    tensors = load_file(folder / "model.safetensors")
    for move in moves:
        source, target = as_matrix(tensors[move.source]), as_matrix(parameters[move.target])
        part = source[move.source_row :, move.source_column :][: move.rows, : move.columns]
        target[move.target_row :, move.target_column :][: move.rows, : move.columns] = part
        parameters.arrived(move.target, move.size)
    parameters.finish()


def play(name: str, folder: Path) -> dict[str, Any]:
    """Fill a model of the old folder with the new one's weights, and compare."""
    from sglang.srt.layers.quantization import fp8
    from sglang.srt.model_loader.loader import DefaultModelLoader

    family, has_fp8, seed = CASES[name]
    fp8.cutlass_fp8_supported = lambda: has_fp8
    for seed_of_weights, which in enumerate(("old", "new")):
        model = write_model(folder / which, family=family, is_tied=False, seed=seed_of_weights)
        model.bfloat16().save_pretrained(folder / which)
    live, wanted = load(folder / "old"), load(folder / "new")
    before = {each: (held.data_ptr(), held.clone()) for each, held in stored(live).items()}
    parameters = QuantisingParameters(live)
    moves = moves_to(folder / "new", parameters, seed)
    elements: Counter[str] = Counter()
    for move in moves:
        elements[move.target] += move.size
    parameters.begin(elements)
    fill(parameters, folder / "new", moves)
    # What SGLang does at the end of a weight update.
    DefaultModelLoader.postprocess_weights(live, torch.device("cpu"))
    found, right = stored(live), stored(wanted)
    codes = [each for each, held in found.items() if held.dtype == torch.float8_e4m3fn]
    staged: Counter[str] = Counter()
    for each, tensor in parameters.items():
        # Without memory: quantised, and staged. Its layer's name is all but the last word.
        staged[each.rpartition(".")[0]] += tensor.nbytes * tensor.is_meta
    return {
        "same_names": found.keys() == right.keys() == before.keys(),
        "different": [each for each in right if not same(found[each], right[each])],
        "moved": [each for each in before if found[each].data_ptr() != before[each][0]],
        "codes": len(codes),
        "kept": [each for each in codes if same(found[each], before[each][1])],
        "layers": sorted({each.rpartition(".")[0] for each, _ in live.named_parameters()}),
        "scales": {
            each: list(held.shape) for each, held in found.items() if "weight_scale" in each
        },
        "largest_bytes": max(staged.values()),
        "all_bytes": staged.total(),
        "peak_bytes": parameters.peak_bytes,
        "left_bytes": parameters.staged_bytes,
    }


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal."""
    if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype):
        return False
    as_bytes = [each.t() if each.dim() == 2 else each for each in (one, other)]
    first, second = (each.contiguous().flatten().view(torch.uint8) for each in as_bytes)
    return torch.equal(first, second)


def main(root: Path, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each case with what it compared."""
    write_model(root / "any", family="Qwen3", is_tied=False, seed=0)
    open_sglang(root / "any")
    for name in names:
        yield name, play(name, root / name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(dict(main(Path(sys.argv[1]), sys.argv[2:]))))
