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

`--replicas 1 2 4 8` weight syncs from two copies of the model in the trainer to so many receivers
instead, which are processes with the product's weight client and receiver and no engine, or with
`--servers` SGLang servers. `--link-mb-s N` gives each of them a link of its own of so many MB/s
(links.py), as if on hosts of their own; a weight sync to the most receivers without it says what
the senders could carry (`senders_limit_mb_s`). Figures: see `scaling` in weights_figures.py.

busy_share is what other processes took of the cores before each layout: where it is not near 0, the
times say little. A table comes first; the last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.launcher.ports import resolve_ports
from tools.bench.children import ChildFailed, run_child
from tools.bench.contention import busy_share
from tools.bench.variants import ROOT, environment
from tools.bench.weights_figures import (
    DISK,
    METHODS,
    OVERLAP,
    RAW,
    RESHARD,
    Sample,
    against_limit,
    combine,
    figures,
    growth,
    rounded,
    scaling,
    show,
)

REPEATS_VARIABLE, METHODS_VARIABLE = "BENCH_REPEATS", "BENCH_METHODS"
LINK_VARIABLE = "BENCH_LINK_BYTES_PER_S"
SERVERS, RECEIVERS = "tools.bench.weights_generator", "tools.bench.weights_receiver"
"""Programs of generators: before an SGLang server, and without one."""
RANKS_TIMEOUT_S = 900.0
END_S = 30.0
PAUSE_S = 2.0
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
    # As an exception, so that the children are ended too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    work_dir = options.work_dir or ROOT / ".cache" / "bench" / time.strftime(
        "weights-%Y%m%d-%H%M%S"
    )
    cores = sorted(os.sched_getaffinity(0))
    found: dict[str, dict[str, float]] = {}
    shares = []
    try:
        model = work_dir / "model"
        sizes = QUICK_SIZES if options.quick else SIZES
        write_model(model, sizes)
        if options.replicas:
            shares.append(busy_share(cores, PAUSE_S))
            print_scaling(scale(options, model, work_dir, repeats), shares[0], len(cores))
            return 0
        for name in options.layouts:
            shares.append(busy_share(cores, PAUSE_S))
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
        "busy_share": round(statistics.fmean(shares), 3),
        "bucket_bytes": options.bucket_mb << 20,
    }
    print(json.dumps(conditions | combine(found) | {"layouts": rounded(found)}))
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
        program = SERVERS if options.servers else RECEIVERS
        methods = (RAW, RESHARD, OVERLAP)
        return run_layout(cfg, repeats, methods, program, link_mb_s=link_mb_s)

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
    print(json.dumps({"busy_share": round(busy, 3), "cores": cores, "replicas": rows}))


def write_model(folder: Path, sizes: dict[str, Any]) -> None:
    """A random Llama as a Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)


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
    program: str = SERVERS,
    *,
    link_mb_s: int = 0,
) -> list[Sample]:
    """Start all processes of a layout and have them sync. Raises ChildFailed."""
    path = cfg.run.dir / "config.toml"
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(cfg.parallel.world_size)]
    command += ["--master-addr", cfg.ports.host, "--master-port", str(cfg.ports.torchrun)]
    command += ["-m", "tools.bench.weights_ranks", "--config", str(path)]
    variables = {REPEATS_VARIABLE: str(repeats), METHODS_VARIABLE: ",".join(methods)}
    variables[LINK_VARIABLE] = str(link_mb_s * 10**6)
    with generators(cfg, path, program):
        run_child(
            command,
            log=cfg.run.dir / "ranks.log",
            timeout_s=RANKS_TIMEOUT_S,
            environment=child_environment() | variables,
            cwd=ROOT,
        )
    return msgspec.json.decode((cfg.run.dir / "samples.json").read_bytes(), type=list[Sample])


@contextmanager
def generators(cfg: Config, path: Path, program: str) -> Iterator[None]:
    """The layout's generators, which end with the block."""
    processes = []
    try:
        for index in range(cfg.generator.replicas):
            command = [sys.executable, "-m", program]
            with (cfg.run.dir / f"generator-{index}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [*command, "--config", str(path), "--index", str(index)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=os.environ | child_environment(),
                        cwd=ROOT,
                    )
                )
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def child_environment() -> dict[str, str]:
    """One thread each, this tree's modules, and an end with the process that started them."""
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(ROOT), inherited]))
    return environment(threads=1) | {"PYTHONPATH": path, "MEGATRON_RL_LAUNCHED": "1"}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smaller model, few weight syncs")
    parser.add_argument("--repeats", type=int, help="weight syncs by each method")
    parser.add_argument(
        "--bucket-mb", type=int, default=Config().weights.bucket_bytes >> 20, help="MiB of a round"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="reshard among them"
    )
    parser.add_argument(
        "--replicas",
        type=int,
        nargs="+",
        metavar="N",
        help="instead: weight syncs to N replicas each",
    )
    parser.add_argument(
        "--link-mb-s", type=int, default=0, metavar="N", help="with --replicas: MB/s to each"
    )
    parser.add_argument("--servers", action="store_true", help="of SGLang, not bare receivers")
    parser.add_argument("--work-dir", type=Path, help="new folder for logs and samples")
    options = parser.parse_args()
    if RESHARD not in options.methods:
        parser.error("--methods: all figures are those of reshard, or beside it")
    if options.link_mb_s < 0 or (options.link_mb_s and not options.replicas):
        parser.error("--link-mb-s takes a positive number of MB/s, and goes with --replicas")
    return options


if __name__ == "__main__":
    sys.exit(main())
