"""Runs a program on inputs in the grading sandbox and collects its outputs.

`python -m verification.code.outputs` reads one `Job` from standard input and answers with the
`Printed` of each input, in msgpack. The caller can kill this process with all that it started. Used
by `megatron-rl data code-tests`.
"""

import sys

import msgspec

from verification.code.grading import compile_program, run_on_input
from verification.code.languages import find_language
from verification.code.setup import CodeLimits, open_sandbox


class Job(msgspec.Struct, frozen=True):
    """A program and its inputs."""

    source: str
    tag: str
    """Tag of the code fence."""
    inputs: list[str]
    limits: CodeLimits
    packages: list[str] = []


class Printed(msgspec.Struct, frozen=True):
    """Result of one input."""

    output: bytes = b""
    failure: str = ""
    """Reason of grading why the output does not count; empty if the program ended well."""


def collect(job: Job) -> list[Printed]:
    """The program's output for each input. Raises GradingError, HostBusy."""
    name = find_language(job.tag)
    if name is None:
        return [Printed(failure="unknown_language")] * len(job.inputs)
    code = job.source.encode("utf-8", "surrogatepass")
    found = []
    with open_sandbox(name, job.limits, job.packages) as sandbox:
        verdict = compile_program(sandbox, name, code, job.limits)
        if not verdict.is_correct:
            return [Printed(failure=verdict.reason)] * len(job.inputs)
        for text in job.inputs:
            result, failure = run_on_input(sandbox, name, code, stdin=text, limits=job.limits)
            found.append(Printed(failure=failure.reason) if failure else Printed(result.output))
    return found


def main() -> None:
    """Run the job on standard input."""
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Job)
    sys.stdout.buffer.write(msgspec.msgpack.encode(collect(job)))


if __name__ == "__main__":
    main()
