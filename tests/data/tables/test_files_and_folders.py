"""Files of all formats, folders of all kinds, memory, order and ids of rows, choices and faults."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.evaluation import EvalSet
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.prompts import read_prompts
from megatron_rl.data.tables.folders import find_files
from megatron_rl.data.tables.source import RowFault, read_files

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(first, first + count)]


def write(path: Path, content: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(content)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".arrow":
        # As `datasets` does: the stream format.
        with pyarrow.OSFile(str(path), "wb") as file:
            with pyarrow.ipc.new_stream(file, table.schema) as writer:
                writer.write_table(table, max_chunksize=2)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def answers(path: Path, **source: Any) -> list[str]:
    return [prompt.answer for prompt in read_files(PromptSource(path=path, **source)).prompts]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "arrow"])
def test_the_same_rows_in_every_format(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"mine.{suffix}", rows(0, 1100))
    prompts = read_files(PromptSource(path=path)).prompts
    assert [prompt.answer for prompt in prompts] == [str(n) for n in range(1, 1101)]
    assert [prompt.id for prompt in prompts] == [f"mine:{n}" for n in range(1, 1101)]
    row = "1100" if suffix == "jsonl" else "row 1100"
    assert prompts[-1].place == f"{path}:{row}"


def test_arrow_in_the_file_format(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    table = pyarrow.Table.from_pylist(rows(0, 3))
    with pyarrow.OSFile(str(path), "wb") as file:
        with pyarrow.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    assert answers(path) == ["1", "2", "3"]


def test_shards_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for shard in (2, 0, 1):
        write(tmp_path / f"data/train-0000{shard}-of-00003.parquet", rows(10 * shard, 2))
    prompts = read_files(PromptSource(path=tmp_path)).prompts
    assert [prompt.answer for prompt in prompts] == ["1", "2", "11", "12", "21", "22"]
    assert prompts[3].id == "data/train-00001-of-00003:2"
    # A filter changes no id: those of a run that goes on with fewer rows are the same.
    kept = read_files(PromptSource(path=tmp_path, where=["answer in ['12', '21']"])).prompts
    assert [prompt.id for prompt in kept] == [prompts[3].id, prompts[4].id]
    os.remove(tmp_path / "data/train-00001-of-00003.parquet")
    with pytest.raises(InputError, match="holds 2 of the 3 files"):
        answers(tmp_path)


def test_a_folder_of_the_hub_has_subsets_and_splits(tmp_path: Path) -> None:
    for number, name in enumerate(("main/train", "main/test", "socratic/train", "socratic/test")):
        write(tmp_path / f"{name}-00000-of-00001.parquet", rows(number * 10, 1))
    with pytest.raises(InputError, match=r"subsets main, socratic: choose one by prompts\.subset"):
        answers(tmp_path)
    with pytest.raises(InputError, match=r"splits test, train: choose .*prompts\.dataset_split"):
        answers(tmp_path, subset="main")
    with pytest.raises(InputError, match="no split 'dev': it has test, train"):
        answers(tmp_path, subset="main", dataset_split="dev")
    with pytest.raises(InputError, match="no subset 'mian': it has main, socratic"):
        answers(tmp_path, subset="mian")
    assert answers(tmp_path, subset="main", dataset_split="test") == ["11"]
    assert answers(tmp_path, subset="socratic", dataset_split="train") == ["21"]


def test_files_without_a_split_are_not_lost_beside_a_split_for_evaluation(tmp_path: Path) -> None:
    for number, name in enumerate(("math", "code", "test")):
        write(tmp_path / f"mine/{name}.jsonl", rows(10 * number, 1))
    (tmp_path / "mine/figures.csv").write_text("name,rows\nmath,1\n")
    with pytest.raises(InputError, match=r"splits test, train: choose .*prompts\.dataset_split"):
        answers(tmp_path / "mine")
    assert answers(tmp_path / "mine", dataset_split="train") == ["11", "1"]
    assert answers(tmp_path / "mine", dataset_split="test") == ["21"]
    # A table about a set for evaluation is none of its splits.
    write(tmp_path / "bench/test.jsonl", rows(5, 1))
    (tmp_path / "bench/figures.csv").write_text("name,rows\ntest,1\n")
    assert answers(tmp_path / "bench") == ["6"]
    # A folder with a split to train on names all of its rows.
    write(tmp_path / "whole/train.jsonl", rows(0, 1))
    write(tmp_path / "whole/notes.json", rows(7, 1))
    assert answers(tmp_path / "whole") == ["1"]


def test_a_folder_for_evaluation_is_no_default_beside_folders_with_rows(tmp_path: Path) -> None:
    for number, name in enumerate(("math/a", "code/a", "dev/a")):
        write(tmp_path / f"{name}.jsonl", rows(10 * number, 1))
    said = r"subsets code, math: choose one by prompts\.subset .*, or the split validation by prom"
    for split in ("", "train"):
        with pytest.raises(InputError, match=said):
            answers(tmp_path, dataset_split=split)
    assert answers(tmp_path, subset="math") == ["1"]
    assert answers(tmp_path, dataset_split="validation") == ["21"]


def test_readme_says_which_files_are_which(tmp_path: Path) -> None:
    write(tmp_path / "en/a-1.parquet", rows(0, 1))
    write(tmp_path / "en/a-2.parquet", rows(1, 1))
    write(tmp_path / "en/b.parquet", rows(50, 1))
    write(tmp_path / "all.jsonl", rows(70, 1))
    (tmp_path / "README.md").write_text(
        "---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n"
        "  - split: train\n    path: en/a-*\n  - split: test\n    path:\n    - en/b.parquet\n"
        "- config_name: flat\n  data_files: all.jsonl\n---\n# A data set\n"
    )
    assert answers(tmp_path, dataset_split="train") == ["1", "2"]
    assert answers(tmp_path, dataset_split="test") == ["51"]
    assert answers(tmp_path, subset="flat") == ["71"]


@pytest.mark.parametrize("pattern", ["../secret.jsonl", "/etc/passwd", "https://x/y.jsonl"])
def test_readme_names_no_file_outside_its_folder(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "secret.jsonl", rows(0, 1))
    folder = tmp_path / "set"
    write(folder / "a.jsonl", rows(0, 1))
    (folder / "README.md").write_text(f"---\nconfigs:\n- data_files: '{pattern}'\n---\n")
    with pytest.raises(InputError, match="outside the folder"):
        find_files(folder)


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
COPIES = "a0: &a0 {x: y}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (f"{BOMB}configs:\n- data_files: [*a11]\n", "expected a split and a path, got list"),
        (f"{BOMB}configs:\n- data_files: [{{split: train, path: [*a11]}}]\n", "path is a list"),
        (f"{BOMB}configs:\n- data_files: [{{split: *a11, path: '*'}}]\n", "split is a list"),
        (f"{BOMB}configs:\n- config_name: *a11\n  data_files: '*'\n", "config_name is a list"),
        (COPIES, "merge keys"),
        ("day: 2024-13-45\n", "its head is no YAML"),
        ("a: " + "[" * 5000 + "\n", "its head is no YAML"),
    ],
    ids=["file", "path", "split", "name", "merge", "date", "deep"],
)
def test_a_short_readme_takes_neither_time_nor_memory(
    tmp_path: Path, head: str, message: str
) -> None:
    # Aliases of YAML: each list of ten holds the one before, 10^11 texts in all.
    write(tmp_path / "a.jsonl", rows(0, 1))
    (tmp_path / "README.md").write_text(f"---\n{head}---\n")
    with pytest.raises(InputError, match=rf"README\.md: .*{message}") as error:
        find_files(tmp_path)
    assert len(str(error.value)) < 1000


def test_aliases_that_repeat_a_text_are_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", rows(0, 1))
    (tmp_path / "README.md").write_text(
        "---\nfile: &file a.jsonl\nconfigs: &all\n- config_name: 2024\n  data_files: *file\n"
        "more: *all\n---\n"
    )
    assert answers(tmp_path, subset="2024") == ["1"]
    (tmp_path / "README.md").write_text("---\nconfigs: 7\n---\n")
    assert answers(tmp_path) == ["1"]


def saved(folder: Path, content: list[dict[str, Any]], shards: int = 1) -> None:
    size = len(content) // shards
    names = [f"data-0000{n}-of-0000{shards}.arrow" for n in range(shards)]
    for number, name in enumerate(names):
        write(folder / name, content[number * size : (number + 1) * size])
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    saved(tmp_path / "one", rows(0, 6), shards=2)
    assert answers(tmp_path / "one") == [str(n) for n in range(1, 7)]
    for number, split in enumerate(("train", "test")):
        saved(tmp_path / "dict" / split, rows(number, 1))
    (tmp_path / "dict/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert answers(tmp_path / "dict", dataset_split="test") == ["2"]
    os.remove(tmp_path / "one/data-00001-of-00002.arrow")
    with pytest.raises(InputError, match="names data-00001-of-00002.arrow, which is not there"):
        answers(tmp_path / "one")


def test_what_datasets_really_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    content = [{**row, "messages": [{"role": "user", "content": "x"}]} for row in rows(0, 50)]
    one = datasets.Dataset.from_list(content).select([7, 3, 40])
    one.save_to_disk(tmp_path / "one")
    assert answers(tmp_path / "one") == ["8", "4", "41"]
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(content), test=one)
    both.save_to_disk(tmp_path / "dict", num_shards={"train": 3, "test": 1})
    assert answers(tmp_path / "dict", dataset_split="train") == [str(n) for n in range(1, 51)]
    one.to_parquet(tmp_path / "one.parquet")
    assert answers(tmp_path / "one.parquet") == ["8", "4", "41"]


def test_memory_is_bounded_by_a_batch_and_unread_columns_cost_nothing(tmp_path: Path) -> None:
    """200 MB of worked solutions beside short questions, in row groups of 10 MB."""
    path = tmp_path / "big.parquet"
    schema = pyarrow.schema([(name, pyarrow.string()) for name in ("problem", "answer", "example")])
    with parquet.ParquetWriter(path, schema, compression="none") as writer:
        for group in range(20):
            content = [
                {"problem": f"p{group} {n}", "answer": "1", "example": os.urandom(10_000).hex()}
                for n in range(500)
            ]
            writer.write_table(pyarrow.Table.from_pylist(content, schema=schema))
    assert path.stat().st_size > 200e6
    program = (
        "import sys, pyarrow\n"
        "from pathlib import Path\n"
        "from megatron_rl.config.prompts import PromptSource\n"
        "from megatron_rl.data.tables.source import read_files\n"
        "found = read_files(PromptSource(path=Path(sys.argv[1]))).prompts\n"
        # Not ru_maxrss, which begins at what the parent had.
        "[peak] = [line.split()[1] for line in open('/proc/self/status') if 'VmHWM' in line]\n"
        "print(len(found), pyarrow.default_memory_pool().max_memory(), int(peak) * 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    count, pool, peak = map(int, done.stdout.split())
    # The sample of the first rows reads all columns: pages and a column chunk of 10 MB.
    assert count == 10_000 and pool < 45e6 and peak < 200e6, (pool, peak)


def test_columns_may_be_named_and_conditions_combined(tmp_path: Path) -> None:
    content = [
        {"text": f"q{n}", "gold": {"value": n}, "kind": "a" if n % 2 else "b", "rate": n / 10,
         "tests": None}
        for n in range(10)
    ]  # fmt: skip
    path = write(tmp_path / "a.parquet", content)
    with pytest.raises(InputError, match=r"no column of questions; it has text, gold, gold\.value"):
        answers(path)
    columns = {"question": "text", "answer": "gold.value"}
    assert answers(path, columns=columns) == [str(n) for n in range(10)]
    where = ["kind == 'a'", "rate >= 0.3", "gold.value not in [7]"]
    assert answers(path, columns=columns, where=where) == ["3", "5", "9"]
    with pytest.raises(InputError, match="has no such column; it has text"):
        answers(path, columns={**columns, "id": "uid"})


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("lvl == 3", "has no column 'lvl'; it has question, answer"),
        ("answer ~ 3", "expected a column, one of"),
        ("answer in 3", "in and not in take a list"),
        ("answer == [3]", "in and not in take a list"),
        ("answer == __import__('os')", "as TOML writes it"),
        ("answer == 3\nx = 1", "in and not in take a list|expected a column"),
        ("answer < 3", r"row 1: .*'<' not supported"),
    ],
)
def test_wrong_conditions_are_clear_errors(tmp_path: Path, where: str, message: str) -> None:
    path = write(tmp_path / "a.parquet", rows(0, 2))
    with pytest.raises(InputError, match=message):
        answers(path, where=[where])


def test_a_question_is_cut_and_put_into_a_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"prompt": "Q: two? Box it.", "answer": "2"}])
    source = PromptSource(
        path=path, strip_prefix="Q: ", strip_suffix=" Box it.", template="Compute {question}"
    )
    assert read_files(source).prompts[0].question == "Compute two?"


def test_faults_are_told_one_by_one_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = ['{"question": "q", "answer": "1"}', "{no json", '{"question": "q2"}', "",
             '{"answer": "3"}', '{"question": "q3", "answer": "1", "split": "test"}',
             '{"question": "q4", "answer": "1", "spilt": "train"}']  # fmt: skip
    path.write_text("\n".join(lines))
    told: list[RowFault] = []
    assert len(read_files(PromptSource(path=path), told.append).prompts) == 1
    assert [(fault.place, fault.reason) for fault in told] == [
        (f"{path}:2", "no_json"), (f"{path}:3", "no_answer"), (f"{path}:5", "no_question"),
        (f"{path}:6", "malformed"), (f"{path}:7", "malformed"),
    ]  # fmt: skip
    assert "did you mean 'split'" in told[4].text


def test_tests_of_no_known_form_are_bad_tests(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"question": "q", "input_output": '{"inputs": ["1"], "outputs": ["2"]}'},
            {"question": "r", "input_output": '{"inputs": ["1"], "outputs": []}'},
            {"question": "s", "input_output": "no json"}]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, rows)))
    told: list[RowFault] = []
    assert len(read_files(PromptSource(path=path), told.append).prompts) == 1
    assert [fault.reason for fault in told] == ["bad_tests", "bad_tests"]
    assert "1 inputs but 0 outputs" in told[0].text


def test_a_column_named_as_ours_with_other_values_is_not_taken(tmp_path: Path) -> None:
    others = {"split": "test", "task": "algebra", "language": "English", "pass_rate": 7.0}
    content = [{"question": f"q{n}", "answer": "1", "id": n % 2, **others} for n in range(4)]
    prompts = read_files(PromptSource(path=write(tmp_path / "a.parquet", content))).prompts
    assert {prompt.task for prompt in prompts} == {"math"}
    assert {(prompt.language, prompt.pass_rate) for prompt in prompts} == {("", None)}
    assert [prompt.id for prompt in prompts] == [f"a:{n}" for n in range(1, 5)]


def test_ids_that_repeat_later_give_way_to_those_of_rows(tmp_path: Path) -> None:
    content = [{"question": f"q{n}", "answer": "1", "id": f"x{n % 100}"} for n in range(150)]
    path = write(tmp_path / "a.parquet", content)
    prompts = read_files(PromptSource(path=path)).prompts
    assert [prompt.id for prompt in prompts] == [f"a:{n}" for n in range(1, 151)]
    sources = [PromptSource(path=path, columns={"id": "id"})]
    said = r"source 0: id 'x0' occurs twice \(.*a.parquet:row 1 and .*a.parquet:row 101\)"
    with pytest.raises(InputError, match=said):
        read_prompts(sources, seed=0).divide()


def test_mixture_and_evaluation_sets_of_data_sets(tmp_path: Path) -> None:
    write(tmp_path / "gsm/train-00000-of-00001.parquet", rows(0, 20))
    write(tmp_path / "gsm/test-00000-of-00001.parquet", rows(18, 4))
    saved(tmp_path / "disk", rows(100, 10))
    train, test = (
        PromptSource(path=tmp_path / "gsm", dataset_split=split, held_out_share=0)
        for split in ("train", "test")
    )
    disk = PromptSource(path=tmp_path / "disk", held_out_share=0, weight=3.0)
    sets = read_prompts(
        [train, disk], seed=0, eval_sets=[EvalSet(name="gsm", prompts=test)]
    ).divide()
    # Two of the questions are asked in the evaluation set, too.
    assert [len(prompts) for prompts in sets.train] == [18, 10] and sets.weights == [1.0, 3.0]
    assert [prompt.answer for prompt in sets.eval_sets["gsm"]] == ["19", "20", "21", "22"]
    assert sets.duplicates_removed == 2 and len(sets.notes) == 3 and len(sets.files) == 3


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.json"])
def test_a_damaged_file_is_a_clear_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"[{PAR1 nonsense")
    with pytest.raises(InputError, match=f"cannot read the prompts .*{name}"):
        answers(tmp_path / name)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_binary_file_with_text_that_is_no_utf_8_is_a_clear_error(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / name, [{"question": "caf_ " * 4, "answer": "1"}])
    path.write_bytes(path.read_bytes().replace(b"_", b"\xe9"))
    with pytest.raises(InputError, match=f"cannot read the prompts .*{name}: .*(?i:utf-?8)"):
        answers(path)


def test_other_formats_and_empty_folders_are_clear_errors(tmp_path: Path) -> None:
    (tmp_path / "load.py").write_text("raise SystemExit('executed')")
    with pytest.raises(InputError, match="holds no prompts.*a script is not run|script is not run"):
        answers(tmp_path)
    with pytest.raises(InputError, match="of no format that is read: expected .jsonl"):
        answers(tmp_path / "load.py")
