"""Counts what the passes of SGLang cost, for the calibration of the simulator.

Used inside SGLang's scheduler on the CPU (`sglang_cpu/site/direct_requests.py`); needs neither
torch nor SGLang. Passes are summed by kind and size, so that reports stay small.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from megatron_rl.protocol.engine_passes import PASSES_VARIABLE, PassKind, PassReport, PassRow

REPORT_S = 2.0
"""Between two lines; what an engine that is killed had not written is lost."""


class PassCosts:
    """Sums over passes, written to a file every few seconds."""

    def __init__(
        self,
        path: Path,
        *,
        work_clock: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._work_clock, self._clock = work_clock, clock
        self._rows: dict[tuple[str, int, int], PassRow] = {}
        self._has_rested = True
        self._began_at: float | None = None
        """By the work clock; None: the engine is idle."""
        self._written_at = clock()

    def begin(self) -> None:
        """The loop looks for work. After a pass that left some, the next has begun already."""
        if self._began_at is None:
            self._began_at = self._work_clock()

    def rest(self) -> None:
        """There was none."""
        self._began_at, self._has_rested = None, True

    def note(self, *, is_prefill: bool, completions: int, tokens: int, ended: int) -> None:
        """A pass over so many completions is done."""
        now = self._work_clock()
        if self._began_at is None or not completions:
            return
        kind: PassKind = "decode"
        if is_prefill:
            kind = "wake" if self._has_rested else "prefill"
        self._has_rested = False
        key = kind, completions.bit_length(), tokens.bit_length()
        old = self._rows.get(key) or PassRow(kind, 0, 0.0, 0, 0, 0)
        self._rows[key] = PassRow(
            kind,
            old.passes + 1,
            old.seconds + now - self._began_at,
            old.completions + completions,
            old.tokens + tokens,
            old.ended + ended,
        )
        self._began_at = now
        self._write_if_due()

    def _write_if_due(self) -> None:
        now = self._clock()
        if now < self._written_at + REPORT_S:
            return
        self._written_at = now
        rows, self._rows = list(self._rows.values()), {}
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(PassReport(now, rows)) + b"\n")


def open_pass_costs() -> list[PassCosts]:
    """One where this process's environment names a file, else none."""
    path = os.environ.get(PASSES_VARIABLE)
    return [PassCosts(Path(path))] if path else []


def count_passes(module: ModuleType, costs: list[PassCosts]) -> None:
    """Have `sglang.srt.managers.scheduler` note its passes in what `costs` will hold, if anything.

    A pass lasts from the end of the one before, or from the loop's look for requests, to the
    answers.
    """
    receiver_class, scheduler_class = module.SchedulerRequestReceiver, module.Scheduler
    pull_raw_reqs = receiver_class._pull_raw_reqs
    record_paused = scheduler_class._record_scheduler_state_for_paused_engine
    on_idle = scheduler_class.on_idle
    process_batch_result = scheduler_class.process_batch_result

    def pull(self: Any) -> list[Any] | None:
        for cost in costs:
            cost.begin()
        return pull_raw_reqs(self)

    def rest_while_paused(self: Any) -> None:
        for cost in costs:
            cost.rest()
        record_paused(self)

    def rest_while_idle(self: Any) -> None:
        for cost in costs:
            cost.rest()
        on_idle(self)

    def process(self: Any, batch: Any, result: Any) -> None:
        is_prefill, reqs = batch.forward_mode.is_extend(), list(batch.reqs)
        process_batch_result(self, batch, result)
        for cost in costs:
            held = sum(len(req.origin_input_ids) + len(req.output_ids) for req in reqs)
            cost.note(
                is_prefill=is_prefill,
                completions=len(reqs),
                tokens=batch.extend_num_tokens if is_prefill else held,
                ended=sum(req.finished() for req in reqs),
            )

    receiver_class._pull_raw_reqs = pull
    scheduler_class._record_scheduler_state_for_paused_engine = rest_while_paused
    scheduler_class.on_idle = rest_while_idle
    scheduler_class.process_batch_result = process
