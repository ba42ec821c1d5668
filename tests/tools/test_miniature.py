"""The recipe in small: what is planted, and how what is found is counted."""

import json
import subprocess
from collections import Counter
from pathlib import Path

from tools.miniature import (
    COPIES,
    DESCENDING,
    TRAIN,
    UNSOLVABLE,
    Miniature,
    found_labels,
    plant,
)


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_planted_is_what_is_written_down(tmp_path: Path) -> None:
    tasks = []
    for number in range(TRAIN + 7):
        digits = f"{10000 + number}"
        tasks.append({
            "messages": [{"role": "user", "content": f"sort {digits}="}],
            "answer": "".join(sorted(digits)), "split": "train",
        })  # fmt: skip
    tasks += [tasks[0] | {"split": "held_out"}] * 3
    write(tmp_path / "tasks" / "prompts.jsonl", tasks)
    small = Miniature(tmp_path)
    plant(small, seed=0)
    raw, planted = read(small.data("raw")), read(small.data("planted"))
    assert len(raw) == TRAIN + COPIES and len(read(small.data("held_out"))) == 3
    kinds = Counter(row["kind"] for row in planted)
    clean = TRAIN - DESCENDING - UNSOLVABLE
    assert kinds == {"descending": DESCENDING, "unsolvable": UNSOLVABLE, "": clean}
    for row, note in zip(raw, planted, strict=False):
        right = "".join(sorted(row["question"].split()[1].rstrip("=")))
        expected = {"descending": right[::-1], "": right}
        assert row["id"] == note["id"] and note["answer"] == right
        assert row["answer"] == expected.get(note["kind"], row["answer"])
        assert row["question"].startswith("mix" if note["kind"] == "unsolvable" else "sort")


def test_listed_commands_can_be_pasted(tmp_path: Path) -> None:
    small = Miniature(tmp_path / "mini out")
    write(small.data("given"), [{"id": "it's"}])
    copied = small.data("copied")
    small.call(copied, "json.tool", "--json-lines", small.data("given"), copied)
    first = copied.read_text()
    copied.unlink()
    subprocess.run(["bash", small.out / "commands.txt"], cwd=tmp_path, check=True, timeout=60)
    assert copied.read_text() == first and json.loads(first) == {"id": "it's"}


def test_labels_are_counted_by_hand(tmp_path: Path) -> None:
    small = Miniature(tmp_path)
    kinds = ["descending"] * 4 + [""] * 5 + ["unsolvable"]
    write(small.data("planted"), [{"id": f"{n}", "kind": kind} for n, kind in enumerate(kinds)])
    # 3 was a copy of another problem, and is not there any more.
    write(small.data("distinct"), [{"id": f"{n}"} for n in range(10) if n != 3])
    kept = [
        {"id": "0", "original_answer": "1"},
        {"id": "2"},
        *({"id": f"{n}"} for n in range(5, 10)),
    ]
    write(small.data("filtered"), kept)
    drops = [{"id": "1", "reason": "label_disagrees"}, {"id": "4", "reason": "label_disagrees"},
             {"id": "x", "reason": "too_hard"}]  # fmt: skip
    Path(f"{small.data('filtered')}.report.json").write_text(json.dumps({"drops": drops}))
    assert found_labels(small) == {
        "labels_found": 2 / 3, "labels_false": 1 / 5, "unsolvable_left": 1,
        "problems_raw": 9 + COPIES, "problems_filtered": 7,
    }  # fmt: skip
