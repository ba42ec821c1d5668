"""What was measured in tools.bench.weights, and its figures.

Shared by its processes; needs neither torch nor Megatron.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from megatron_rl.config.tree import Config
from tools.bench.measuring import over

TITLES = ("weight sync s", "transfer s", "pause s", "wire MB", "lo MB")
RAW, FLOOR, RESHARD, OVERLAP = "raw", "floor", "reshard", "overlap"
HOST, IPC, BROADCAST, DISK = "host", "ipc", "broadcast", "disk"
METHODS = (RAW, FLOOR, RESHARD, HOST, IPC, BROADCAST, DISK)
"""Names of exchanges begin with theirs."""
REPEATS_VARIABLE, METHODS_VARIABLE = "BENCH_REPEATS", "BENCH_METHODS"
LINK_VARIABLE, BARE_VARIABLE = "BENCH_LINK_BYTES_PER_S", "BENCH_BARE"


class Sample(msgspec.Struct, frozen=True):
    """One weight sync to all generators by one method."""

    method: str
    seconds: float
    transfers_s: list[float]
    """Of each generator, by its slowest rank; [] for methods that do not say."""
    pauses_s: list[float]
    wire_bytes: int
    """Payload."""
    loopback_bytes: int
    """What this host's loopback device took in meanwhile, of anybody."""
    minimum_bytes: int
    """Of the parameters of all engine ranks."""
    trainer_peak_bytes: int
    """Buffers of a trainer rank, the most of any."""
    engine_peak_bytes: int
    trainer_growth_bytes: int
    """By how much the resident memory of a trainer rank grew, the most of any."""
    stall_s: float = 0.0
    """How long trainer rank 0 waited."""


def _transfer(sample: Sample) -> float:
    """Of all generators, which are served at the same time; 0 where the method does not say."""
    return max(sample.transfers_s, default=0.0)


def _sync(sample: Sample) -> float:
    """All of it."""
    return sample.seconds


_RATIOS: tuple[tuple[str, str, str, Callable[[Sample], float]], ...] = (
    ("time_over_raw", RESHARD, RAW, _transfer),
    ("floor_over_raw", FLOOR, RAW, _transfer),
    ("time_over_floor", RESHARD, FLOOR, _transfer),
    ("sync_over_floor", RESHARD, FLOOR, _sync),
    ("sync_over_raw", RESHARD, RAW, _sync),
    ("host_time_over_raw", HOST, RAW, _transfer),
    ("ipc_time_over_raw", IPC, RAW, _transfer),
    ("broadcast_over_reshard", BROADCAST, RESHARD, _sync),
    ("disk_over_reshard", DISK, RESHARD, _sync),
)
"""(figure, method, the method it stands over, what of a weight sync): those that were measured."""


def figures(samples: Sequence[Sample], cfg: Config) -> dict[str, float]:
    """Figures of one layout."""
    by = {name: [sample for sample in samples if sample.method == name] for name in METHODS}
    reshard = by[RESHARD]
    two_buckets = 2 * cfg.weights.bucket_bytes

    ratios = {
        name: over([key(s) for s in by[top]], [key(s) for s in by[bottom]])
        for name, top, bottom, key in _RATIOS
        if by[top] and by[bottom]
    }
    pauses = [pause for sample in reshard for pause in sample.pauses_s]
    transfers = [transfer for sample in reshard for transfer in sample.transfers_s]
    trainer = max(sample.trainer_peak_bytes for sample in reshard)
    engine = max(sample.engine_peak_bytes for sample in reshard)
    return {
        "minimum_mb": reshard[0].minimum_bytes / 1e6,
        "wire_bytes_over_minimum": reshard[0].wire_bytes / reshard[0].minimum_bytes,
        "loopback_bytes_over_minimum": statistics.median(
            sample.loopback_bytes / sample.minimum_bytes for sample in reshard
        ),
        **ratios,
        "pause_ms_p50": 1e3 * statistics.median(pauses),
        "pause_overhead_ms": 1e3
        * statistics.median(p - t for p, t in zip(pauses, transfers, strict=True)),
        "peak_extra_bytes_trainer": trainer,
        "peak_extra_bytes_engine": engine,
        "trainer_over_two_buckets": trainer / two_buckets,
        "engine_over_two_buckets": engine / two_buckets,
    }


def growth(samples: Sequence[Sample], run_dir: Path) -> dict[str, float]:
    """By how much resident memory grew in a reshard, at most; the first one is left out."""
    engine = []
    for path in (run_dir / "logs").glob("*.growth-*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        sizes = [row["bytes"] for row in rows if row["name"].startswith(RESHARD)]
        engine.append(max(sizes[1:]))
    trainer = [sample.trainer_growth_bytes for sample in samples if sample.method == RESHARD]
    return {"growth_bytes_trainer": max(trainer), "growth_bytes_engine": max(engine)}


def combine(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The worst layout of each figure; medians for the pauses."""
    best_is_high = {"broadcast_over_reshard", "disk_over_reshard"}
    medians = {"pause_ms_p50", "pause_overhead_ms"}
    combined = {}
    for key in next(iter(found.values())):
        values = [each[key] for each in found.values()]
        choose = statistics.median if key in medians else min if key in best_is_high else max
        combined[key] = choose(values)
    return combined


def scaling(found: dict[int, Sequence[Sample]]) -> dict[str, dict[str, float]]:
    """Figures of weight syncs to so many replicas, by their number; medians."""
    rows: dict[str, dict[str, float]] = {}
    first = min(found)
    for replicas, samples in sorted(found.items()):
        by = {
            name: [each for each in samples if each.method == name]
            for name in (RAW, RESHARD, OVERLAP)
        }

        def middle(method: str, key: Callable[[Sample], float], by: dict = by) -> float:
            return statistics.median(key(sample) for sample in by[method])

        rows[str(replicas)] = row = {
            "sync_s": middle(RESHARD, lambda sample: sample.seconds),
            "transfer_s": middle(RESHARD, _transfer),
            "raw_transfer_s": middle(RAW, _transfer),
            "time_over_raw": over(*(list(map(_transfer, by[name])) for name in (RESHARD, RAW))),
            "overlapped_transfer_s": middle(OVERLAP, _transfer),
            "stall_ms": 1e3 * middle(OVERLAP, lambda sample: sample.stall_s),
            "stall_over_transfer": middle(OVERLAP, lambda s: s.stall_s / _transfer(s)),
            "wire_mb": by[RESHARD][0].wire_bytes / 1e6,
        }
        row["time_over_one"] = row["transfer_s"] / rows[str(first)]["transfer_s"]
        row["sync_over_one"] = row["sync_s"] / rows[str(first)]["sync_s"]
        row["raw_over_one"] = row["raw_transfer_s"] / rows[str(first)]["raw_transfer_s"]
    return rows


def against_limit(
    rows: dict[str, dict[str, float]], unlimited: dict[str, float], link_mb_s: int
) -> dict[str, dict[str, float]]:
    """Rows of `scaling` with what all links carry together, over what the senders can.

    unlimited: the row of a weight sync without limits to the links.
    """
    limit = unlimited["wire_mb"] / unlimited["transfer_s"]
    return {
        replicas: row
        | {
            "links_mb_s": int(replicas) * link_mb_s,
            "senders_limit_mb_s": limit,
            "links_over_limit": int(replicas) * link_mb_s / limit,
        }
        for replicas, row in rows.items()
    }


def show(name: str, samples: Sequence[Sample], values: dict[str, float]) -> None:
    """Print a layout's rows."""
    print(f"\n{name:12} " + " ".join(f"{title:>10}" for title in TITLES))
    measured = {sample.method for sample in samples}
    for method in (method for method in METHODS if method in measured):
        rows = [sample for sample in samples if sample.method == method]
        transfers = [_transfer(row) for row in rows]
        print(
            f"{method:12} {statistics.median(row.seconds for row in rows):10.3f} "
            f"{statistics.median(transfers):10.3f} "
            f"{statistics.median(max(row.pauses_s) for row in rows):10.3f} "
            f"{rows[0].wire_bytes / 1e6:10.1f} "
            f"{statistics.median(row.loopback_bytes for row in rows) / 1e6:10.1f}"
        )
    for key, value in values.items():
        print(f"  {key:30} {value:16.3f}", flush=True)
