"""pytest's plugin of `tools.gpu_day`: writes down at once when a test begins and what became of it.

Each line of the file that RECORD_VARIABLE names is one JSON object. So nothing is lost when a test
takes the process with it.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RECORD_VARIABLE = "GPU_DAY_RECORD"
DEADLINE_VARIABLE = "GPU_DAY_TEST_S"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One deadline for all, whatever they name: the day is short."""
    seconds = float(os.environ[DEADLINE_VARIABLE])
    for item in items:
        item.add_marker(pytest.mark.timeout(seconds), append=False)


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"test": nodeid})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    # A test has three phases; the first that does not pass is its result.
    is_last = report.when == "call" or not report.passed
    if is_last:
        _write(
            {
                "test": item.nodeid,
                "result": report.outcome,
                "seconds": call.duration,
                "text": _text(report, call),
                "figures": [str(value) for key, value in item.user_properties if key == "figure"],
            }
        )
    return report


def _text(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    if call.excinfo is None:
        return ""
    lines = call.excinfo.exconly(tryshort=True).strip().splitlines()
    # Of ranks the cause is at the end of their tracebacks.
    return f"{lines[0]} ... {lines[-1].strip()}" if len(lines) > 1 else lines[0]


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ[RECORD_VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
