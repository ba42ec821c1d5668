"""A checkpoint counts while each of its files is whole, and only once COMPLETE is written."""

import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import CheckpointConfig
from megatron_rl.protocol import checkpoint_folder
from megatron_rl.protocol.checkpoint_folder import (
    COMPLETE,
    clear_after,
    complete_checkpoints,
    discard,
    find_damage,
    find_resume,
    passed_over,
    record_file,
    seal,
    superfluous,
)

CONTENT = {"__0_0.distcp": b"weights" * 50, "common.pt": b"common", "queue.json": b"{}"}


def write(folder: Path, step: int) -> Path:
    partial = folder / f"step_{step:06d}.partial"
    partial.mkdir(parents=True)
    for name, content in CONTENT.items():
        (partial / name).write_bytes(content + str(step).encode())
    return seal(partial, step, {"common.pt": record_file(partial / "common.pt")})


def test_sealed_checkpoint_lists_every_file_under_its_final_name(tmp_path: Path) -> None:
    final = write(tmp_path, 12)
    assert final == tmp_path / "step_000012"
    assert sorted(path.name for path in final.iterdir()) == sorted([*CONTENT, COMPLETE])
    assert complete_checkpoints(tmp_path) == {12: final}
    assert [path.name for path in tmp_path.iterdir()] == ["step_000012"]
    # BLAKE2b with 16 bytes of b"common12", from coreutils' b2sum -l 128.
    assert record_file(final / "common.pt").digest == "312a59a003d0bb6d2199b3248bd6ef7b"


def test_a_checkpoint_is_on_the_disk_before_its_names_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that loses power keeps the names that it has written, with their content."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def noted_rename(path: Path, target: Path) -> Path:
        done.append(f"rename {path.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    write(tmp_path, 12)
    mark, folder = f"rename {COMPLETE}.tmp", "rename step_000012.partial"
    marked, named = done.index(mark), done.index(folder)
    # Whoever wrote common.pt has synced it.
    contents = {"sync __0_0.distcp", "sync queue.json", f"sync {COMPLETE}.tmp"}
    assert contents <= set(done[:marked])
    assert "sync step_000012.partial" in done[marked:named]
    assert f"sync {tmp_path.name}" in done[named:]


@pytest.mark.parametrize("name", [*CONTENT, COMPLETE])
def test_checkpoint_cut_off_at_any_byte_or_without_a_file_is_passed_over(
    tmp_path: Path, name: str
) -> None:
    older = write(tmp_path, 6)
    damaged = write(tmp_path, 12) / name
    content = damaged.read_bytes()
    cfg = CheckpointConfig()
    (tmp_path / checkpoint_folder.CHECKPOINTS).symlink_to(tmp_path)
    assert find_resume(cfg, tmp_path) is not None and len(complete_checkpoints(tmp_path)) == 2
    for length in range(len(content)):
        damaged.write_bytes(content[:length])
        assert complete_checkpoints(tmp_path) == {6: older}, length
        assert find_resume(cfg, tmp_path).name == "step_000006"
    damaged.unlink()
    assert complete_checkpoints(tmp_path) == {6: older}


def test_newer_checkpoints_that_a_resume_passes_over_are_named_with_the_reason(
    tmp_path: Path,
) -> None:
    for step in (6, 12, 18, 24, 30, 36):
        write(tmp_path, step)
    assert passed_over(tmp_path, 36) == []
    (tmp_path / "step_000012" / "common.pt").unlink()
    (tmp_path / "step_000018" / "queue.json").write_bytes(b"")
    (tmp_path / "step_000024" / COMPLETE).write_bytes(b'{"step":24,"files":{},"layout":2}')
    (tmp_path / "step_000030" / COMPLETE).unlink()
    (tmp_path / "step_000036").rename(tmp_path / "step_000042")
    (tmp_path / "step_000048.partial").mkdir()
    # Of Megatron-LM, of verl; and what is no newer checkpoint.
    for name in ("iter_0000054", "global_step_60", "sft", "step_000002.partial", "step_000066.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_000066.d").rename(tmp_path / "step_000066.set-aside-123")
    assert complete_checkpoints(tmp_path) == {6: tmp_path / "step_000006"}
    told = passed_over(tmp_path, 6)
    reasons = {
        "step_000012": "it has no file common.pt",
        "step_000018": "queue.json has 0 bytes, but COMPLETE says 4",
        "step_000024": "COMPLETE is damaged, or of another version: Object contains unknown field",
        "step_000030": "it has no file COMPLETE",
        "step_000042": "its COMPLETE is of step 36",
        "step_000048.partial": "the run ended while it was being written",
        "iter_0000054": "checkpoints of this program are named step_NNNNNN",
        "global_step_60": "checkpoints of this program are named step_NNNNNN",
    }
    assert len(told) == len(reasons)
    for text, (name, reason) in zip(told, reasons.items(), strict=True):
        assert text.startswith(f"{tmp_path / name} is passed over: {reason}"), text
    # A user who resumes from an older one reads which later ones that leaves out.
    shutil.rmtree(tmp_path / "step_000012")
    write(tmp_path, 12)
    assert passed_over(tmp_path, 6)[0].endswith("checkpoint.resume asks for an earlier one")


def test_changed_byte_is_found_by_its_digest(tmp_path: Path) -> None:
    final = write(tmp_path, 6)
    names = sorted(CONTENT)
    assert find_damage(final, names) == ""
    path = final / "common.pt"
    path.write_bytes(b"Common6")
    assert complete_checkpoints(tmp_path) == {6: final}
    assert find_damage(final, names) == "common.pt"
    assert find_damage(final, ["__0_0.distcp"]) == ""


def test_partial_and_renamed_folders_are_no_checkpoints(tmp_path: Path) -> None:
    final = write(tmp_path, 6)
    shutil.copytree(final, tmp_path / "step_000012.partial")
    shutil.copytree(final, tmp_path / "step_000018")
    (tmp_path / "step_000024").mkdir()
    (tmp_path / "step_000024" / COMPLETE).write_bytes(b'{"step":24,"files":{}}')
    assert complete_checkpoints(tmp_path) == {6: final}


def test_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    first = write(tmp_path, 6)
    (first / "more").write_bytes(b"")
    assert write(tmp_path, 6) == first and not (first / "more").exists()
    assert complete_checkpoints(tmp_path) == {6: first}


def test_resuming_leaves_no_leftovers_and_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    for step in (6, 12, 13):
        write(tmp_path, step)
    shutil.copytree(tmp_path / "step_000013", tmp_path / "step_000024.partial")
    clear_after(tmp_path, 12)
    assert list(complete_checkpoints(tmp_path)) == [6, 12]
    [aside] = [path for path in tmp_path.iterdir() if "set-aside" in path.name]
    assert aside.name.startswith("step_000013.") and (aside / COMPLETE).exists()
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("steps", "keep_last", "keep_every", "expected"),
    [
        ([6, 12, 18, 24], 2, 0, [6, 12]),
        ([6, 12, 18, 24], 1, 12, [6, 18]),
        ([24, 6], 3, 0, []),
        ([], 1, 0, []),
    ],
)
def test_last_and_every_nth_checkpoint_are_kept(
    steps: list[int], keep_last: int, keep_every: int, expected: list[int]
) -> None:
    assert superfluous(steps, keep_last=keep_last, keep_every=keep_every) == expected


def test_resume_means_the_newest_or_none_or_the_named_one(tmp_path: Path) -> None:
    folder = tmp_path / checkpoint_folder.CHECKPOINTS
    assert find_resume(CheckpointConfig(), tmp_path) is None
    first, second = write(folder, 6), write(folder, 12)
    assert find_resume(CheckpointConfig(), tmp_path) == second
    assert find_resume(CheckpointConfig(resume="never"), tmp_path) is None
    assert find_resume(CheckpointConfig(resume=str(first)), tmp_path) == first
    discard(second)
    with pytest.raises(InputError, match="step_000012: that is no complete checkpoint. Expected"):
        find_resume(CheckpointConfig(resume=str(second)), tmp_path)
