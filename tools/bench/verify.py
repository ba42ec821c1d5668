"""Cost of safe grading: `python -m tools.bench.verify [--quick]`.

| figure | ours | compared in the same run with |
|---|---|---|
| math_per_s_per_core, math_over_bare | whole grading on one core | math-verify in one process |
| code_problems_per_s, sandbox_cost_ratio | 20 tests in the sandbox | only rlimits |
| p99_ms, p99_ratio | ordinary answers in a stream with 5 % bombs | the stream without bombs |
| worker_rss_mb_max | largest grading process of the stream | |
| slow_host, slow_host_not_graded | right answers graded wrong, or not graded, of slow_host_items \
| (8 busy processes) |

The last line is one JSON object.
"""

import contextlib
import json
import logging
import os
import random
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil

from megatron_rl.config.reward import VerifierConfig, WorkerPoolConfig
from megatron_rl.protocol.types import NOT_GRADED, Score, ScoreDone, ScoreFailed, ScoreRequest
from tools.bench.measuring import over, parser, percentile, report, say, timed
from verification.code.languages import LANGUAGES, compile_command, header_folder
from verification.code.setup import CodeLimits, prepare
from verification.draft import Draft
from verification.format import think_box, think_code
from verification.library import Grading, Sample
from verification.rules import RewardRules
from verification.score import screen

RATE_PER_S = 40.0
"""Arrivals of the stream: two fifths of one core's capacity."""
BOMB_SHARE = 0.05
BUSY_PROCESSES = 8
DRAIN_LIMIT_S = 400.0
# Answers that pass the screen and exceed every limit of time or memory.
BOMBS = (
    "\\sum_{n=1}^{9998} \\frac{n}{n^4+3}",
    "\\sum_{n=1}^{9999} \\frac{1}{n^3+n+1}",
    "\\prod_{n=1}^{9999} (1+\\frac{1}{n^2})",
    "\\int \\sqrt{\\tan(x)} \\log(x) e^{x^2} dx",
)
THOUGHT, TESTS = "First we simplify, then we compare both sides and look for mistakes. ", 20


def measure_math(items: int, repeats: int) -> dict[str, float]:
    """Items/s on one core, and the ratio to bare math-verify (medians)."""
    samples = make_answers(items)
    all_cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(all_cores)})
    try:
        with Grading() as grading:
            grading.score(make_expressions(20, seed=1))
            ours, bare = [], []
            _bare_math(make_expressions(20, seed=1))
            for _ in range(repeats):
                bare.append(items / timed(partial(_bare_math, samples)))
                ours.append(items / timed(partial(grading.score, samples)))
    finally:
        os.sched_setaffinity(0, all_cores)
    return {
        "math_per_s_per_core": statistics.median(ours),
        "bare_math_per_s": statistics.median(bare),
        "math_over_bare": over(ours, bare),
    }


def _bare_math(samples: Sequence[Sample]) -> None:
    """The usual way: math-verify on the last box, with its own time limit."""
    from math_verify import parse, verify

    for sample in samples:
        answer = think_box(sample.text).answer
        verify(parse(f"\\boxed{{{sample.answer}}}"), parse(f"\\boxed{{{answer}}}"))


def measure_code(problems: int, repeats: int) -> dict[str, float]:
    """Problems/s in the sandbox, and the ratio of times to rlimits alone (medians)."""
    found: dict[str, float] = {}
    with Grading() as grading:
        for language in ("python", "cpp"):
            samples = [make_program(language, seed) for seed in range(problems)]
            _score_all_right(grading, samples[:1])
            ours, bare = [], []
            for _ in range(repeats):
                bare.append(timed(partial(_bare_programs, samples)))
                ours.append(timed(partial(_score_all_right, grading, samples)))
            found[f"{language}_problems_per_s"] = problems / statistics.median(ours)
            found[f"{language}_cost_ratio"] = over(ours, bare)
    found["code_problems_per_s"] = min(found["python_problems_per_s"], found["cpp_problems_per_s"])
    found["sandbox_cost_ratio"] = max(found["python_cost_ratio"], found["cpp_cost_ratio"])
    return found


def _score_all_right(grading: Grading, samples: Sequence[Sample]) -> None:
    reasons = {score.reason for score in grading.score(samples)}
    assert reasons == {"correct"}, reasons


def _bare_programs(samples: Sequence[Sample]) -> None:
    """The programs and tests in plain processes under rlimits, without isolation."""
    for sample in samples:
        check = think_code(sample.text)
        with tempfile.TemporaryDirectory() as folder:
            command = _build(check.answer, check.tag, Path(folder))
            for case in json.loads(sample.entry)["cases"]:
                given = {"input": case["stdin"], "timeout": 20, "preexec_fn": _limit}
                done = subprocess.run(command, capture_output=True, text=True, **given)
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
    for kind, limit in ((resource.RLIMIT_AS, 300 << 20), (resource.RLIMIT_CPU, 4)):
        resource.setrlimit(kind, (limit, limit))


def measure_latency(seconds: float) -> dict[str, float]:
    """p99 latency of ordinary answers in an open stream, without and with bombs."""
    count = int(seconds * RATE_PER_S)
    ordinary = spread(make_expressions(count, seed=2), seconds)
    bombs = spread(make_bombs(int(count * BOMB_SHARE)), seconds)
    # Bombs keep all cores busy at 1 s too, and end sooner after the stream.
    cfg = VerifierConfig(answers=WorkerPoolConfig(workers=2, timeout_s=1.0))
    with Grading(verifier=cfg) as grading:
        grading.score(make_expressions(40, seed=1))
        calm, _ = _stream(grading, ordinary, [])
        stormy, rss_mb = _stream(grading, ordinary, bombs)
    return {
        "p99_ms_without_bombs": percentile(calm, 99),
        "p99_ms": percentile(stormy, 99),
        "p99_ratio": percentile(stormy, 99) / percentile(calm, 99),
        "p50_ms_without_bombs": statistics.median(calm),
        "p50_ms": statistics.median(stormy),
        "worker_rss_mb_max": rss_mb,
    }


def measure_slow_host(items: int) -> dict[str, float]:
    """Verdicts on right answers and programs while other processes keep all cores busy."""
    samples = make_right(items)
    code = VerifierConfig().code.model_copy(update={"workers": 2})
    cfg = VerifierConfig(answers=WorkerPoolConfig(workers=2), code=code)
    with Grading(verifier=cfg) as grading, _busy_host():
        scores: list[Score | ScoreFailed] = []
        seconds = timed(lambda: scores.extend(grading.score(samples)))
    failed = [score for score in scores if isinstance(score, ScoreFailed)]
    assert all(score.kind == NOT_GRADED for score in failed), failed
    wrong = [s for s in scores if isinstance(s, Score) and not s.is_correct]
    return {
        "slow_host_items": len(scores),
        "slow_host": len(wrong),
        "slow_host_not_graded": len(failed),
        "slow_host_s": seconds,
    }


@contextlib.contextmanager
def _busy_host() -> Iterator[None]:
    """Busy processes in separate sessions, because Linux schedules by session."""
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(BUSY_PROCESSES):
            busy = subprocess.Popen(command, start_new_session=True)
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        yield


Arrivals = list[tuple[float, Sample]]
"""(due time in seconds, sample)."""


def spread(samples: list[Sample], seconds: float) -> Arrivals:
    """Samples with due times evenly over `seconds`."""
    return [(i * seconds / len(samples), sample) for i, sample in enumerate(samples)]


def _stream(grading: Grading, ordinary: Arrivals, bombs: Arrivals) -> tuple[list[float], float]:
    """(latencies of ordinary answers in ms since their due times, largest resident size in MB)."""
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
            pool.submit(to_draft(number, sample, rules))
        for done in pool.collect():
            assert isinstance(done, ScoreDone), done
            if done.request_id < count:
                latencies.append(1e3 * (time.monotonic() - started - due[done.request_id]))
            else:
                assert not done.score.is_correct
        if now >= next_look:
            next_look = now + 0.25
            for pid in pool.pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rss_mb = max(rss_mb, psutil.Process(pid).memory_info().rss / 1e6)
        patience = 0.05 if not arrivals else max(0.0, min(0.05, arrivals[0][0] - now))
        select.select([pool], [], [], patience)
    assert len(latencies) == count
    return latencies, rss_mb


def boxed(answer: str) -> str:
    """A well-formed response of ordinary length."""
    return f"<think>{THOUGHT * 20}</think>The answer is $\\boxed{{{answer}}}$."


def make_answers(count: int, seed: int = 0) -> list[Sample]:
    """Answers like in training: mostly numbers, right and wrong, some expressions."""
    numbers = ("integer", "integer", "integer", "fraction", "decimal")
    return _drawn(count, seed, (*numbers, "surd", "interval", "pair", "product"))


def make_expressions(count: int, seed: int = 0) -> list[Sample]:
    """Answers that a grading process must compute."""
    return _drawn(count, seed, ("surd", "product", "interval"))


def make_heavy(count: int, seed: int = 0) -> list[Sample]:
    """Right answers that take a twentieth to a third of a second of CPU time."""
    return _drawn(count, seed, ("sine moment", "quarter disc", "half circle"))


def make_bombs(count: int) -> list[Sample]:
    """Samples of BOMBS in turn."""
    return [Sample(text=boxed(BOMBS[i % len(BOMBS)]), answer="\\sqrt{2}+x") for i in range(count)]


def make_right(count: int, seed: int = 0) -> list[Sample]:
    """Right answers that need computing: a tenth heavy, and four programs of 2.5 of their 4 s."""
    heavy, programs = make_heavy(count // 10, seed), [make_slow_program(i) for i in range(4)]
    light = _drawn(count - len(heavy) - len(programs), seed, ("right product",))
    samples = [*programs, *heavy, *light]
    random.Random(seed).shuffle(samples)
    return samples


def _drawn(count: int, seed: int, kinds: Sequence[str]) -> list[Sample]:
    draw = random.Random(seed)
    pairs = [draw_answer(draw.choice(kinds), draw) for _ in range(count)]
    return [Sample(text=boxed(answer), answer=reference) for answer, reference in pairs]


def draw_answer(kind: str, draw: random.Random) -> tuple[str, str]:
    """(answer, reference); pairs, surds and products are wrong in half of the draws."""
    between, wrong = draw.randint, draw.choice((0, 1))
    match kind:
        case "integer":
            number = between(-999, 9999)
            return str(number + draw.choice((0, 0, 1))), str(number)
        case "fraction":
            top, bottom, factor = between(1, 40), between(2, 40), between(1, 3)
            return f"\\frac{{{top * factor}}}{{{bottom * factor}}}", f"\\frac{{{top}}}{{{bottom}}}"
        case "decimal":
            hundredths = between(1, 9999)
            return f"{hundredths / 100:.2f}", f"\\frac{{{hundredths}}}{{100}}"
        case "surd":
            square, rest = between(2, 9), draw.choice((2, 3, 5, 6, 7))
            return f"\\sqrt{{{square**2 * rest}}}", f"{square + wrong}\\sqrt{{{rest}}}"
        case "interval":
            low = between(-9, 0)
            high = low + between(1, 9)
            return f"[{low},{high})", f"{low} \\le x < {high}"
        case "pair":
            first, second = between(-9, 9), between(-9, 9)
            return f"({first}, {second})", f"\\left({first},{second + wrong}\\right)"
        case "product" | "right product":
            if kind == "right product":
                wrong, first, second = 0, between(1, 99), between(100, 199)
            else:
                first, second = between(1, 9), between(10, 19)
            constant = first * second + wrong
            return f"(x+{first})(x+{second})", f"x^2+{first + second}x+{constant}"
        case "sine moment":
            # By parts, with c = cos(k pi): the integral of x^4 sin(kx) from 0 to pi.
            k = between(1, 30)
            inner = f"\\frac{{\\pi^4}}{{{k}}}-\\frac{{12\\pi^2}}{{{k**3}}}+\\frac{{24}}{{{k**5}}}"
            reference = f"{1 if k % 2 else -1}\\cdot\\left({inner}\\right)+\\frac{{24}}{{{k**5}}}"
            return f"\\int_0^{{\\pi}} x^4 \\sin({k}x) dx", reference
    radius = between(2, 60)
    root, limits = f"\\sqrt{{{radius**2}-x^2}}", f"\\int_0^{{{radius}}}"
    if kind == "quarter disc":
        return f"{limits} {root} dx", f"\\frac{{{radius**2}\\pi}}{{4}}"
    return f"{limits} \\frac{{dx}}{{{root}}}", "\\frac{\\pi}{2}"


_PYTHON = """import sys
numbers = list(map(int, sys.stdin.read().split()))[1:]
best = current = numbers[0]
for number in numbers[1:]:
    current = max(number, current + number)
    best = max(best, current)
print(best)"""
_CPP = """#include <bits/stdc++.h>
using namespace std;
int main() {
    int n; cin >> n; vector<long long> a(n); for (auto& x : a) cin >> x;
    long long best = a[0], current = a[0];
    for (int i = 1; i < n; i++) {
        current = max(a[i], current + a[i]);
        best = max(best, current);
    }
    cout << best << endl;
}"""
_SLOW_PYTHON = """import time
while time.process_time() < 2.5:
    pass
print(int(input()) + 1)"""
_SLOW_CPP = """#include <bits/stdc++.h>
int main() {
    while (clock() < 2.5 * CLOCKS_PER_SEC) {}
    int n; std::cin >> n; std::cout << n + 1;
}"""


def make_program(language: str, seed: int) -> Sample:
    """A right program for the maximum subarray sum, with its tests."""
    draw = random.Random(seed)
    cases = []
    for _ in range(TESTS):
        numbers = [draw.randint(-50, 50) for _ in range(40)]
        best = max(sum(numbers[i:j]) for i in range(40) for j in range(i + 1, 41))
        cases.append({"stdin": f"40\n{' '.join(map(str, numbers))}\n", "stdout": f"{best}\n"})
    return _program(language, {"python": _PYTHON, "cpp": _CPP}[language], cases, seed)


def make_slow_program(seed: int) -> Sample:
    """A right program, in Python or C++, that uses 2.5 s of CPU time in its only test."""
    language, source = (("python", _SLOW_PYTHON), ("cpp", _SLOW_CPP))[seed % 2]
    return _program(language, source, [{"stdin": f"{seed}\n", "stdout": f"{seed + 1}\n"}], seed)


def _program(language: str, source: str, cases: list[dict[str, str]], seed: int) -> Sample:
    text = f"<think>{THOUGHT}</think>\n```{language}\n{source}\n```"
    return Sample(text=text, task="code", entry=json.dumps({"cases": cases}), seed=seed)


def to_draft(number: int, sample: Sample, rules: RewardRules) -> Draft:
    """The draft that a verifier gives to its pool."""
    request = ScoreRequest(
        number, sample.task, sample.answer, sample.entry, sample.text, sample.tokens, True
    )
    draft = screen(request, rules)
    assert isinstance(draft, Draft), f"plain text decides {sample}"
    return draft


def main() -> None:
    quick = parser(__doc__, quick="fewer items: two minutes").parse_args().quick
    # A warning per bomb would hide the figures.
    logging.getLogger("verification").setLevel(logging.ERROR)
    repeats = 3 if quick else 5
    found = measure_math(300 if quick else 2000, repeats)
    found |= measure_code(4 if quick else 10, repeats)
    say(f"{found}")
    found |= measure_latency(10.0 if quick else 60.0)
    found |= measure_slow_host(50 if quick else 500)
    report(found)


if __name__ == "__main__":
    main()
