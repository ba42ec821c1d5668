"""Kills and stops the processes of a run at random, then audits it: `python -m tools.chaos ...`.

    python -m tools.chaos --config FILE --run-dir DIR [--kills 60] [--seed 0] [section.key=value]

Each hit is for the role that was hit least: launcher, torchrun, trainer ranks, queue, generators
with their engines, verifiers with their grading processes. A hit is SIGKILL or, with the share
--stops, SIGSTOP for --stop-s, longer than every patience of the run. When the launcher has ended,
the same command starts again at once, as a scheduler would do it. --join has another node with a
generator and a verifier join the run, again and again. --kills 0 gives the run to compare with: its
last line, in a file, is --without. The last line printed is one JSON object. Exit code: 0 when the
run reached its last step after all hits and the audit found nothing, else 1.
"""

import argparse
import contextlib
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
from megatron_rl.observe.heartbeat import find_living
from megatron_rl.protocol.metrics import read_jsonl
from tools.chaos_audit import audit

ROLES = {
    "torchrun": "megatron_rl.trainer.torchrun",
    "rank": "megatron_rl.trainer.train",
    "queue": "megatron_rl.rollout_queue.server",
    "generator": "generation.worker",
    "verifier": "verification.worker",
}
"""Module in the command line of each role's process. A rank's has torchrun's not."""
PROGRAM = [sys.executable, "-m", "megatron_rl.cli.main"]
_POLL_S = 0.2
_LEFT_S = 40.0
"""Time for the processes of an ended launcher to end. Above the silence that ends a joined node."""
_END_S = 20.0
"""Time for a launcher to end after SIGTERM."""


class GaveUp(Exception):
    """A limit is reached."""


@dataclass(frozen=True)
class Plan:
    """Commands, and which hits when."""

    run: list[str]
    join: list[str]
    """Empty: no node joins."""
    run_dir: Path
    kills: int
    stops: float
    """Share of hits that stop a process instead of killing it."""
    stop_s: float
    """Seconds until a stopped process continues, if nobody has killed it."""
    pause_s: tuple[float, float]
    """Shortest and longest pause between two hits."""
    limit_s: float
    starts: int
    """Starts of the launcher, after which chaos gives up; joined nodes have as many."""


@dataclass
class Chaos:
    """A run that is hit again and again."""

    plan: Plan
    chance: random.Random
    hits: Counter[str] = field(default_factory=Counter)
    """By role and signal."""
    starts: int = 0
    joins: int = 0
    orphans: int = 0
    """Processes that outlived their launcher."""
    outlived: Counter[str] = field(default_factory=Counter)
    """Stops, by role, after which nobody had killed the process."""
    _stopped: list[tuple[float, str, psutil.Process]] = field(default_factory=list)
    """time.monotonic() at which the process continues, its role."""
    _known: dict[psutil.Process, float | None] = field(default_factory=dict)
    """Every process of the run -> time.monotonic() since when no launcher is above it."""
    _seen: set[str] = field(default_factory=set)
    """Roles that had a process at the moment of a hit."""
    _hit_at: float = 0.0

    def run(self) -> None:
        """Until the run has ended well. Raises GaveUp at a limit."""
        ends_at = time.monotonic() + self.plan.limit_s
        launchers: dict[str, subprocess.Popen[bytes]] = {}
        try:
            while not (self.plan.run_dir / "summary.json").exists():
                self.starts += 1
                if self.starts > self.plan.starts:
                    raise GaveUp(f"the run has not ended after {self.plan.starts} starts")
                launchers["launcher"] = self._launch(self.plan.run)
                self._rest()
                self._torment(launchers, ends_at)
            self._await_end(list(launchers.values()))
        finally:
            self._end(list(launchers.values()))

    def _launch(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.plan.run_dir.parent / f"{self.plan.run_dir.name}.out").open("ab") as out:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    def _torment(self, launchers: dict[str, subprocess.Popen[bytes]], ends_at: float) -> None:
        """Until the launcher of the first node has ended."""
        while launchers["launcher"].poll() is None:
            time.sleep(_POLL_S)
            if time.monotonic() > ends_at:
                raise GaveUp(f"the run has not ended after {self.plan.limit_s:.0f} s")
            self._watch(list(launchers.values()))
            joined = launchers.get("joined")
            is_missing = bool(self.plan.join) and (joined is None or joined.poll() is not None)
            is_due = time.monotonic() >= self._hit_at and self.hits.total() < self.plan.kills
            if not (is_missing or is_due) or not self._is_training():
                continue
            if is_missing and find_living(self.plan.run_dir):
                self.joins += 1
                if self.joins > self.plan.starts:
                    raise GaveUp(f"no node stays in the run after {self.plan.starts} starts")
                launchers["joined"] = self._launch(self.plan.join)
            if is_due:
                self._hit(launchers)
                self._rest()

    def _rest(self) -> None:
        self._hit_at = time.monotonic() + self.chance.uniform(*self.plan.pause_s)

    def _is_training(self) -> bool:
        path = self.plan.run_dir / "metrics.jsonl"
        return path.exists() and any("train/loss" in row for row in read_jsonl(path))

    def _hit(self, launchers: dict[str, subprocess.Popen[bytes]]) -> None:
        """Hit a process of the role that was hit least, if there is one now."""
        found: defaultdict[str, list[psutil.Process]] = defaultdict(list)
        for name, launcher in launchers.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if launcher.poll() is None:
                    found[name].append(psutil.Process(launcher.pid))
            for role, process in processes(launcher.pid):
                found[role].append(process)
        self._seen |= found.keys()
        role = min(sorted(self._seen), key=lambda name: (self._count(name), self.chance.random()))
        running = [one for one in found[role] if _state(one) != psutil.STATUS_STOPPED]
        if not running:
            return
        victim, stops = self.chance.choice(running), self.chance.random() < self.plan.stops
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
            if stops:
                self._stopped.append((time.monotonic() + self.plan.stop_s, role, victim))
            self.hits[f"{role} {'stopped' if stops else 'killed'}"] += 1
            _tell(f"{self.hits.total()}: {role} {victim.pid} {'stopped' if stops else 'killed'}")

    def _count(self, role: str) -> int:
        return sum(count for name, count in self.hits.items() if name.split()[0] == role)

    def _watch(self, launchers: list[subprocess.Popen[bytes]]) -> None:
        """Continue what was stopped for long enough; end and count what outlived its launcher."""
        now = time.monotonic()
        for due in [one for one in self._stopped if one[0] <= now]:
            self._stopped.remove(due)
            if _state(due[2]) == psutil.STATUS_STOPPED:
                self.outlived[due[1]] += 1
                due[2].send_signal(signal.SIGCONT)
        below = {process for launcher in launchers for process in _tree(launcher.pid)}
        for process in {*self._known, *below}:
            if _state(process) in ("", psutil.STATUS_ZOMBIE):
                self._known.pop(process, None)
            elif process in below:
                self._known[process] = None
            elif (since := self._known[process]) is None:
                self._known[process] = now
            elif now - since > _LEFT_S:
                self._end_orphan(process)

    def _end_orphan(self, process: psutil.Process) -> None:
        self.orphans += 1
        self._known.pop(process)
        with contextlib.suppress(psutil.NoSuchProcess):
            _tell(f"orphan {process.pid} ({process.status()}): {process.cmdline()}")
            process.kill()

    def _await_end(self, launchers: list[subprocess.Popen[bytes]]) -> None:
        """Until all processes of the run have ended; those that do not end are orphans."""
        ends_at = time.monotonic() + 2 * _LEFT_S
        while time.monotonic() < ends_at:
            self._watch(launchers)
            if not self._known and all(one.poll() is not None for one in launchers):
                return
            time.sleep(_POLL_S)
        for process in list(self._known):
            self._end_orphan(process)

    def _end(self, launchers: list[subprocess.Popen[bytes]]) -> None:
        """Leave no process behind, whatever happened."""
        for launcher in launchers:
            # The second signal: not after a checkpoint. A stopped launcher takes none.
            for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGTERM):
                if launcher.poll() is None:
                    launcher.send_signal(number)
                    time.sleep(_POLL_S)
        for launcher in launchers:
            try:
                launcher.wait(_END_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
        for process in self._known:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def _state(process: psutil.Process) -> str:
    """ "" when it has ended."""
    try:
        return process.status() if process.is_running() else ""
    except psutil.NoSuchProcess:
        return ""


def _tree(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def processes(launcher: int) -> Iterator[tuple[str, psutil.Process]]:
    """(role, process), with the children of generators and verifiers as roles of their own."""
    for process in _tree(launcher):
        try:
            line, parent = process.cmdline(), process.parent()
            above = parent.cmdline() if parent is not None else []
        except psutil.NoSuchProcess:
            continue
        role = role_of(line)
        if role and role == role_of(above):
            role = f"{role}-child"
        elif not role and (below := role_of(above)):
            role = f"{below}-child"
        if role:
            yield role, process


def role_of(line: list[str]) -> str:
    """Role of a command line; "": none."""
    if ROLES["torchrun"] in line:
        return "torchrun"
    return next((role for role, module in ROLES.items() if module in line), "")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.chaos", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=60, help="hits")
    parser.add_argument("--stops", type=float, default=0.3, help="share of SIGSTOP")
    parser.add_argument("--stop-s", type=float, default=60.0, help="seconds until SIGCONT")
    parser.add_argument("--pause-s", type=float, nargs=2, default=(5.0, 15.0))
    parser.add_argument("--limit-s", type=float, default=7200.0)
    parser.add_argument("--starts", type=int, default=40, help="most starts of a launcher")
    parser.add_argument("--join", action="store_true", help="a second node joins")
    parser.add_argument("--without", type=Path, help="file with the line of the same run in peace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    return parser.parse_intermixed_args(arguments)


def plan_of(options: argparse.Namespace) -> Plan:
    run_dir = options.run_dir.resolve()
    run = [*PROGRAM, "run", "--config", options.config, "--run-dir", str(run_dir)]
    join = [*PROGRAM, "join", str(run_dir), "--generators", "1", "--verifier"]
    return Plan(
        run=[*run, *options.overrides], join=join if options.join else [], run_dir=run_dir,
        kills=options.kills, stops=options.stops, stop_s=options.stop_s,
        pause_s=tuple(options.pause_s), limit_s=options.limit_s, starts=options.starts,
    )  # fmt: skip


def compare(result: dict[str, object], without: dict[str, object]) -> dict[str, object]:
    """Elapsed time and accuracy beside those of the run without chaos."""
    accuracy, other = result["accuracy"], without["accuracy"]
    error, other_error = result["accuracy_se"], without["accuracy_se"]
    found: dict[str, object] = {
        "wall_ratio": round(result["wall_s"] / without["wall_s"], 2),  # type: ignore[operator]
        "accuracy_without": other,
    }
    if None not in (accuracy, other, error, other_error):
        allowed = 2 * (error**2 + other_error**2) ** 0.5  # type: ignore[operator]
        found["is_as_accurate"] = abs(accuracy - other) <= allowed  # type: ignore[operator]
    return found


def main(arguments: list[str]) -> int:
    """Exit code: 0 when all hits fell and nothing was lost."""
    options = parse(arguments)
    plan = plan_of(options)
    plan.run_dir.parent.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(plan, random.Random(options.seed))
    began = time.monotonic()
    try:
        chaos.run()
    except GaveUp as limit:
        _tell(f"{limit}: see {plan.run_dir}.out")
        print(json.dumps({"kills": chaos.hits.total(), "roles": dict(chaos.hits),
                          "starts": chaos.starts, "gave_up": str(limit)}))  # fmt: skip
        return 1
    seconds = time.monotonic() - began
    found = audit(plan.run_dir)
    own = subprocess.run([*PROGRAM, "audit", str(plan.run_dir)], capture_output=True, text=True)
    if own.returncode:
        print(own.stdout, own.stderr, file=sys.stderr)
    summary = json.loads((plan.run_dir / "summary.json").read_text())
    result = found | {
        "orphans": chaos.orphans, "kills": chaos.hits.total(),
        "roles": dict(sorted(chaos.hits.items())), "starts": chaos.starts, "joins": chaos.joins,
        "outlived": dict(chaos.outlived), "wall_s": round(seconds, 1),
        "is_audit_clean": own.returncode == 0,
        "accuracy": summary.get("accuracy_after"), "accuracy_se": summary.get("accuracy_se_after"),
    }  # fmt: skip
    if options.without:
        result |= compare(result, json.loads(options.without.read_text()))
    print(json.dumps(result))
    is_whole = found["steps"] == load_run(plan.run_dir).train.steps and own.returncode == 0
    lost = found["prompts_lost"] + found["trained_twice"] + found["wrong_stamps"] + chaos.orphans
    return 0 if is_whole and not lost and chaos.hits.total() == plan.kills else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A signal ends the run too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
