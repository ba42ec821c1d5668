"""Settings to compare: all combinations of `--sweep key=v1,v2`. Pure.

Used by `megatron-rl simulate`. A key with a dot is a configuration key; the others are:

| key                | changes                                                                    |
|--------------------|----------------------------------------------------------------------------|
| `split`            | GPUs of the trainer, out of --gpus; engines take the rest. `auto`: all     |
|                    | splits that the layout allows, at most MOST_SPLITS                         |
| `tp`               | tensor ranks of an engine on the same GPUs: replicas, max_running and the  |
|                    | KV cache follow                                                            |
| `overlap`, `verifier_servers`, `verify_s`, `dead`, `mfu` | as options of these names |

With `sampling.max_new_tokens`, generator.context_tokens follows, and train.microbatch_tokens if it
would be less.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.simulation.hardware import Assumptions, kv_tokens_of

MOST_SPLITS = 12
KV_SHARE = 0.9
"""Share of the possible KV cache that another engine layout gets."""
Load = Callable[[Sequence[str]], Config]
"""The configuration with these overrides. Raises InputError, or ConfigError."""


@dataclasses.dataclass(frozen=True)
class Variant:
    values: dict[str, str]
    """Values by swept key; empty: the unchanged configuration."""
    config: Config
    assumed: Assumptions

    @property
    def name(self) -> str:
        short = (f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())
        return ", ".join(short) or "as it is"

    @property
    def trainer_gpus(self) -> int:
        """Ranks of the trainer."""
        return self.config.parallel.world_size

    @property
    def engine_gpus(self) -> int:
        """Ranks of all engines; 0 if they are on the trainer's."""
        if self.config.generator.colocate:
            return 0
        return self.config.generator.replicas * self.config.generator.tensor_parallel


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """(key, values) of `key=v1,v2`. Raises InputError."""
    key, separator, values = text.partition("=")
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not separator or not found:
        raise InputError(f"--sweep {text!r}: expected key=value,value")
    if "." not in key and key not in _MAKERS:
        known = ", ".join(_MAKERS)
        raise InputError(f"--sweep {text!r}: give a key of the configuration, or one of {known}")
    return key, found


def make_variants(
    load: Load, sweeps: Sequence[tuple[str, list[str]]], assumed: Assumptions, gpus: int | None
) -> list[Variant]:
    """All combinations. Raises InputError."""
    base = load([])
    if base.generator.colocate and any(key == "split" for key, _ in sweeps):
        raise InputError("--sweep split: with generator.colocate engines have no GPUs of theirs")
    total = gpus or base.parallel.world_size + (
        base.generator.replicas * base.generator.tensor_parallel
    )
    lists = [
        (key, _all_splits(base, total) if (key, values) == ("split", ["auto"]) else values)
        for key, values in sweeps
    ]
    found = []
    for chosen in itertools.product(*(values for _, values in lists)):
        setting = dict(zip((key for key, _ in lists), chosen, strict=True))
        found.append(_variant(load, setting, assumed, total))
    return found


def _variant(load: Load, setting: dict[str, str], assumed: Assumptions, gpus: int) -> Variant:
    overrides: list[str] = []
    # Other keys first: a split depends on the ranks of an engine.
    for key in sorted(setting, key=lambda key: (key == "split", key == "tp")):
        value = setting[key]
        if "." in key:
            overrides.append(f"{key}={value}")
            if key == "sampling.max_new_tokens":
                overrides += _room_for(load([]), _whole(key, value))
        elif key == "split":
            overrides += _split(load(overrides), _whole(key, value), gpus)
        elif key == "tp":
            overrides += _tensor(load(overrides), _whole(key, value), assumed)
        else:
            assumed = dataclasses.replace(assumed, **_MAKERS[key](value))
    return Variant(setting, load(overrides), assumed)


def _room_for(config: Config, max_new_tokens: int) -> list[str]:
    prompt = config.generator.context_tokens - config.sampling.max_new_tokens
    context = max_new_tokens + prompt
    microbatch = max(config.train.microbatch_tokens, context)
    return [f"generator.context_tokens={context}", f"train.microbatch_tokens={microbatch}"]


def _replica_gpus(config: Config) -> int:
    return config.parallel.world_size // config.parallel.data


def _split(config: Config, trainer: int, gpus: int) -> list[str]:
    replica, ranks = _replica_gpus(config), config.generator.tensor_parallel
    engines = (gpus - trainer) // ranks
    if trainer % replica or trainer < replica or engines < 1:
        raise InputError(
            f"split={trainer} of {gpus} GPUs is not possible: a data-parallel replica of the "
            f"trainer takes {replica}, an engine {ranks}"
        )
    return [f"parallel.data={trainer // replica}", f"generator.replicas={engines}"]


def _all_splits(config: Config, gpus: int) -> list[str]:
    """Trainer GPUs of the possible splits without idle GPUs, thinned evenly."""
    replica, ranks = _replica_gpus(config), config.generator.tensor_parallel
    parallel = config.parallel
    splits = []
    for trainer in range(replica, gpus - ranks + 1, replica):
        experts = parallel.expert * parallel.expert_tensor * parallel.pipeline
        if (gpus - trainer) % ranks == 0 and trainer % experts == 0:
            splits.append(trainer)
    if not splits:
        raise InputError(
            f"--gpus {gpus}: no split is possible; a data-parallel replica of the trainer takes "
            f"{replica}, an engine {ranks}"
        )
    if len(splits) > MOST_SPLITS:
        step = (len(splits) - 1) / (MOST_SPLITS - 1)
        splits = sorted({splits[round(i * step)] for i in range(MOST_SPLITS)})
    return [str(trainer) for trainer in splits]


def _tensor(config: Config, ranks: int, assumed: Assumptions) -> list[str]:
    generator = config.generator
    gpus = generator.replicas * generator.tensor_parallel
    if ranks < 1 or gpus % ranks:
        raise InputError(f"tp={ranks} does not divide the {gpus} GPUs of the engines")
    changed = generator.model_copy(update={"tensor_parallel": ranks})
    room = kv_tokens_of(config.model_copy(update={"generator": changed}), assumed)
    if room * KV_SHARE < generator.context_tokens:
        raise InputError(
            f"tp={ranks}: the KV cache would hold {room} tokens, less than "
            f"generator.context_tokens={generator.context_tokens}"
        )
    running = max(1, generator.max_running * ranks // generator.tensor_parallel)
    return [
        f"generator.tensor_parallel={ranks}",
        f"generator.replicas={gpus // ranks}",
        f"generator.max_running={running}",
        f"generator.kv_tokens={int(room * KV_SHARE)}",
    ]


def _whole(key: str, value: str) -> int:
    if not value.isdigit() or not int(value):
        raise InputError(f"{key}={value!r}: give a whole number above 0")
    return int(value)


def _positive(key: str, value: str) -> float:
    try:
        found = float(value)
    except ValueError as error:
        raise InputError(f"{key}={value!r} is no number") from error
    if not 0 < found < float("inf"):
        raise InputError(f"{key}={value!r}: give a number above 0")
    return found


def _is_true(value: str) -> bool:
    if value not in ("true", "false"):
        raise InputError(f"overlap={value!r}: give true or false")
    return value == "true"


_MAKERS: dict[str, Callable[[str], dict[str, object]]] = {
    "split": lambda value: {},
    "tp": lambda value: {},
    "overlap": lambda value: {"is_overlapped": _is_true(value)},
    "verifier_servers": lambda value: {"verifier_servers": _whole("verifier_servers", value)},
    "verify_s": lambda value: {"verify_s": _positive("verify_s", value)},
    "dead": lambda value: {"dead": 0 if value == "0" else _whole("dead", value)},
    "mfu": lambda value: {"mfu": _positive("mfu", value)},
}
