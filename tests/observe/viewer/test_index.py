import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.observe.viewer import index as module
from megatron_rl.observe.viewer.index import Filter, Index
from megatron_rl.observe.viewer.tokens import read_record
from tests.observe.viewer.made_up import record, write


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Index]]:
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    made: list[Index] = []

    def build() -> Index:
        made.append(Index(tmp_path / "run", tmp_path / f"{len(made)}.sqlite"))
        made[-1].refresh()
        return made[-1]

    yield build
    for one in made:
        one.__exit__(None, None, None)


def ids(index: Index, wanted: Filter, order: str = "id", *, is_falling: bool = False) -> list[int]:
    total, rows = index.page(wanted, order=order, is_falling=is_falling, limit=500, offset=0)
    assert total == len(rows)
    return [row["id"] for row in rows]


def test_filters_agree_with_a_plain_loop(tmp_path: Path, opened: Callable[[], Index]) -> None:
    draw = random.Random(0)
    folder = tmp_path / "run" / "rollouts"
    lines: list[tuple[int, dict[str, Any]]] = []
    for step in range(4):
        rows = [
            record(
                group, draw.randrange(4), task=draw.choice(["math", "code"]),
                reason=draw.choice(["correct", "wrong_answer", "no_boxed"]),
                reward=draw.choice([None, 0.0, 0.1, 1.0]), tokens=draw.randrange(1, 9),
                versions=[draw.randrange(step + 1)], text=draw.choice(["100% Ünï_x", "no", "N\\O"]),
            )
            for group in range(20)
        ]  # fmt: skip
        write(folder / f"step_{step:06d}.jsonl", rows)
        lines += [(step, row) for row in rows]
    index = opened()
    for _ in range(60):
        equals = {k: draw.choice(v) for k, v in {
            "task": ["math", "code"], "reason": ["correct", "no_boxed"]}.items()
            if draw.random() < 0.4}  # fmt: skip
        least = {"tokens": 3.0} if draw.random() < 0.4 else {}
        most = {"staleness": 1.0} if draw.random() < 0.4 else {}
        search = draw.choice(["", "0% ", "_X", "o", "\\o"])
        expected = [
            number
            for number, (step, row) in enumerate(lines, 1)
            if all(row[key] == value for key, value in equals.items())
            and row["tokens"] >= least.get("tokens", 0)
            and step - min(row["versions"]) <= most.get("staleness", 9)
            and search.lower() in row["text"].lower() + row["problem"]
        ]
        found = ids(index, Filter(equals=equals, least=least, most=most, search=search))
        assert found == expected


def test_pages_are_in_order_and_do_not_overlap(tmp_path: Path, opened: Callable[[], Index]) -> None:
    rows = [record(0, i, tokens=1 + i % 5) for i in range(23)]
    write(tmp_path / "run" / "rollouts" / "step_000000.jsonl", rows)
    index = opened()
    found: list[dict[str, Any]] = []
    for offset in range(0, 30, 10):
        total, page = index.page(Filter(), order="tokens", is_falling=True, limit=10, offset=offset)
        assert total == 23
        found += page
    assert len({row["id"] for row in found}) == 23
    assert [row["tokens"] for row in found] == sorted((1 + i % 5 for i in range(23)), reverse=True)


def test_kinds_facets_and_staleness(tmp_path: Path, opened: Callable[[], Index]) -> None:
    folder = tmp_path / "run" / "rollouts"
    write(folder / "step_000003.jsonl", [record(0, 0, versions=[1, 2]), record(0, 1, versions=[3])])
    write(folder / "dropped_000003.jsonl", [record(1, 0, dropped="zero_variance")])
    write(folder / "eval_before.aime.jsonl", [record(2, 0)])
    index = opened()
    facets = index.facets()
    assert dict(facets["kind"]) == {"trained": 2, "dropped": 1, "evaluated": 1}
    assert dict(facets["evaluation"]) == {"": 3, "before.aime": 1}
    _, rows = index.page(Filter(), order="step", is_falling=True, limit=9, offset=0)
    ages = {(row["grp"], row["idx"]): row["staleness"] for row in rows}
    assert ages == {(0, 0): 2, (0, 1): 0, (1, 0): None, (2, 0): None}
    assert len(ids(index, Filter(equals={"dropped": "zero_variance"}))) == 1
    (stage_0,) = {row[0] for row in facets["stage"]}
    assert len(ids(index, Filter(equals={"stage": str(stage_0)}))) == 4


def test_what_is_written_later_is_found_and_torn_lines_wait(
    tmp_path: Path, opened: Callable[[], Index], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 64)
    path = tmp_path / "run" / "rollouts" / "step_000000.jsonl"
    write(path, [record(0, 0), record(0, 1, text="a" * 500)], end='{"prompt_id"')
    index = opened()
    assert len(ids(index, Filter())) == 2
    with path.open("a") as file:
        file.write(': "x"')
    assert index.refresh() == 0
    text = path.read_text().rpartition("\n")[0] + "\n"
    path.write_text(text)
    write(path, [record(1, 0, text="later")])
    assert index.refresh() == 1
    (found,) = ids(index, Filter(search="LATER"))
    place = index.place(found)
    assert place is not None and read_record(place).text == "later"
    assert index.place(99) is None


@pytest.mark.parametrize("is_moved", [True, False], ids=["moved", "removed"])
def test_a_repeated_step_takes_the_place_of_the_earlier_one(
    tmp_path: Path, opened: Callable[[], Index], is_moved: bool
) -> None:
    folder = tmp_path / "run" / "rollouts"
    path, other = folder / "step_000001.jsonl", folder / "step_000000.jsonl"
    write(other, [record(0, 0, text="first")])
    write(path, [record(1, index, text="old") for index in range(2)])
    index = opened()
    for seen in (True, False):
        (folder / f"superseded_{seen}").mkdir()
        if is_moved:
            path.rename(folder / f"superseded_{seen}" / path.name)
        else:
            # The file system may use its inode again.
            path.unlink()
        if seen:
            assert index.refresh() == 0
            assert len(ids(index, Filter())) == 1 and dict(index.facets()["task"]) == {"math": 1}
        # Longer than before, with other lines.
        write(path, [record(7, i, text=f"new {seen} " + "x" * 99) for i in range(4)])
        assert index.refresh() == 4
        rows = ids(index, Filter(search="new"))
        assert len(rows) == 4 and len(ids(index, Filter())) == 5
        assert ids(index, Filter(search="old")) == []
        place = index.place(rows[-1])
        assert place is not None and read_record(place).text == f"new {seen} " + "x" * 99
    write(path, [record(7, 4, text="appended")])
    assert index.refresh() == 1
    assert len(ids(index, Filter())) == 6


def test_a_group_is_that_of_its_own_file(tmp_path: Path, opened: Callable[[], Index]) -> None:
    folder = tmp_path / "run" / "rollouts"
    write(folder / "step_000000.jsonl", [record(5, 1), record(5, 0), record(6, 0)])
    write(folder / "eval_before.jsonl", [record(5, 0, text="other")])
    group = opened().group_of(1)
    assert [(row["idx"], row["text"]) for row in group] == [(0, "two"), (1, "two")]


def test_a_folder_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no rollouts"):
        Index(tmp_path, tmp_path / "x.sqlite")
