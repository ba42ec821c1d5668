"""tools/install.sh on a small project with components of its own: fresh, repeated, interrupted."""

import hashlib
import os
import pty
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.stub_project import ROOT, Project, write_wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project(tmp_path_factory.mktemp("installed"))
    done = project.install("cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "components of mode cpu" in done.stdout
    # No terminal: each step leaves one line, and nothing is written over.
    steps = re.findall(r"^\[install\] step (\d) of 4: .+: \d+ s$", done.stdout, re.MULTILINE)
    assert steps == ["1", "2", "3", "4"] and "\r" not in done.stdout
    return project


@pytest.fixture
def project(installed: Project, tmp_path: Path) -> Project:
    """With an environment that has pip and no component: making one takes seconds."""
    project = Project(tmp_path)
    components = ("torch*", "stub_*", "*megatron_rl*", "sglang-only", "loops-compiled")
    left_out = shutil.ignore_patterns(*components, ".installed", "install.log")
    shutil.copytree(
        installed.root / ".venv", project.root / ".venv", symlinks=True, ignore=left_out
    )
    return project


def test_each_component_lands_where_it_belongs(installed: Project) -> None:
    assert installed.modules() == {"torch", "stub_other", "stub_dev"}
    assert installed.modules("sglang-only") == {"stub_vision"}
    assert (installed.root / ".venv" / "loops-compiled").exists()


def test_a_repeated_call_does_nothing_and_takes_seconds(installed: Project) -> None:
    log = (installed.root / ".venv" / "install.log").read_text()
    started = time.monotonic()
    done = installed.install()
    assert time.monotonic() - started < 60
    assert done.returncode == 0
    assert "components of mode cpu" in done.stdout
    assert "nothing changed" in done.stdout
    assert (installed.root / ".venv" / "install.log").read_text() == log


def test_a_changed_requirement_is_added_to_the_environment(installed: Project) -> None:
    write_wheel(installed.wheels, "stub_new", "1.0")
    marker = installed.root / ".venv" / "kept"
    marker.touch()
    installed.write("requirements/dev.txt", "stub_dev==1.0\nstub_new==1.0\n")
    assert installed.install().returncode == 0
    assert "stub_new" in installed.modules()
    assert marker.exists()


def test_a_terminal_shows_the_step_that_goes_on_and_keeps_a_line_of_each(
    installed: Project,
) -> None:
    installed.write("requirements/dev.txt", "# changed\nstub_dev==1.0\n")
    ours, its = pty.openpty()
    run = subprocess.Popen(
        installed.command(), env=installed.environment() | {"COLUMNS": "60"}, stdout=its
    )
    os.close(its)
    shown = b""
    try:
        # The other end is closed with an error when the last process has ended.
        while part := os.read(ours, 65536):
            shown += part
    except OSError:
        pass
    finally:
        os.close(ours)
        assert run.wait(timeout=200) == 0
    # The environment is there already.
    for number in "123":
        assert f"\r\x1b[K[install] step {number} of 3: ".encode() in shown
    running = re.findall(rb"\r\x1b\[K(\[install\] step [^\r]+)\r\x1b\[K", shown)
    assert running and all(len(line) < 60 for line in running)
    assert len(re.findall(rb"\x1b\[K\[install\] step \d of 3: [^\r]+: \d+ s\r\n", shown)) == 3


def hashes_of(project: Project, end: str = "") -> str:
    lines = []
    for name in ("stub_other", "stub_dev"):
        [wheel] = project.wheels.glob(f"{name}-1.0-*.whl")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}==1.0 --hash=sha256:{digest}{end}\n")
    return "".join(lines)


def test_a_package_that_is_not_the_recorded_one_is_refused(project: Project) -> None:
    project.write("requirements/hashes.txt", hashes_of(project))
    assert project.install().returncode == 0 and "stub_dev" in project.modules()
    recorded = hashes_of(project, end=" # compiled")
    write_wheel(project.wheels, "stub_dev", "1.0", {"stub_new.py": "changed"})
    project.write("requirements/dev.txt", "# changed\nstub_dev==1.0\n")
    (project.root / ".venv" / ".installed").unlink()
    shutil.rmtree(next((project.root / ".venv").rglob("stub_dev-1.0.dist-info")))
    done = project.install()
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stdout + done.stderr
    assert "stub_new" not in project.modules()
    # What a folder of wheels compiled itself has another hash.
    project.write("requirements/hashes.txt", recorded)
    done = project.install(MEGATRON_RL_WHEELS=str(project.wheels))
    assert done.returncode == 0 and "stub_new" in project.modules(), done.stdout + done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", ["interrupted", "no interpreter"])
def test_an_unusable_environment_is_replaced(tmp_path: Path, damage: str) -> None:
    project = Project(tmp_path)
    venv = project.root / ".venv"
    (venv / "lib").mkdir(parents=True)
    (venv / "lib" / "half_written.py").touch()
    if damage == "interrupted":
        (venv / ".installing").touch()
    done = project.install()
    assert done.returncode == 0, done.stderr
    assert "replacing the unusable" in done.stdout
    assert not list(venv.rglob("half_written.py"))
    assert "nothing changed" in project.install().stdout


def test_a_failed_installation_shows_the_log_and_leaves_no_stamp(project: Project) -> None:
    (project.wheels / "torch-2.13.0+cpu-py3-none-any.whl").unlink()
    done = project.install()
    assert done.returncode == 1
    assert "No matching distribution found for torch==2.13.0+cpu" in done.stderr
    assert "https://download.pytorch.org/whl/cpu" in done.stderr
    assert not (project.root / ".venv" / ".installed").exists()


def test_a_failed_step_ends_those_beside_it_and_shows_its_own_log(project: Project) -> None:
    project.write("tools/versions.py", "import time; time.sleep(300)\n")
    project.write(
        "megatron_rl/backend/cpu/kernels/build.py", "raise SystemExit('error: no such loop')\n"
    )
    done = project.install()  # has 100 s
    assert done.returncode == 1
    assert "loops in C++ failed" in done.stderr and "error: no such loop" in done.stderr
    assert not (project.root / ".venv" / ".installed").exists()


def test_an_interrupted_installation_ends_its_steps(project: Project, tmp_path: Path) -> None:
    mark = tmp_path / "sleeper"
    sleeper = f"import os, pathlib, time; pathlib.Path('{mark}').write_text(str(os.getpid()))\n"
    project.write("tools/versions.py", sleeper + "time.sleep(300)\n")
    run = subprocess.Popen(project.command(), env=project.environment(), stderr=subprocess.PIPE)
    try:
        wait_until(lambda: mark.exists() and mark.read_text() != "", 150)
        run.send_signal(signal.SIGTERM)
        assert b"interrupted; run the same command again" in run.communicate(timeout=60)[1]
    finally:
        run.kill()
    wait_until(lambda: not Path(f"/proc/{mark.read_text()}").exists(), 60)
    assert not (project.root / ".venv" / ".installed").exists()


def wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_missing_compiler_is_named_before_anything_is_installed(tmp_path: Path) -> None:
    project = Project(tmp_path)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "cat", "cut", "dirname", "flock", "head", "id", "sha256sum"):
        (tools / name).symlink_to(shutil.which(name))
    done = project.install(PATH=str(tools))
    assert done.returncode == 1
    assert "apt-get install -y gcc g++" in done.stderr
    assert not (project.root / ".venv").exists()


def test_an_installation_waits_for_another_only_so_long(tmp_path: Path) -> None:
    project = Project(tmp_path)
    lock = project.root / ".venv.lock"
    holder = subprocess.Popen(["flock", str(lock), "sleep", "600"])
    try:
        deadline = time.monotonic() + 60
        while subprocess.run(["flock", "-n", str(lock), "true"]).returncode == 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        done = project.install(MEGATRON_RL_LOCK_WAIT_S="1")
    finally:
        holder.kill()
        holder.wait()
    assert done.returncode == 1
    assert "another installation holds" in done.stderr


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    done = Project(tmp_path).install("tpu")
    assert done.returncode == 1
    assert "usage: bash tools/install.sh [cpu|gpu]" in done.stderr


def test_unknown_arguments_are_refused(tmp_path: Path) -> None:
    done = Project(tmp_path).install("cpu", "--with", "more")
    assert done.returncode == 1
    assert "unknown arguments '--with more'" in done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("script", ["tools/install.sh", "tools/test.sh", ".ci/run"])
def test_scripts_parse_and_are_executable(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=60)
    assert os.access(ROOT / script, os.X_OK)


def test_every_requirement_is_an_exact_pin() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        for line in path.read_text().splitlines():
            assert not line or line.startswith("#") or line.count("==") == 1, f"{path}: {line}"
