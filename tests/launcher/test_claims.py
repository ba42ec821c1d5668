"""Nobody else gets a claimed name, whoever claims at the same moment."""

import threading
from contextlib import ExitStack
from pathlib import Path

from megatron_rl.launcher.claims import FOLDER, claimed, clear_claims


def test_claims_of_the_same_moment_are_rows_of_numbers_that_nobody_else_has(tmp_path: Path) -> None:
    found: list[range] = []
    start, end = threading.Barrier(8), threading.Barrier(9)

    def claim() -> None:
        start.wait(30)
        with claimed(tmp_path, "generator", count=3, first=2) as numbers:
            found.append(numbers)
            end.wait(60)

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for one in threads:
        one.start()
    end.wait(60)
    for one in threads:
        one.join(60)
    numbers = [number for row in found for number in row]
    assert len(numbers) == len(set(numbers)) == 24 and min(numbers) >= 2
    assert all(len(row) == 3 for row in found)
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_killed_claimant_keeps_its_name_until_the_run_starts_again(tmp_path: Path) -> None:
    with ExitStack() as earlier:
        assert earlier.enter_context(claimed(tmp_path, "node", count=1, first=1)) == range(1, 2)
        killed = tmp_path / FOLDER / "node-2"
        killed.touch()
        with claimed(tmp_path, "node", count=2, first=1) as numbers:
            assert numbers == range(3, 5)
            assert killed.with_name("node-3").stat().st_mode & 0o077 == 0
        with claimed(tmp_path, "generator", count=1, first=4) as others:
            assert others == range(4, 5)
        clear_claims(tmp_path)
        with claimed(tmp_path, "node", count=1, first=1) as again:
            assert again == range(1, 2)
            # What is left of the earlier start does not free the name.
            earlier.close()
            assert (tmp_path / FOLDER / "node-1").exists()
    clear_claims(tmp_path / "no run")
