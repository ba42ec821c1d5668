"""Which sockets of a run listen, where, and who is heard: played by processes with real sockets."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli.doctor import list_listening
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import PortsConfig
from megatron_rl.launcher.ports import resolve_ports

PLAY = """
import json, os, socket, sys

kept = []
for kind, address, port in json.loads(sys.argv[1]):
    if kind == "unix":
        one = socket.socket(socket.AF_UNIX)
        one.bind(address)
        os.chmod(address, port)
    else:
        one = socket.socket(type=socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
        one.bind((address, port))
    if kind != "udp":
        one.listen()
    kept.append(one)
print("ready", flush=True)
sys.stdin.read()
"""
LOOPBACK, ANY = "127.0.0.1", "0.0.0.0"


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def play(stack: ExitStack, sockets: list[tuple[str, str, int]], *words: str) -> int:
    """Start a process with these listening sockets and last words of its command line."""
    process = subprocess.Popen(
        [sys.executable, "-c", PLAY, json.dumps(sockets), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.callback(process.communicate, timeout=60)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process.pid


def prepared(run_dir: Path, *overrides: str) -> PortsConfig:
    run_dir.mkdir()
    config = resolve_ports(load_config(None, [f"run.dir={run_dir}", *overrides]))
    (run_dir / "config.toml").write_text(dump_toml(config))
    return config.ports


def listed(run_dir: Path) -> tuple[int, list[dict]]:
    output = StringIO()
    code = list_listening(run_dir, Console(file=output), as_json=True)
    return code, json.loads(output.getvalue())


def test_sockets_of_a_run_on_loopback_are_named_and_closed(
    tmp_path: Path, processes: ExitStack
) -> None:
    run_dir = tmp_path / "run"
    ports = prepared(run_dir)
    config = str(run_dir / "config.toml")
    queue = play(
        processes, [("tcp", LOOPBACK, ports.prompts), ("tcp", LOOPBACK, ports.batches)],
        "-m", "megatron_rl.rollout_queue.server", "--config", config,
    )  # fmt: skip
    private, shared = str(tmp_path / "private"), str(tmp_path / "shared")
    engine = play(
        processes,
        [("tcp", LOOPBACK, ports.engine), ("unix", private, 0o755), ("unix", shared, 0o777)],
        "-m", "generation.worker", "--config", config, "--index", "3",
    )  # fmt: skip
    # Of another run, whose folder begins with the same name.
    play(processes, [("tcp", ANY, 0)], "-m", "generation.worker", "--config", f"{run_dir}2/c.toml")
    code, rows = listed(run_dir)
    # pytest's folders are closed to other users, so no mode of a socket opens them.
    assert [tuple(row.values()) for row in rows] == [
        ("generator-3", engine, "tcp", LOOPBACK, ports.engine, "SGLang's HTTP", "API key",
         True, False, False),
        ("generator-3", engine, "unix", private, 0, "requests of its own node",
         "access to its file", True, False, False),
        ("generator-3", engine, "unix", shared, 0, "requests of its own node",
         "access to its file", True, False, False),
        *sorted([
            ("queue", queue, "tcp", LOOPBACK, ports.prompts, "queue for generators", "label",
             True, False, False),
            ("queue", queue, "tcp", LOOPBACK, ports.batches, "queue for trainer ranks", "label",
             True, False, False),
        ]),
    ]  # fmt: skip
    assert code == 0


def test_a_socket_that_other_nodes_reach_without_authentication_is_marked(
    tmp_path: Path, processes: ExitStack
) -> None:
    run_dir = tmp_path / "run"
    keys = f"ports.keys_dir={tmp_path / 'keys'}"
    ports = prepared(run_dir, "ports.host=127.0.0.2", keys)
    config = str(run_dir / "config.toml")
    sockets = [("tcp", ANY, ports.prompts), ("tcp", "127.0.0.2", ports.batches)]
    play(processes, sockets, "-m", "megatron_rl.rollout_queue.server", "--config", config)
    assert listed(run_dir)[0] == 0
    store = [("tcp", ANY, ports.torchrun), ("udp", ANY, 0)]
    words = ["--nnodes=1", "-m", "megatron_rl.trainer.train", "--config", config]
    play(processes, store, "-m", "megatron_rl.trainer.torchrun", *words)
    code, rows = listed(run_dir)
    assert code == 1
    found = {(row["what"], row["needs"], row["is_elsewhere"], row["is_open"]) for row in rows}
    assert found == {
        ("queue for generators", "CURVE keys", True, False),
        ("queue for trainer ranks", "CURVE keys", False, False),
        ("torchrun's store", "nothing", True, True),
        ("unknown", "nothing", True, True),
    }
    output = StringIO()
    assert list_listening(run_dir, Console(file=output, width=200)) == 1
    marked = [line for line in output.getvalue().splitlines() if "!!" in line]
    assert len(marked) == 3 and f"tcp 0.0.0.0:{ports.torchrun}" in "".join(marked)
    assert "2 sockets (!!) are open to other nodes without authentication" in marked[-1]


def test_a_folder_without_a_run_or_without_processes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no run \(it has no config.toml\)"):
        listed(tmp_path)
    prepared(tmp_path / "run")
    with pytest.raises(InputError, match="no process of the run"):
        listed(tmp_path / "run")
