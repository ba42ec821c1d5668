"""A node that cannot join a run is refused before it starts or claims anything."""

import io
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.launcher.claims import FOLDER
from megatron_rl.launcher.joining import check_roles, check_run, join
from megatron_rl.observe.heartbeat import ALIVE, PREPARED, Beat, Heartbeat, read_beat


def configure(run_dir: Path, **sections: dict) -> Config:
    run_dir.mkdir(exist_ok=True)
    config = Config.model_validate({"run": {"dir": run_dir}, **sections})
    (run_dir / "config.toml").write_text(dump_toml(config))
    return config


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that this process leads."""
    configure(tmp_path)
    with Heartbeat(tmp_path, "reinforcement learning"):
        yield tmp_path


def change_beat(run_dir: Path, **changes: object) -> None:
    beat = read_beat(run_dir)
    assert beat is not None
    found = msgspec.structs.replace(beat, has_ended=False, **changes)
    (run_dir / ALIVE).write_bytes(msgspec.json.encode(found))


def refusal(run_dir: Path) -> str:
    with pytest.raises(InputError) as found:
        join(run_dir, Console(file=io.StringIO()), generators=1, has_verifier=False)
    assert not (run_dir / FOLDER).exists()
    return str(found.value)


def test_a_run_that_is_there_may_be_joined(run_dir: Path) -> None:
    beat = check_run(run_dir, Config.model_validate({"run": {"dir": run_dir}}))
    assert isinstance(beat, Beat) and beat.phase == "reinforcement learning"


def test_no_run_an_ended_one_and_a_prepared_one_are_refused(tmp_path: Path) -> None:
    assert "holds no run" in refusal(tmp_path)
    configure(tmp_path)
    assert "is not running: start it first" in refusal(tmp_path)
    with Heartbeat(tmp_path, PREPARED):
        assert "is prepared, and not running" in refusal(tmp_path)
    (tmp_path / "summary.json").touch()
    assert "has ended" in refusal(tmp_path)


def test_a_run_of_another_program_is_refused(tmp_path: Path) -> None:
    configure(tmp_path)
    with Heartbeat(tmp_path):
        pass
    change_beat(tmp_path, code="0123456789abcdef")
    assert "another version of the program (digest 0123456789abcdef)" in refusal(tmp_path)


def test_a_run_on_the_loopback_of_another_machine_is_refused(tmp_path: Path) -> None:
    configure(tmp_path)
    with Heartbeat(tmp_path):
        pass
    change_beat(tmp_path, host="elsewhere")
    assert "listens on 127.0.0.1 of elsewhere alone" in refusal(tmp_path)


def test_a_run_folder_that_lies_elsewhere_here_is_refused(run_dir: Path) -> None:
    copied = configure(run_dir.parent / "copied")
    (run_dir / "config.toml").write_text(dump_toml(copied))
    assert "mount it at the same path" in refusal(run_dir)


@pytest.mark.parametrize(
    ("sections", "generators", "gpus", "expected"),
    [
        ({}, 0, 0, "nothing to start"),
        ({}, -1, 0, "nothing to start"),
        ({"generator": {"tensor_parallel": 16}}, 1, 8, "an engine of 16 GPUs .* spans nodes"),
        ({"generator": {"tensor_parallel": 2}}, 3, 4, "3 engines of 2 GPUs need 6.* has 4"),
        (
            {"generator": {"colocate": True}, "weights": {"method": "ipc"}}, 1, 8,
            "shares the memory of one GPU",
        ),
    ],
)  # fmt: skip
def test_roles_that_this_node_cannot_run_are_refused(
    sections: dict, generators: int, gpus: int, expected: str
) -> None:
    config = Config.model_validate(sections)
    with pytest.raises(InputError, match=expected):
        check_roles(config, generators=generators, has_verifier=False, gpus=gpus)
    check_roles(config, generators=0, has_verifier=True, gpus=gpus)
