"""pytest plugin of `tools.gpu_day`: records the beginning and the outcome of each test at once.

Appends a JSON object per line to the file in RECORD_VARIABLE, so that a crash loses nothing.
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
    """Replace the deadlines of all tests by DEADLINE_VARIABLE."""
    seconds = float(os.environ[DEADLINE_VARIABLE])
    for item in items:
        item.add_marker(pytest.mark.timeout(seconds), append=False)


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"test": nodeid})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    # A test has three phases; the first phase that does not pass decides.
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
    # The traceback of a rank ends with the cause.
    return f"{lines[0]} ... {lines[-1].strip()}" if len(lines) > 1 else lines[0]


def _write(line: dict[str, Any]) -> None:
    with Path(os.environ[RECORD_VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")
