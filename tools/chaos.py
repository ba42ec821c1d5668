"""Kills and stops the processes of a run at random, then audits it: `python -m tools.chaos ...`.

    python -m tools.chaos --config FILE --run-dir DIR [--kills 60] [--seed 0] [section.key=value]

Every role is hit in turn: launcher, torchrun, trainer ranks, queue, generators with their engines,
verifiers with their grading processes. A hit is SIGKILL, or SIGSTOP with the share --stops: a
stopped process stays stopped until somebody kills it. When the launcher has ended, the same command
starts again, as a scheduler would do it. The last line printed is one JSON object. Exit code: 0
when the run reached its last step and the audit found nothing, else 1.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_rl.config.files import load_run
from megatron_rl.config.tree import Config
from megatron_rl.protocol.metrics import GROUPS_DROPPED, read_jsonl, stream_rows
from megatron_rl.protocol.rollout_files import RolloutRecord, read_records, rollout_files

ROLES = {
    "torchrun": "megatron_rl.trainer.torchrun",
    "rank": "megatron_rl.trainer.train",
    "queue": "megatron_rl.rollout_queue.server",
    "generator": "generation.worker",
    "verifier": "verification.worker",
}
"""Module in the command line of each role's process. A rank's has torchrun's not."""
_POLL_S = 0.2
_BAD_INPUT = 2
_STARTS = 40
"""Starts of the launcher, after which chaos gives up."""
_LEFT_S = 30.0
"""Time for the processes of an ended launcher to end."""


@dataclass
class Chaos:
    """A run that is hit again and again."""

    command: list[str]
    run_dir: Path
    kills: int
    stops: float
    """Share of hits that stop a process instead of killing it."""
    pause_s: tuple[float, float]
    """Shortest and longest pause between two hits."""
    limit_s: float
    chance: random.Random
    hits: Counter[str] = field(default_factory=Counter)
    """By role and signal."""
    starts: int = 0
    orphans: int = 0
    """Processes that outlived their launcher."""

    def run(self) -> None:
        """Until the run has ended well. Raises SystemExit at a limit."""
        ends_at = time.monotonic() + self.limit_s
        while not (self.run_dir / "summary.json").exists():
            if self.starts >= _STARTS or time.monotonic() > ends_at:
                raise SystemExit(f"the run has not ended after {self.starts} starts")
            self.starts += 1
            with (self.run_dir.parent / f"{self.run_dir.name}.out").open("ab") as out:
                launcher = subprocess.Popen(self.command, stdout=out, stderr=subprocess.STDOUT)
            self._torment(launcher, ends_at)

    def _torment(self, launcher: subprocess.Popen[bytes], ends_at: float) -> None:
        known: dict[int, psutil.Process] = {}
        hit_at = time.monotonic() + self._pause()
        while launcher.poll() is None:
            time.sleep(_POLL_S)
            known |= {one.pid: one for one in _tree(launcher.pid)}
            now = time.monotonic()
            if now > ends_at:
                launcher.kill()
            if now >= hit_at and self.hits.total() < self.kills and self._is_training():
                self._hit(launcher)
                hit_at = now + self._pause()
        self._await_end(known)
        if launcher.returncode == _BAD_INPUT:
            raise SystemExit(f"the run is refused: see {self.run_dir}.out")

    def _pause(self) -> float:
        return self.chance.uniform(*self.pause_s)

    def _is_training(self) -> bool:
        return any("train/loss" in row for row in read_jsonl(self.run_dir / "metrics.jsonl"))

    def _hit(self, launcher: subprocess.Popen[bytes]) -> None:
        """Hit a process of the role that was hit least."""
        found = dict(_processes(launcher.pid))
        if not found:
            return
        role = min(found, key=lambda name: (self._count(name), self.chance.random()))
        victim = self.chance.choice(found[role])
        stops = role != "launcher" and self.chance.random() < self.stops
        try:
            victim.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
        except psutil.NoSuchProcess:
            return
        self.hits[f"{role} {'stopped' if stops else 'killed'}"] += 1
        print(f"{self.hits.total()}: {role} {victim.pid} {'stopped' if stops else 'killed'}",
              file=sys.stderr, flush=True)  # fmt: skip

    def _count(self, role: str) -> int:
        return sum(count for name, count in self.hits.items() if name.split()[0] == role)

    def _await_end(self, known: dict[int, psutil.Process]) -> None:
        """Count what outlives the launcher, and end it."""
        _, left = psutil.wait_procs(list(known.values()), timeout=_LEFT_S)
        left = [one for one in left if one.is_running() and one.status() != "zombie"]
        self.orphans += len(left)
        for process in left:
            print(f"orphan {process.pid}: {process.cmdline()}", file=sys.stderr, flush=True)
            process.kill()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _processes(launcher: int) -> Iterator[tuple[str, list[psutil.Process]]]:
    """(role, processes), with the children of generators and verifiers as roles of their own."""
    found: defaultdict[str, list[psutil.Process]] = defaultdict(list)
    for process in _tree(launcher):
        try:
            line, parent = process.cmdline(), process.parent()
            above = parent.cmdline() if parent is not None else []
        except psutil.NoSuchProcess:
            continue
        role = _role_of(line) or (f"{below}-child" if (below := _role_of(above)) else "")
        if role:
            found[role].append(process)
    yield from found.items()
    yield "launcher", [psutil.Process(launcher)]


def _role_of(line: list[str]) -> str:
    if ROLES["torchrun"] in line:
        return "torchrun"
    return next((role for role, module in ROLES.items() if module in line), "")


def audit(run_dir: Path) -> dict[str, int]:
    """Counts from the records alone, without the queue's own: what was lost, twice, or mislabeled.

    Groups are numbered as their prompts are drawn. A number that is in no file was lost, unless its
    group was dropped without a scored rollout, or open at the end.
    """
    config = load_run(run_dir)
    trained: Counter[tuple[int, int]] = Counter()
    recorded: set[int] = set()
    wrong = newest = 0
    for file in rollout_files(run_dir):
        if file.step is None:
            continue
        for record in read_records(file.path):
            recorded.add(record.group)
            if not file.is_dropped:
                newest = max(newest, record.group)
                trained[record.group, record.index] += 1
                wrong += not _is_stamped_well(record, file.step, config)
    open_groups = (config.queue.max_staleness + 1) * config.train.prompts_per_batch
    missing = set(range(newest + 1 - open_groups)) - recorded
    rows = list(stream_rows(run_dir / "metrics.jsonl"))
    counted = sum(
        value for row in rows for name, value in row.items() if name.startswith(GROUPS_DROPPED)
    )
    unrecorded = max(0, int(counted) - len(recorded - {group for group, _ in trained}))
    return {
        "prompts_lost": max(0, len(missing) - unrecorded),
        "trained_twice": sum(count - 1 for count in trained.values()),
        "wrong_stamps": wrong,
        "steps": sum("train/loss" in row for row in rows),
    }


def _is_stamped_well(record: RolloutRecord, step: int, config: Config) -> bool:
    """Versions grow along a completion, and none is newer than the batch or older than allowed."""
    versions = list(record.versions)
    oldest = step - config.queue.max_staleness if config.queue.strict_staleness else 0
    return versions == sorted(versions) and max(oldest, 0) <= versions[0] <= versions[-1] <= step


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m tools.chaos", description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--stops", type=float, default=0.0, help="share of SIGSTOP")
    parser.add_argument("--pause-s", type=float, nargs=2, default=(5.0, 15.0))
    parser.add_argument("--limit-s", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Exit code: 0 when nothing was lost."""
    options = parse(arguments)
    run_dir = options.run_dir.resolve()
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-m", "megatron_rl.cli.main"]
    command = [*program, "run", "--config", options.config, "--run-dir", str(run_dir)]
    chaos = Chaos(
        [*command, *options.overrides], run_dir, options.kills, options.stops,
        tuple(options.pause_s), options.limit_s, random.Random(options.seed),
    )  # fmt: skip
    began = time.monotonic()
    chaos.run()
    seconds = time.monotonic() - began
    found = audit(run_dir)
    own = subprocess.run([*program, "audit", str(run_dir)], capture_output=True, text=True)
    if own.returncode:
        print(own.stdout, own.stderr, file=sys.stderr)
    summary = json.loads((run_dir / "summary.json").read_text())
    is_whole = found["steps"] == load_run(run_dir).train.steps and own.returncode == 0
    lost = found["prompts_lost"] + found["trained_twice"] + found["wrong_stamps"] + chaos.orphans
    result = found | {
        "orphans": chaos.orphans, "kills": chaos.hits.total(), "roles": dict(chaos.hits),
        "starts": chaos.starts, "wall_s": round(seconds, 1), "is_audit_clean": own.returncode == 0,
        "accuracy": summary.get("accuracy_after"), "accuracy_se": summary.get("accuracy_se_after"),
    }  # fmt: skip
    print(json.dumps(result))
    return 0 if is_whole and not lost else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(sys.argv[1:]))
