"""Which layers the trainer's model is built of on a device: TransformerEngine's or the local ones.

Used by trainer ranks, and by every command that speaks of a run before it starts. Pure, except that
`installed_flash_attention` reads package metadata.

TransformerEngine computes attention of packed sequences by cuDNN or by flash-attn. Otherwise it
pads the sequences and keeps the scores of all pairs, which no GPU holds at real lengths; with
context ranks it raises an error. The rules are those of transformer-engine 2.12.0
(dot_product_attention/utils.py: get_attention_backend, common/fused_attn/fused_attn.cpp:
nvte_get_fused_attn_backend) with the cuDNN of requirements/gpu.txt.
"""

import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megatron_rl.config.errors import InputError
from megatron_rl.config.trainer import ModelConfig

Layers = Literal["local", "transformer_engine"]
Capability = tuple[int, int]
"""CUDA compute capability: major and minor."""

# flash-attn-4, which SGLang installs, is another package, and TransformerEngine does not look for
# it. flash-attn-3 serves capability 9.0 alone, where cuDNN computes the same.
_FLASH = "flash-attn"
_NEWEST_FLASH = (2, 8, 3)
_OLDEST_FLASH = (2, 1, 1)
_OLDEST_FLASH_BLACKWELL = (2, 7, 3)
"""From capability 10.0 on."""
_OLDEST_FLASH_WINDOW = (2, 3)
_OLDEST_FLASH_DETERMINISTIC = (2, 4, 1)
_PACKED = (9, 10)
"""Major capabilities for which cuDNN computes packed sequences."""
_FLASH_WIDE = ((8, 0), (9, 0), (10, 0), (12, 0))
"""Capabilities for which flash-attn computes heads of more than 192 dimensions."""
_LATENT = (192, 128)
"""Dimensions of keys and values of DeepSeek's latent attention, which cuDNN knows by themselves."""


@dataclass(frozen=True)
class Attention:
    """Properties of a model's attention that decide which kernels compute it."""

    head_dim: int = 128
    """Dimensions of a query and a key."""
    value_dim: int = 0
    """Dimensions of a value; 0: as of a key."""
    has_window: bool = False
    has_sinks: bool = False
    is_deterministic: bool = False
    """Whether `train.deterministic` is set."""


PLAIN = Attention()


@dataclass(frozen=True)
class Device:
    """Properties of a GPU and its software that decide which layers it computes well."""

    capability: Capability
    flash_attention: str = ""
    """Installed release of flash-attn; "": none."""
    has_engine: bool = True
    """Whether TransformerEngine is installed."""


@dataclass(frozen=True)
class Choice:
    """Layers of the model, and the reason when `auto` leaves TransformerEngine's out."""

    layers: Layers
    reason: str = ""


def installed_flash_attention() -> str:
    """Release of the installed package flash-attn; "": none."""
    try:
        return importlib.metadata.version(_FLASH)
    except importlib.metadata.PackageNotFoundError:
        return ""


def choose_layers(model: ModelConfig, attention: Attention, gpu: Device | None) -> Choice:
    """The layers that the model is built of. gpu: None on a host without CUDA.

    Raises InputError for layers or FP8 that the device or its packages do not support.
    """
    if gpu is None or not gpu.has_engine:
        _refuse_without_engine(model)
        return Choice("local")
    if model.layers == "local":
        return Choice("local")
    fault = engine_fault(model.dtype, attention, gpu)
    if not fault:
        return Choice("transformer_engine")
    wanted = {"expert.model.layers": model.layers, "model.fp8": model.fp8}
    if given := {key: value for key, value in wanted.items() if value not in ("auto", "none")}:
        # Each remedy that leaves the keys alone comes before the one that changes them.
        last = {"expert.model.layers": "local", "model.fp8": "none"}
        raise InputError(
            f"{_shown(given)}: {fault}, and its other way keeps the scores of all pairs of tokens; "
            f"nearest possible: {_remedy(model, attention, gpu)}"
            f"{_shown({key: last[key] for key in given})}"
        )
    return Choice("local", fault)


def settle_layers(model: ModelConfig, attention: Attention, gpu: Device) -> tuple[ModelConfig, str]:
    """The model with "local" where `auto` takes the local layers, and a note about it.

    Raises InputError as `choose_layers` does.
    """
    choice = choose_layers(model, attention, gpu)
    layers = "local" if choice.layers == "local" else model.layers
    return model.model_copy(update={"layers": layers}), describe(choice)


def describe(choice: Choice) -> str:
    """A note about a model for which `auto` leaves TransformerEngine's layers out; "": none."""
    if not choice.reason:
        return ""
    return f"the trainer takes the local layers (expert.model.layers = 'auto'): {choice.reason}"


def _refuse_without_engine(model: ModelConfig) -> None:
    needs = "needs a CUDA device and the package transformer-engine, and one of them is missing"
    if model.layers == "transformer_engine":
        raise InputError(
            f"expert.model.layers = 'transformer_engine' {needs} here: use 'auto' or 'local'"
        )
    if model.fp8 != "none":
        raise InputError(f"model.fp8 = {model.fp8!r} {needs} here: nearest possible: 'none'")


def engine_fault(dtype: str, attention: Attention, gpu: Device) -> str:
    """Why TransformerEngine has no kernel for packed sequences of this attention; "": it has one.

    dtype: of ModelConfig.
    """
    if dtype == "float32":
        return "TransformerEngine has no attention kernel for model.dtype = 'float32'"
    if _has_cudnn_kernel(attention, gpu.capability) or _has_flash_kernel(attention, gpu):
        return ""
    shown = ".".join(map(str, gpu.capability))
    if attention.has_sinks:
        kind = "deterministic kernel" if gpu.capability[0] in _PACKED else "kernel"
        return f"TransformerEngine has no {kind} for sinks on compute capability {shown}"
    if _has_flash_kernel(attention, _with_flash(gpu)):
        found = (
            f"with {_FLASH} {gpu.flash_attention}" if gpu.flash_attention else f"without {_FLASH}"
        )
        return (
            "TransformerEngine has no attention kernel for packed sequences on compute capability "
            f"{shown} {found}"
        )
    return (
        f"TransformerEngine has no attention kernel for packed sequences with heads of "
        f"{attention.head_dim} dimensions on compute capability {shown}"
    )


def _has_cudnn_kernel(attention: Attention, capability: Capability) -> bool:
    keys, values = attention.head_dim, attention.value_dim or attention.head_dim
    if capability[0] not in _PACKED or keys % 8 or values % 8:
        return False
    if attention.has_sinks and attention.is_deterministic:
        return False
    if max(keys, values) <= 128 or (keys, values) == _LATENT:
        return True
    # Wider heads only on Hopper, where keys and values must then be alike.
    return capability == (9, 0) and max(keys, values) <= 256 and (keys == values or values < 128)


def _has_flash_kernel(attention: Attention, gpu: Device) -> bool:
    keys, values = attention.head_dim, attention.value_dim or attention.head_dim
    if not _is_taken(attention, gpu) or attention.has_sinks or keys != values or keys % 8:
        return False
    return keys <= 192 or (keys <= 256 and gpu.capability in _FLASH_WIDE)


def _is_taken(attention: Attention, gpu: Device) -> bool:
    """Whether TransformerEngine takes the installed flash-attn for this attention."""
    found = re.match(r"\d+(\.\d+)*", gpu.flash_attention)
    if found is None or gpu.capability < (8, 0):
        return False
    numbers = tuple(map(int, found[0].split(".")))
    is_blackwell = gpu.capability >= (10, 0)
    oldest = max(
        _OLDEST_FLASH_BLACKWELL if is_blackwell else _OLDEST_FLASH,
        _OLDEST_FLASH_WINDOW if attention.has_window else (),
        _OLDEST_FLASH_DETERMINISTIC if attention.is_deterministic else (),
    )
    # A local or post release is newer than its base, and so too new.
    is_base = found[0] == gpu.flash_attention
    return oldest <= numbers and (numbers < _NEWEST_FLASH or (numbers == _NEWEST_FLASH and is_base))


def _with_flash(gpu: Device) -> Device:
    return replace(gpu, flash_attention=".".join(map(str, _NEWEST_FLASH)))


def _remedy(model: ModelConfig, attention: Attention, gpu: Device) -> str:
    """A change with which TransformerEngine has a kernel, and "or"; "": none."""
    if not engine_fault(model.dtype, attention, _with_flash(gpu)):
        return f"pip install {_FLASH}=={_with_flash(gpu).flash_attention} --no-build-isolation, or "
    if not engine_fault("bfloat16", attention, gpu):
        return "model.dtype = 'bfloat16', or "
    if not engine_fault(model.dtype, replace(attention, is_deterministic=False), gpu):
        return "train.deterministic = false, or "
    return ""


def _shown(keys: Mapping[str, str]) -> str:
    return " and ".join(f"{key} = {value!r}" for key, value in keys.items())
