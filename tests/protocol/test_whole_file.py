"""Files are replaced at once, by several writers too."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_rl.protocol.whole_file import write_whole


def test_writers_at_the_same_time_leave_a_whole_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"

    def write(number: int) -> None:
        write_whole(path, json.dumps([number] * 10_000))
        assert len(set(json.loads(path.read_text()))) == 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(100)))
    assert list(tmp_path.iterdir()) == [path]
