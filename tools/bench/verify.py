"""`python -m tools.bench.verify [--quick] `: what safe grading costs.

| figure | ours | beside it, in the same run |
|---|---|---|
| math_per_s_per_core, math_over_bare | all of grading, on one core | math-verify in one process |
| code_problems_per_s, sandbox_cost_ratio | 20 tests in the sandbox | the same, rlimits alone |
| p99_ms, p99_ratio | ordinary answers, 5 % of the stream are bombs | the same without bombs |
| worker_rss_mb_max | largest grading process of the stream | |
| slow_host, slow_host_not_graded | wrong of slow_host_items right answers | 8 busy processes |

The last line is one JSON object.
"""

import contextlib
import json
import logging
import os
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from megatron_rl.config.reward import VerifierConfig, WorkerPoolConfig
from megatron_rl.protocol.types import NOT_GRADED, Score, ScoreDone, ScoreFailed
from tools.bench import verify_work as work
from tools.bench.measuring import over, parser, percentile, report
from verification.code.languages import LANGUAGES, compile_command
from verification.code.setup import CodeLimits, header_folder, prepare
from verification.format import think_box, think_code
from verification.library import Grading, Sample
from verification.rules import RewardRules

RATE_PER_S = 40.0
"""Arrivals of the stream: two fifths of what one core can compute."""
BOMB_SHARE = 0.05
BUSY_PROCESSES = 8
DRAIN_LIMIT_S = 400.0


def measure_math(items: int, repeats: int) -> dict[str, float]:
    """Items per second on one core, and the ratio to bare math-verify (medians)."""
    samples = work.make_answers(items)
    core = min(os.sched_getaffinity(0))
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        with Grading() as grading:
            grading.score(work.make_expressions(20, seed=1))
            ours, bare = [], []
            _bare_math(work.make_expressions(20, seed=1))
            for _ in range(repeats):
                bare.append(items / _timed(partial(_bare_math, samples)))
                ours.append(items / _timed(partial(grading.score, samples)))
    finally:
        os.sched_setaffinity(0, all_cores)
    return {
        "math_per_s_per_core": statistics.median(ours),
        "bare_math_per_s": statistics.median(bare),
        "math_over_bare": over(ours, bare),
    }


def _bare_math(samples: Sequence[Sample]) -> None:
    """What most trainers do: math-verify on the last box, with its own time limit."""
    from math_verify import parse, verify

    for sample in samples:
        answer = think_box(sample.text).answer
        verify(parse(f"\\boxed{{{sample.answer}}}"), parse(f"\\boxed{{{answer}}}"))


def measure_code(problems: int, repeats: int) -> dict[str, float]:
    """Problems per second in the sandbox, and the ratio of times to rlimits alone (medians)."""
    found: dict[str, float] = {}
    with Grading() as grading:
        for language in ("python", "cpp"):
            samples = [work.make_program(language, seed) for seed in range(problems)]
            _score_all_right(grading, samples[:1])
            ours, bare = [], []
            for _ in range(repeats):
                bare.append(_timed(partial(_bare_programs, samples)))
                ours.append(_timed(partial(_score_all_right, grading, samples)))
            found[f"{language}_problems_per_s"] = problems / statistics.median(ours)
            found[f"{language}_cost_ratio"] = over(ours, bare)
    found["code_problems_per_s"] = min(found["python_problems_per_s"], found["cpp_problems_per_s"])
    found["sandbox_cost_ratio"] = max(found["python_cost_ratio"], found["cpp_cost_ratio"])
    return found


def _score_all_right(grading: Grading, samples: Sequence[Sample]) -> None:
    reasons = {score.reason for score in grading.score(samples)}
    assert reasons == {"correct"}, reasons


def _bare_programs(samples: Sequence[Sample]) -> None:
    """The same programs and tests in plain processes under rlimits: no isolation at all."""
    for sample in samples:
        check = think_code(sample.text)
        with tempfile.TemporaryDirectory() as folder:
            command = _build(check.answer, check.tag, Path(folder))
            for case in json.loads(sample.entry)["cases"]:
                done = subprocess.run(
                    command,
                    input=case["stdin"],
                    capture_output=True,
                    text=True,
                    timeout=20,
                    preexec_fn=_limit,
                )
                assert done.stdout == case["stdout"], done


def _build(source: str, tag: str, folder: Path) -> list[str]:
    language = LANGUAGES[tag]
    if not language.compiler:
        (folder / "solution.py").write_text(source)
        return [sys.executable, "-I", "-S", str(folder / "solution.py")]
    (folder / language.source_name).write_text(source)
    headers = header_folder(tag, prepare(CodeLimits()).cache_folder)
    subprocess.run(compile_command(language, headers), cwd=folder, check=True, timeout=60)
    return [str(folder / language.program)]


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))
    resource.setrlimit(resource.RLIMIT_CPU, (4, 4))


def measure_latency(seconds: float) -> dict[str, float]:
    """p99 latency of ordinary answers in an open stream, without and with bombs."""
    count = int(seconds * RATE_PER_S)
    ordinary = spread(work.make_expressions(count, seed=2), seconds)
    bombs = spread(work.make_bombs(int(count * BOMB_SHARE)), seconds)
    # Bombs keep all cores busy at 1 s too, and end sooner after the stream.
    cfg = VerifierConfig(answers=WorkerPoolConfig(workers=2, timeout_s=1.0))
    with Grading(verifier=cfg) as grading:
        grading.score(work.make_expressions(40, seed=1))
        calm, _ = _stream(grading, ordinary, [])
        stormy, rss_mb = _stream(grading, ordinary, bombs)
    return {
        "p99_ms_without_bombs": 1e3 * percentile(calm, 99),
        "p99_ms": 1e3 * percentile(stormy, 99),
        "p99_ratio": percentile(stormy, 99) / percentile(calm, 99),
        "p50_ms_without_bombs": 1e3 * statistics.median(calm),
        "p50_ms": 1e3 * statistics.median(stormy),
        "worker_rss_mb_max": rss_mb,
    }


def measure_slow_host(items: int) -> dict[str, float]:
    """Verdicts on right answers and programs while other processes keep all cores busy."""
    samples = work.make_right(items)
    cfg = VerifierConfig(
        answers=WorkerPoolConfig(workers=2),
        code=VerifierConfig().code.model_copy(update={"workers": 2}),
    )
    with Grading(verifier=cfg) as grading, _busy_host():
        started = time.perf_counter()
        scores = grading.score(samples)
        seconds = time.perf_counter() - started
    failed = [score for score in scores if isinstance(score, ScoreFailed)]
    not_graded = [score for score in failed if score.kind == NOT_GRADED]
    assert len(not_graded) == len(failed), failed
    wrong = [s for s in scores if isinstance(s, Score) and not s.is_correct]
    return {
        "slow_host_items": len(scores),
        "slow_host": len(wrong),
        "slow_host_not_graded": len(not_graded),
        "slow_host_s": seconds,
    }


@contextlib.contextmanager
def _busy_host() -> Iterator[None]:
    """Processes that compute without end, each a session of its own as Linux shares by session."""
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(BUSY_PROCESSES):
            busy = subprocess.Popen(command, start_new_session=True)
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        yield


Arrivals = list[tuple[float, Sample]]
"""Samples, each with the time in seconds at which it is due."""


def spread(samples: list[Sample], seconds: float) -> Arrivals:
    """Evenly, over so long."""
    return [(i * seconds / len(samples), sample) for i, sample in enumerate(samples)]


def _stream(grading: Grading, ordinary: Arrivals, bombs: Arrivals) -> tuple[list[float], float]:
    """Latencies of ordinary answers, from when each was due; largest resident size in MB."""
    count = len(ordinary)
    arrivals = [(at, i, sample) for i, (at, sample) in enumerate([*ordinary, *bombs])]
    arrivals.sort(key=lambda arrival: arrival[0])
    last_s = arrivals[-1][0]
    pool, rules = grading.pool, RewardRules(max_tokens=1 << 20)
    started = time.monotonic()
    due: dict[int, float] = {}
    latencies: list[float] = []
    rss_mb, next_look = 0.0, 0.0
    while arrivals or pool.pending:
        now = time.monotonic() - started
        assert now < last_s + DRAIN_LIMIT_S, f"{pool.pending} items are late"
        while arrivals and arrivals[0][0] <= now:
            at, number, sample = arrivals.pop(0)
            due[number] = at
            pool.submit(work.to_draft(number, sample, rules))
        for done in pool.collect():
            assert isinstance(done, ScoreDone), done
            if done.request_id < count:
                latencies.append(time.monotonic() - started - due[done.request_id])
            else:
                assert not done.score.is_correct
        if now >= next_look:
            rss_mb, next_look = max(rss_mb, _rss_mb(pool.pids)), now + 0.25
        patience = 0.05 if not arrivals else max(0.0, min(0.05, arrivals[0][0] - now))
        select.select([pool], [], [], patience)
    assert len(latencies) == count
    return latencies, rss_mb


def _rss_mb(pids: Sequence[int]) -> float:
    sizes = [0.0]
    for pid in pids:
        try:
            sizes.append(psutil.Process(pid).memory_info().rss / 1e6)
        except psutil.NoSuchProcess:
            continue
    return max(sizes)


def _timed(work_to_do: Callable[[], object]) -> float:
    started = time.perf_counter()
    work_to_do()
    return time.perf_counter() - started


def main() -> None:
    """Entry."""
    quick = parser(__doc__, quick="fewer items: two minutes").parse_args().quick
    # A line for each bomb would hide the figures.
    logging.getLogger("verification").setLevel(logging.ERROR)
    found: dict[str, float] = {}
    found |= _show(measure_math(300 if quick else 2000, 3 if quick else 5))
    found |= _show(measure_code(4 if quick else 10, 3 if quick else 5))
    found |= _show(measure_latency(10.0 if quick else 60.0))
    found |= _show(measure_slow_host(50 if quick else 500))
    report(found)


def _show(found: dict[str, float]) -> dict[str, float]:
    for name, value in found.items():
        print(f"{name:28} {value:10.2f}", flush=True)
    return found


if __name__ == "__main__":
    main()
