"""What an engine is asked by tools.bench.generate, and how its answer is timed.

Shared by the engines' workers, which run in different virtual environments: standard library only.
"""

import dataclasses
import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

LOWEST_ID, IDS = 1000, 40_000
"""Random prompts avoid the special tokens, which come first."""

Generate = Callable[[list[list[int]], int], list[int]]
"""(prompts, tokens of each completion) -> tokens that came."""


@dataclasses.dataclass(frozen=True)
class Job:
    """Sizes of the work; JSON between processes."""

    engine: str
    model: str
    """HF folder without an end of sequence: every completion has the length that is asked for."""
    rows: str
    """Where the worker writes the samples, one JSON object a line."""
    threads: int
    running: list[int]
    """Requests at once."""
    prompt_tokens: int
    new_tokens: int
    repeats: int
    port: int = 0


def read_job(path: str) -> Job:
    """The job of a worker's command line."""
    return Job(**json.loads(Path(path).read_text()))


def endless_model(source: Path, folder: Path) -> Path:
    """A copy of an HF folder without end-of-sequence ids; big files are linked."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        target = folder / path.name
        if path.suffix == ".safetensors":
            target.symlink_to(path.resolve())
        elif path.name in ("config.json", "generation_config.json"):
            values = json.loads(path.read_text())
            target.write_text(json.dumps(values | {"eos_token_id": None}))
        else:
            shutil.copyfile(path, target)
    return folder


def prompts(job: Job, running: int, call: int) -> list[list[int]]:
    """`running` random prompts, others at each call, so that no engine finds a prefix it knows."""
    chance = random.Random(running * 1000 + call)
    return [
        [chance.randrange(LOWEST_ID, IDS) for _ in range(job.prompt_tokens)] for _ in range(running)
    ]


def measure(job: Job, generate: Generate) -> None:
    """Time the calls and write the samples.

    A sample is {"running", "first_s", "all_s"}: seconds of completions of one token, and of
    1 + new_tokens, after other prompts of the same lengths. Raises RuntimeError for other lengths.
    """
    with Path(job.rows).open("w", buffering=1) as file:
        call = 0

        def timed(running: int, tokens: int) -> float:
            nonlocal call
            call += 1
            asked = prompts(job, running, call)
            started = time.perf_counter()
            found = generate(asked, tokens)
            seconds = time.perf_counter() - started
            if found != [tokens] * running:
                raise RuntimeError(f"asked for {running} x {tokens} tokens, got {found}")
            return seconds

        for running in job.running:
            timed(running, 4)
            for _ in range(job.repeats):
                row = {
                    "running": running,
                    "first_s": timed(running, 1),
                    "all_s": timed(running, 1 + job.new_tokens),
                }
                file.write(json.dumps(row) + "\n")
