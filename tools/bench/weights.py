"""Cost of a weight sync: `python -m tools.bench.weights [--quick] [--repeats N]`.

Runs the product's trainer ranks and generators on this machine, over gloo, with a random Llama of
142M float32 parameters. In each layout all methods sync in rotating order:

| method | what |
|---|---|
| raw | reshard's rounds as plain bytes, one packet per parcel; receivers discard them |
| floor | reshard's packets, digested once at each end and copied where necessary |
| reshard, ipc, folder | the product's methods, see docs/weights.md |

| figure | meaning; medians of all weight syncs, the worst of several layouts |
|---|---|
| wire_bytes_over_minimum | payload of reshard over the parameter bytes of all engine ranks |
| loopback_bytes_over_minimum | all traffic of the loopback device over the same bytes |
| time_over_raw | transfer (first receive to last digest) of reshard over raw, in the same repeat |
| sync_over_raw | whole weight sync of reshard over raw: sender digests, pause, packets |
| floor_over_raw | cost of packets, digests and copies alone |
| time_over_floor, sync_over_floor | as over raw: cost of the product's own work |
| folder_time_over_raw | transfer of folder over raw: compressed files instead of sockets |
| ipc_time_over_raw | transfer of ipc over raw: shared memory instead of sockets |
| pause_ms_p50, pause_overhead_ms | pause of a generator, with and without the transfer |
| peak_extra_bytes_* | buffers of a rank as counted by the exchange |
| growth_bytes_* | maximum growth of a rank's resident memory in a weight sync |
| *_over_two_buckets | peaks over 2 * bucket_bytes |

`--methods raw floor reshard` skips the other methods and their figures.

`--replicas 1 2 4 8` syncs from a trainer rank to N receivers instead, also by gloo's own broadcast
of the same bytes (`time_over_gloo`). Receivers run the product's weight client without an engine,
or with `--servers` an SGLang server. `--link-mb-s N` gives each connection N MB/s, as if every rank
were on its own node (`limited_links` in weights_exchanges.py). An unlimited sync to the most
receivers measures the capacity of the senders (`senders_limit_mb_s`). Figures: `scaling`.

busy_share is other processes' share of the cores before each layout: unless it is near 0, the times
say little. A table comes first; the last line is one JSON object.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from megatron_rl.config.tree import Config
from megatron_rl.launcher.ports import resolve_ports
from megatron_rl.protocol.metrics import read_jsonl
from tools.bench.children import (
    background,
    llama,
    rank_environment,
    run_ranks,
    write_job,
    write_model,
)
from tools.bench.measuring import busy_share, over, parser, run, show
from tools.bench.weights_exchanges import FLOOR, GLOO, RAW
from tools.bench.weights_peer import OVERLAP, RESHARD, Job, Sample

IPC, FOLDER = "ipc", "folder"
METHODS = (RAW, FLOOR, RESHARD, IPC, FOLDER)
RANKS_TIMEOUT_S = 900.0
# SmolLM2-135M has 9 heads in 3 groups, which two tensor ranks cannot share.
SIZES = llama(49_152, 576, 1536, 32, (12, 4))
QUICK_SIZES = llama(16_384, 576, 1536, 8, (12, 4))


class Layout(NamedTuple):
    """Sizes of the trainer and the engines."""

    tensor: int
    pipeline: int
    replicas: int
    engine_ranks: int


LAYOUTS = {
    "tp2-tp1": Layout(2, 1, 1, 1),
    "tp2pp2-tp2": Layout(2, 2, 1, 2),
    "tp2-2xtp1": Layout(2, 1, 2, 1),
}


def main() -> int:
    options = _parse()
    measure = measure_replicas if options.replicas else measure_layouts
    return run("weights", options, partial(measure, options))


def measure_layouts(
    options: argparse.Namespace, work_dir: Path, cores: list[int]
) -> dict[str, Any]:
    model, job = set_up(options, work_dir, options.methods)
    found: dict[str, dict[str, float]] = {}
    shares = []
    for name in options.layouts:
        shares.append(busy_share(cores))
        cfg = configure(LAYOUTS[name], model, work_dir / name, options.bucket_mb << 20)
        samples = run_layout(cfg, job)
        found[name] = figures(samples, cfg) | growth(samples, cfg.run.dir)
        show(name, by_method(samples))
    conditions = {
        "repeats": job.repeats,
        "busy_share": statistics.fmean(shares),
        "bucket_bytes": options.bucket_mb << 20,
    }
    return conditions | combine(found) | {"layouts": found}


def measure_replicas(
    options: argparse.Namespace, work_dir: Path, cores: list[int]
) -> dict[str, Any]:
    """Figures of weight syncs to each number of replicas."""
    model, job = set_up(options, work_dir, (RAW, GLOO, RESHARD, OVERLAP))
    busy = busy_share(cores)

    def sync(replicas: int, link_mb_s: int) -> list[Sample]:
        folder = work_dir / f"replicas-{replicas}-link-{link_mb_s}"
        layout = Layout(1, 1, replicas, 1)
        cfg = configure(layout, model, folder, options.bucket_mb << 20)
        return run_layout(cfg, replace(job, link_bytes_per_s=link_mb_s * 10**6))

    rows = scaling({replicas: sync(replicas, options.link_mb_s) for replicas in options.replicas})
    if options.link_mb_s:
        most = max(options.replicas)
        rows = against_limit(rows, scaling({most: sync(most, 0)})[str(most)], options.link_mb_s)
    show("replicas", rows)
    return {"busy_share": busy, "replicas": rows}


def set_up(options: argparse.Namespace, folder: Path, methods: Sequence[str]) -> tuple[Path, Job]:
    """The folder of a random model, and the job of the command line."""
    write_model(folder / "model", QUICK_SIZES if options.quick else SIZES)
    repeats = options.repeats or (3 if options.quick else 9)
    is_bare = bool(options.replicas) and not options.servers
    return folder / "model", Job(repeats, tuple(methods), is_bare=is_bare)


def configure(layout: Layout, model: Path, run_dir: Path, bucket_bytes: int) -> Config:
    cfg = Config.model_validate({
        "run": {"dir": run_dir},
        "model": {"path": model, "dtype": "float32"},
        "parallel": {"tensor": layout.tensor, "pipeline": layout.pipeline},
        "generator": {
            "replicas": layout.replicas, "tensor_parallel": layout.engine_ranks, "kv_tokens": 8192,
        },
        "weights": {"bucket_bytes": bucket_bytes},
    })  # fmt: skip
    return resolve_ports(cfg)


def run_layout(cfg: Config, job: Job) -> list[Sample]:
    """Sync in all processes of a layout. Raises ChildFailed."""
    folder, module = write_job(cfg, job), "tools.bench.weights_peer"
    with contextlib.ExitStack() as stack:
        for index in range(cfg.generator.replicas):
            command = [sys.executable, "-m", module, folder, "--index", index]
            log = folder / f"generator-{index}.log"
            stack.enter_context(background(command, log=log, environment=rank_environment()))
        ranks = cfg.parallel.world_size
        return run_ranks(module, folder, list[Sample], ranks=ranks, timeout_s=RANKS_TIMEOUT_S)


def _of(samples: Sequence[Sample], method: str) -> list[Sample]:
    return [sample for sample in samples if sample.method == method]


def _median(samples: Sequence[Sample], key: Callable[[Sample], float]) -> float:
    return statistics.median(map(key, samples))


def _transfer(sample: Sample) -> float:
    """Seconds of the slowest of the parallel transfers; 0 for methods without transfers_s."""
    return max(sample.transfers_s, default=0.0)


def _sync(sample: Sample) -> float:
    return sample.seconds


_RATIOS: tuple[tuple[str, str, str, Callable[[Sample], float]], ...] = (
    ("time_over_raw", RESHARD, RAW, _transfer),
    ("floor_over_raw", FLOOR, RAW, _transfer),
    ("time_over_floor", RESHARD, FLOOR, _transfer),
    ("sync_over_floor", RESHARD, FLOOR, _sync),
    ("sync_over_raw", RESHARD, RAW, _sync),
    ("folder_time_over_raw", FOLDER, RAW, _transfer),
    ("ipc_time_over_raw", IPC, RAW, _transfer),
)
"""(figure, method, method of the denominator, time of a weight sync)."""


def figures(samples: Sequence[Sample], cfg: Config) -> dict[str, float]:
    by = {name: _of(samples, name) for name in METHODS}
    reshard = by[RESHARD]
    two_buckets = 2 * cfg.weights.bucket_bytes
    ratios = {
        name: over([key(s) for s in by[top]], [key(s) for s in by[bottom]])
        for name, top, bottom, key in _RATIOS
        if by[top] and by[bottom]
    }
    pauses = [pause for sample in reshard for pause in sample.pauses_s]
    transfers = [transfer for sample in reshard for transfer in sample.transfers_s]
    stood_s = [p - t for p, t in zip(pauses, transfers, strict=True)]
    trainer = max(sample.trainer_peak_bytes for sample in reshard)
    engine = max(sample.engine_peak_bytes for sample in reshard)
    return {
        "minimum_mb": reshard[0].minimum_bytes / 1e6,
        "wire_bytes_over_minimum": reshard[0].wire_bytes / reshard[0].minimum_bytes,
        "loopback_bytes_over_minimum": _median(
            reshard, lambda sample: sample.loopback_bytes / sample.minimum_bytes
        ),
        **ratios,
        "pause_ms_p50": 1e3 * statistics.median(pauses),
        "pause_overhead_ms": 1e3 * statistics.median(stood_s),
        "peak_extra_bytes_trainer": trainer,
        "peak_extra_bytes_engine": engine,
        "trainer_over_two_buckets": trainer / two_buckets,
        "engine_over_two_buckets": engine / two_buckets,
    }


def growth(samples: Sequence[Sample], run_dir: Path) -> dict[str, float]:
    """Maximum growth of resident memory in a reshard, without the first one."""
    engine = []
    for path in (run_dir / "logs").glob("*.growth-*.jsonl"):
        sizes = [row["bytes"] for row in read_jsonl(path) if row["name"].startswith(RESHARD)]
        engine.append(max(sizes[1:]))
    trainer = max(sample.trainer_growth_bytes for sample in _of(samples, RESHARD))
    return {"growth_bytes_trainer": trainer, "growth_bytes_engine": max(engine)}


def combine(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Each figure of its worst layout; medians for pauses."""
    choices = dict.fromkeys(("pause_ms_p50", "pause_overhead_ms"), statistics.median)
    return {
        key: choices.get(key, max)([each[key] for each in found.values()])
        for key in next(iter(found.values()))
    }


def by_method(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Medians by method, for the table."""
    columns: dict[str, Callable[[Sample], float]] = {
        "sync s": _sync,
        "transfer s": _transfer,
        "pause s": lambda sample: max(sample.pauses_s),
        "wire MB": lambda sample: sample.wire_bytes / 1e6,
        "lo MB": lambda sample: sample.loopback_bytes / 1e6,
    }
    return {
        method: {title: _median(chosen, key) for title, key in columns.items()}
        for method in METHODS
        if (chosen := _of(samples, method))
    }


def scaling(found: dict[int, Sequence[Sample]]) -> dict[str, dict[str, float]]:
    """Medians by number of replicas."""
    rows: dict[str, dict[str, float]] = {}
    for replicas, samples in sorted(found.items()):
        raw, gloo, reshard, overlap = (_of(samples, name) for name in (RAW, GLOO, RESHARD, OVERLAP))
        row = {
            "sync_s": _median(reshard, _sync),
            "transfer_s": _median(reshard, _transfer),
            "raw_transfer_s": _median(raw, _transfer),
            "time_over_raw": over([*map(_transfer, reshard)], [*map(_transfer, raw)]),
            "time_over_gloo": over([*map(_transfer, reshard)], [*map(_transfer, gloo)]),
            "overlapped_transfer_s": _median(overlap, _transfer),
            "stall_ms": 1e3 * _median(overlap, lambda sample: sample.stall_s),
            "stall_over_transfer": _median(overlap, lambda s: s.stall_s / _transfer(s)),
            "wire_mb": reshard[0].wire_bytes / 1e6,
        }
        fewest = next(iter(rows.values()), row)
        for figure, name in (
            ("time_over_one", "transfer_s"), ("sync_over_one", "sync_s"),
            ("raw_over_one", "raw_transfer_s"),
        ):  # fmt: skip
            row[figure] = row[name] / fewest[name]
        rows[str(replicas)] = row
    return rows


def against_limit(
    rows: dict[str, dict[str, float]], unlimited: dict[str, float], link_mb_s: int
) -> dict[str, dict[str, float]]:
    """Rows of `scaling` with the bandwidth of all links over the senders' capacity.

    unlimited: row of a weight sync with unlimited links.
    """
    limit = unlimited["wire_mb"] / unlimited["transfer_s"]
    links = {replicas: int(replicas) * link_mb_s for replicas in rows}
    return {
        replicas: row
        | {
            "links_mb_s": links[replicas],
            "senders_limit_mb_s": limit,
            "links_over_limit": links[replicas] / limit,
        }
        for replicas, row in rows.items()
    }


def _parse() -> argparse.Namespace:
    made = parser(
        __doc__, quick="a smaller model, few weight syncs", repeats="weight syncs by each method"
    )
    made.add_argument(
        "--bucket-mb", type=int, default=Config().weights.bucket_bytes >> 20, help="MiB of a round"
    )
    made.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    made.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="reshard among them"
    )
    counts = "instead: weight syncs to N replicas each"
    made.add_argument("--replicas", type=int, nargs="+", metavar="N", help=counts)
    made.add_argument(
        "--link-mb-s", type=int, default=0, metavar="N", help="with --replicas: MB/s to each"
    )
    made.add_argument("--servers", action="store_true", help="SGLang servers, not bare receivers")
    options = made.parse_args()
    if RESHARD not in options.methods:
        made.error("--methods must include reshard: all figures are ratios to it, or its own")
    if options.link_mb_s < 0 or (options.link_mb_s and not options.replicas):
        made.error(
            f"--link-mb-s {options.link_mb_s} is not allowed: give a positive number of MB/s, and "
            "--replicas"
        )
    return options


if __name__ == "__main__":
    sys.exit(main())
