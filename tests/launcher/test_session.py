"""What every role of a run is started with."""

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.tree import Config
from megatron_rl.launcher.run_folder import locked
from megatron_rl.launcher.session import Session

WANTED = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "2",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "31",
    "GLOO_SOCKET_IFNAME": "lo",
}


def test_all_roles_have_the_same_settings_of_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WANTED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    config = Config.model_validate({"run": {"dir": tmp_path}, "weights": {"deadline_s": 30.5}})
    probe = (
        f"import json, os; print(json.dumps({{name: os.environ[name] for name in {[*WANTED]}}}))"
    )
    with locked(tmp_path) as lock:
        session = Session(config, Console(), lock=lock)
        with session._supervisor as supervisor:
            role = supervisor.start("probe", [sys.executable, "-c", probe])
            role.process.wait(30)
            assert json.loads(role.log_path.read_text()) == WANTED
