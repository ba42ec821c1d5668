"""A folder is replaced whole or not at all, whenever the process that writes it is killed."""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.weights.folders.staging import exchange, recover, rename_over, staged

FILES = ("a.txt", "b.txt", "c.txt")


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / name).write_text(text)


def content(folder: Path) -> str:
    """The text that all files of the folder have."""
    [text] = {(folder / name).read_text() for name in FILES}
    return text


def test_older_folder_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "final"
    for text in ("first", "second"):
        with staged(folder, replaces=True) as staging:
            write(staging, text)
            assert not folder.exists() or content(folder) == "first"
        assert content(folder) == text
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_older_folder_stays_when_the_block_fails(tmp_path: Path) -> None:
    write(tmp_path / "final", "first")
    with (
        pytest.raises(OSError, match="disk full"),
        staged(tmp_path / "final", replaces=True) as staging,
    ):
        write(staging, "second")
        raise OSError("disk full")
    assert content(tmp_path / "final") == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_an_existing_folder_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    write(tmp_path / "model", "a person's")
    write(tmp_path / "model.replaced", "a person's too")
    with pytest.raises(FileExistsError, match="model exists already"), staged(tmp_path / "model"):
        pass
    assert content(tmp_path / "model") == "a person's"
    assert content(tmp_path / "model.replaced") == "a person's too"


def test_where_names_cannot_be_exchanged_two_renames_do(tmp_path: Path) -> None:
    write(tmp_path / "final", "first")
    write(tmp_path / "final.partial", "second")
    rename_over(tmp_path / "final.partial", tmp_path / "final")
    assert content(tmp_path / "final") == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path) -> None:
    write(tmp_path / "final.replaced", "first")
    write(tmp_path / "final.partial", "second")
    recover(tmp_path / "final")
    assert content(tmp_path / "final") == "first"
    with staged(tmp_path / "final", replaces=True) as staging:
        write(staging, "third")
    assert content(tmp_path / "final") == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_missing_folder_is_no_answer_of_the_file_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "nothing", tmp_path / "nowhere")


# Replaces argv[1] for ever, each time by files that all say the same: argv[2] and a number.
WRITER = f"""
import itertools, pathlib, sys
from megatron_rl.weights.folders.staging import staged
for number in itertools.count(1):
    with staged(pathlib.Path(sys.argv[1]), replaces=True) as staging:
        for name in {FILES!r}:
            (staging / name).write_text(f'{{sys.argv[2]}}.{{number}}')
"""


def test_a_writer_killed_at_any_moment_leaves_a_complete_folder(tmp_path: Path) -> None:
    folder = tmp_path / "final"
    write(folder, "0")
    moments = random.Random(5)
    for attempt in range(15):
        before = content(folder)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), str(attempt)])
        try:
            deadline = time.monotonic() + 60
            while content_or_changed(folder) in (before, None) and time.monotonic() < deadline:
                pass
            time.sleep(moments.uniform(0, 0.01))
        finally:
            writer.kill()
            writer.wait(60)
        assert content(folder) != before
    with staged(folder, replaces=True) as staging:
        write(staging, "last")
    assert content(folder) == "last"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def content_or_changed(folder: Path) -> str | None:
    """What a file says; None where the folder was replaced, and removed, while it was opened."""
    assert folder.exists()
    try:
        return (folder / FILES[0]).read_text()
    except FileNotFoundError:
        return None
