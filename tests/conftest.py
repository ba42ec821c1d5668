"""Which tests a run takes, and in which order; where their matrices are cut.

Of the cases of a test marked `sampled(count)` so many are drawn by a seed; the others become
`exhaustive`. Of exhaustive tests `--share` draws a part, and of the slow ones as large a part by
their seconds. Files start by their `slow(seconds)`, the longest first, because workers take one
file after the other. Tests marked `gpu` have more time.
"""

import multiprocessing
import os
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from megatron_rl.launcher import ports
from megatron_rl.protocol import process, tokenizer_child
from tests.sampling import commit_seed, draw, draw_share

GPU_TIMEOUT_S = 600
"""Of a test on a GPU that names no deadline: its processes import everything anew, and compile
kernels when they first use them."""
MOST_LEFT_OPEN = 100
"""Models that several files share hold memory that is shared with other processes: 64 tensors."""


# A busy machine draws examples slowly.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")


@pytest.fixture(autouse=True)
def nothing_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run a role in this process do not tell those after them that a run has begun."""
    monkeypatch.setattr(process._Progress, "has_started", False)


@pytest.fixture(autouse=True, scope="module")
def descriptors_are_given_back() -> Iterator[None]:
    """A test file leaves few descriptors open, and no lock of a port, in a worker of many files."""
    before = open_descriptors()
    yield
    held = ports._locks()._held
    for descriptor in held.values():
        os.close(descriptor)
    held.clear()
    left = open_descriptors() - before
    assert left <= MOST_LEFT_OPEN, f"{left} descriptors are left open; allowed: {MOST_LEFT_OPEN}"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def forked_tokenizer_children() -> Iterator[None]:
    """Children of `call_in_child` are forked from one server that has imported transformers.

    Each spawned child would import transformers again, which takes two seconds. The server keeps
    the environment of its start, and ends with pytest.
    """
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["tests.tokenizer_preload"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_child, "get_context", lambda method: forking)
        yield


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a file system of some MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size_mib: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this user may not mount a file system")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(make_disk: Callable[[int], Path]) -> Path:
    """A file system of 1 MiB."""
    return make_disk(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("matrices")
    group.addoption("--matrix-seed", help="draws cases; without it, the commit that is checked out")
    group.addoption(
        "--share", type=float, default=1.0, help="part of the exhaustive tests to take, 0 to 1"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist get the options of the main process, and so its seed.
    if config.option.matrix_seed is None:
        config.option.matrix_seed = commit_seed()


def pytest_report_header(config: pytest.Config) -> str:
    return f"matrices: {repeat_options(config)}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    if exitstatus:
        terminalreporter.write_line(f"cases were drawn by {repeat_options(config)}")


def repeat_options(config: pytest.Config) -> str:
    """What draws the same cases on another commit."""
    seed, share = config.option.matrix_seed, config.option.share
    return f"--matrix-seed={seed}" + (f" --share={share}" if share < 1 else "")


# Before pytest's own, which selects by markers.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip_gpu_tests(items)
    give_gpu_tests_time(items)
    mark_what_is_not_drawn(items, config.option.matrix_seed)
    take_share(config, items)
    put_slow_files_first(items)


def skip_gpu_tests(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def give_gpu_tests_time(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S))


def mark_what_is_not_drawn(items: list[pytest.Item], seed: str) -> None:
    """Cases that are exhaustive by themselves are not drawn from."""
    matrices: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("exhaustive"):
            matrices[item.nodeid.partition("[")[0]].append(item)
    for cases in matrices.values():
        marker = cases[0].get_closest_marker("sampled")
        assert marker is not None
        drawn = draw((case.nodeid for case in cases), marker.args[0], seed)
        for case in cases:
            if case.nodeid not in drawn:
                case.add_marker(pytest.mark.exhaustive)


def take_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests are drawn apart from the others, so that runs take much the same time."""
    share, seed = config.option.share, config.option.matrix_seed
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
    drawn: set[str] = set()
    for is_slow in (False, True):
        seconds = {
            item.nodeid: marker.args[0] if marker else 1.0
            for item in exhaustive
            if bool(marker := item.get_closest_marker("slow")) is is_slow
        }
        drawn |= draw_share(seconds, share, seed)
    left = [item for item in exhaustive if item.nodeid not in drawn]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]


def put_slow_files_first(items: list[pytest.Item]) -> None:
    seconds: dict[Path, float] = defaultdict(float)
    for item in items:
        for marker in item.iter_markers("slow"):
            seconds[item.path] = max(seconds[item.path], *marker.args, 0.0)
    items.sort(key=lambda item: -seconds[item.path])
