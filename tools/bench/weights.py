"""What syncing weights costs: `python -m tools.bench.weights [--quick] [--repeats N]`.

Trainer ranks and generators of the product on this host, over gloo, with a random Llama of 142M
float32 parameters. In each layout all methods sync in turn, in an order that rotates:

| method | what |
|---|---|
| raw | reshard's rounds as plain bytes, one packet a parcel, that the receivers throw away |
| floor | reshard's very packets, each digested once at either end and copied where it must be |
| reshard, host, ipc, broadcast, disk | the product's, see docs/weights.md |

| figure | what; medians of all weight syncs, the worst layout where there are several |
|---|---|
| wire_bytes_over_minimum | payload of reshard over the bytes of all engine ranks' parameters |
| loopback_bytes_over_minimum | the same of all that passed the loopback device meanwhile |
| time_over_raw | transfer of reshard over raw's beside it: first receive to last digest |
| sync_over_raw | the same of whole weight syncs: digests at the senders, pause, all packets |
| floor_over_raw | what packets, digests and copies cost by themselves |
| time_over_floor, sync_over_floor | as over raw: what is left to the product's own work |
| host_time_over_raw | the same of host: all packets by way of buffers at both ends |
| ipc_time_over_raw | the same of ipc: memory that both ends share instead of sockets |
| broadcast_over_reshard, disk_over_reshard | whole weight syncs |
| pause_ms_p50, pause_overhead_ms | how long a generator stood still; without the transfer |
| peak_extra_bytes_* | buffers of a rank as the exchange counts them |
| growth_bytes_* | by how much a rank's resident memory grew during a weight sync, at most |
| *_over_two_buckets | peaks over 2 * bucket_bytes |

`--methods raw floor reshard` leaves the others out, and the figures that compare with them.

`--replicas 1 2 4 8` weight syncs from two copies of the model in the trainer to N receivers
instead. They run the product's weight client and receiver without an engine, or with `--servers` an
SGLang server. `--link-mb-s N` gives each receiver a link of N MB/s, as if on its own node
(`limited_links` in weights_exchanges.py). One weight sync to the most receivers without the limit
says what the senders could carry (`senders_limit_mb_s`). Figures: `scaling` in weights_figures.py.

busy_share is what other processes took of the cores before each layout: where it is not near 0, the
times say little. A table comes first; the last line is one JSON object.
"""

import argparse
import contextlib
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.launcher.ports import resolve_ports
from tools.bench.children import ChildFailed, background, rank_environment, torchrun, write_model
from tools.bench.measuring import begin, busy_share, parser, report
from tools.bench.weights_figures import (
    BARE_VARIABLE,
    DISK,
    LINK_VARIABLE,
    METHODS,
    METHODS_VARIABLE,
    OVERLAP,
    RAW,
    REPEATS_VARIABLE,
    RESHARD,
    Sample,
    against_limit,
    combine,
    figures,
    growth,
    scaling,
    show,
)

RANKS_TIMEOUT_S = 900.0
SIZES = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 32,
    # SmolLM2-135M has 9 and 3 of 64, which two tensor ranks cannot share.
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
QUICK_SIZES = SIZES | {"vocab_size": 16_384, "num_hidden_layers": 8}


class Case(NamedTuple):
    """Trainer ranks and engines."""

    tensor: int
    pipeline: int
    replicas: int
    engine_ranks: int
    data: int = 1


LAYOUTS = {
    "tp2-tp1": Case(2, 1, 1, 1),
    "tp2pp2-tp2": Case(2, 2, 1, 2),
    "tp2-2xtp1": Case(2, 1, 2, 1),
}


def main() -> int:
    """Command line."""
    options = _parse()
    repeats = options.repeats or (3 if options.quick else 9)
    work_dir, cores = begin("weights", options.work_dir)
    found: dict[str, dict[str, float]] = {}
    shares = []
    try:
        model = work_dir / "model"
        write_model(model, QUICK_SIZES if options.quick else SIZES)
        if options.replicas:
            shares.append(busy_share(cores))
            print_scaling(scale(options, model, work_dir, repeats), shares[0], len(cores))
            return 0
        for name in options.layouts:
            shares.append(busy_share(cores))
            cfg = configure(LAYOUTS[name], model, work_dir / name, options.bucket_mb << 20)
            samples = run_layout(cfg, repeats, options.methods)
            found[name] = figures(samples, cfg) | growth(samples, cfg.run.dir)
            show(name, samples, found[name])
            if DISK in options.methods:
                shutil.rmtree(cfg.run.dir / "weights")
    except (ChildFailed, OSError) as error:
        print(f"{error}\nall logs: {work_dir}", file=sys.stderr)
        return 1
    conditions = {
        "mode": "quick" if options.quick else "full",
        "repeats": repeats,
        "cores": len(cores),
        "busy_share": statistics.fmean(shares),
        "bucket_bytes": options.bucket_mb << 20,
    }
    report(conditions | combine(found) | {"layouts": found})
    return 0


def scale(
    options: argparse.Namespace, model: Path, work_dir: Path, repeats: int
) -> dict[str, dict[str, float]]:
    """Figures of weight syncs from two copies of the model to so many replicas."""

    def run(replicas: int, link_mb_s: int) -> list[Sample]:
        cfg = configure(
            Case(1, 1, replicas, 1, data=2),
            model,
            work_dir / f"replicas-{replicas}-link-{link_mb_s}",
            options.bucket_mb << 20,
        )
        methods = (RAW, RESHARD, OVERLAP)
        return run_layout(cfg, repeats, methods, is_bare=not options.servers, link_mb_s=link_mb_s)

    rows = scaling({replicas: run(replicas, options.link_mb_s) for replicas in options.replicas})
    if options.link_mb_s:
        most = max(options.replicas)
        rows = against_limit(rows, scaling({most: run(most, 0)})[str(most)], options.link_mb_s)
    return rows


def print_scaling(rows: dict[str, dict[str, float]], busy: float, cores: int) -> None:
    """A table, and a JSON object as the last line."""
    titles = list(next(iter(rows.values())))
    print(f"{'replicas':>22} " + " ".join(f"{number:>8}" for number in rows))
    for title in titles:
        print(f"{title:>22} " + " ".join(f"{row[title]:8.3f}" for row in rows.values()))
    report({"busy_share": busy, "cores": cores, "replicas": rows})


def configure(layout: Case, model: Path, run_dir: Path, bucket_bytes: int) -> Config:
    """A run of this layout, written to RUN_DIR/config.toml."""
    cfg = Config.model_validate(
        {
            "run": {"dir": run_dir},
            "model": {"path": model, "dtype": "float32"},
            "parallel": {
                "tensor": layout.tensor,
                "pipeline": layout.pipeline,
                "data": layout.data,
            },
            "generator": {
                "replicas": layout.replicas,
                "tensor_parallel": layout.engine_ranks,
                "kv_tokens": 8192,
            },
            "weights": {"bucket_bytes": bucket_bytes},
        }
    )
    cfg = resolve_ports(cfg)
    run_dir.mkdir(parents=True)
    (run_dir / "config.toml").write_text(dump_toml(cfg))
    return cfg


def run_layout(
    cfg: Config,
    repeats: int,
    methods: Sequence[str] = METHODS,
    *,
    is_bare: bool = False,
    link_mb_s: int = 0,
) -> list[Sample]:
    """Start all processes of a layout and have them sync. Raises ChildFailed."""
    arguments = ["--config", cfg.run.dir / "config.toml"]
    environment = rank_environment() | {
        REPEATS_VARIABLE: str(repeats),
        METHODS_VARIABLE: ",".join(methods),
        LINK_VARIABLE: str(link_mb_s * 10**6),
        BARE_VARIABLE: str(int(is_bare)),
    }
    program = [sys.executable, "-m", "tools.bench.weights_generator", *arguments, "--index"]
    with contextlib.ExitStack() as stack:
        for index in range(cfg.generator.replicas):
            log = cfg.run.dir / f"generator-{index}.log"
            stack.enter_context(background([*program, index], log=log, environment=environment))
        torchrun(
            "tools.bench.weights_ranks",
            arguments,
            ranks=cfg.parallel.world_size,
            log=cfg.run.dir / "ranks.log",
            timeout_s=RANKS_TIMEOUT_S,
            environment=environment,
        )
    return msgspec.json.decode((cfg.run.dir / "samples.json").read_bytes(), type=list[Sample])


def _parse() -> argparse.Namespace:
    made = parser(__doc__, quick="a smaller model, few weight syncs")
    made.add_argument("--repeats", type=int, help="weight syncs by each method")
    made.add_argument(
        "--bucket-mb", type=int, default=Config().weights.bucket_bytes >> 20, help="MiB of a round"
    )
    made.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    made.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="reshard among them"
    )
    made.add_argument(
        "--replicas",
        type=int,
        nargs="+",
        metavar="N",
        help="instead: weight syncs to N replicas each",
    )
    made.add_argument(
        "--link-mb-s", type=int, default=0, metavar="N", help="with --replicas: MB/s to each"
    )
    made.add_argument("--servers", action="store_true", help="of SGLang, not bare receivers")
    made.add_argument("--work-dir", type=Path, help="new folder for logs and samples")
    options = made.parse_args()
    if RESHARD not in options.methods:
        made.error("--methods: all figures are those of reshard, or beside it")
    if options.link_mb_s < 0 or (options.link_mb_s and not options.replicas):
        made.error("--link-mb-s takes a positive number of MB/s, and goes with --replicas")
    return options


if __name__ == "__main__":
    sys.exit(main())
