"""Audits the records of a run, without the counters of its queue; used by `tools.chaos`."""

from collections import Counter
from pathlib import Path

from megatron_rl.config.files import load_run
from megatron_rl.config.staging import resolve_stages
from megatron_rl.config.tree import Config
from megatron_rl.observe.audit import spans_by_row
from megatron_rl.protocol.metrics import GROUPS_DROPPED, stream_rows
from megatron_rl.protocol.rollout_files import RolloutRecord, read_records, rollout_files


def audit(run_dir: Path) -> dict[str, int]:
    """Counts from the records alone, without the queue's own: what was lost, twice, or mislabeled.

    Groups are numbered as their prompts are drawn, also in evaluations. A number that is in no
    file was lost, unless its group was dropped without a scored rollout, or open at the end.
    """
    stages = resolve_stages(load_run(run_dir))
    trained: Counter[tuple[int, int]] = Counter()
    recorded: set[int] = set()
    dropped: set[int] = set()
    wrong = newest = 0
    for file in rollout_files(run_dir):
        for record in read_records(file.path):
            recorded.add(record.group)
            if file.is_dropped:
                dropped.add(record.group)
            elif file.step is not None:
                newest = max(newest, record.group)
                trained[record.group, record.index] += 1
                wrong += not _is_stamped_well(record, file.step, stages[record.stage])
    open_groups = max((one.queue.max_staleness + 1) * one.train.prompts_per_batch for one in stages)
    missing = set(range(newest + 1 - open_groups)) - recorded
    rows = list(stream_rows(run_dir / "metrics.jsonl"))
    counted = sum(
        value for row in rows for name, value in row.items() if name.startswith(GROUPS_DROPPED)
    )
    # A completion that is dropped alone leaves its group, which may be trained.
    dropped -= {group for group, _ in trained}
    unrecorded = max(0, int(counted) - len(dropped))
    return {
        "prompts_lost": max(0, len(missing) - unrecorded),
        "trained_twice": sum(count - 1 for count in trained.values()),
        "wrong_stamps": wrong,
        "steps": sum("train/loss" in row and row["source"] == "trainer" for row in rows),
    }


def _is_stamped_well(record: RolloutRecord, step: int, config: Config) -> bool:
    """Versions grow along a completion, and none is newer than the batch or older than allowed.

    Chats that wait at the same time have no order. config: of the record's stage.
    """
    chats = [record.versions]
    if record.row_starts:
        chats = [[span.version for span in spans] for spans in spans_by_row(record)]
    oldest = step - config.queue.max_staleness if config.queue.strict_staleness else 0
    are_within = all(max(oldest, 0) <= version <= step for version in record.versions)
    return are_within and all(versions == sorted(versions) for versions in chats)
