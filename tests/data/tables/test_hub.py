"""Data sets by name, against a hub on loopback: what is fetched, pinned, kept, said when offline.

huggingface_hub reads its environment when it is imported, so each look is a process of its own.
"""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.tables.hub_server import FIRST, NAME, SECOND, Hub, ask_beside, serving

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

_PROGRAM = """
import json, sys
from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import PromptSource
from megatron_rl.data.sources import read_source
from megatron_rl.data.tables.hub import pinned
source = PromptSource(**json.loads(sys.argv[1]))
try:
    if sys.argv[2] == "pin":
        source = pinned(source)
    reading = read_source(source, 0, key="prompts.kind")
    print(json.dumps([source.revision, [p.answer for p in reading.prompts], reading.notes]))
except InputError as error:
    print(json.dumps([str(error)]))
"""


def table(*answers: str) -> bytes:
    rows = [{"question": f"q{answer}", "answer": f"so\n#### {answer}"} for answer in answers]
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def commit(number: int) -> dict[str, bytes]:
    return {
        "README.md": b"---\nlicense: mit\n---\n# GSM8K\n",
        "gsm8k.py": b"raise SystemExit('a script was executed')\n",
        "main/train-00000-of-00001.parquet": table(str(number), str(number + 1)),
        "main/test-00000-of-00001.parquet": table("500"),
        "socratic/train-00000-of-00001.parquet": table("600"),
    }


def look(
    hub: Hub | None, home: Path, do: str = "read", *, is_offline: bool = False, **source: Any
) -> list[Any]:
    """What a process with this cache says; without a hub it has no network."""
    given = {"kind": "hub", "name": NAME, "subset": "main", "dataset_split": "train", **source}
    variables = {"HF_HUB_OFFLINE": "1"} if is_offline else {}
    return ask_beside(hub, home, _PROGRAM, json.dumps(given), do, **variables)


def test_only_the_wanted_files_are_fetched_and_the_commit_is_pinned(tmp_path: Path) -> None:
    with serving({FIRST: commit(10), SECOND: commit(20)}) as hub:
        revision, answers, notes = look(hub, tmp_path, "pin")
        assert (revision, answers) == (FIRST, ["10", "11"])
        assert f"{NAME} @ {FIRST[:12]} (main, split train): 2 prompts" in notes[0]
        assert sorted(hub.fetched) == ["README.md", "main/train-00000-of-00001.parquet"]
        # The data set moves on: the run that was pinned does not, whoever else looks at main.
        hub.main = SECOND
        assert look(hub, tmp_path)[1] == ["20", "21"]
        assert look(hub, tmp_path, revision=FIRST)[1] == ["10", "11"]
    assert look(None, tmp_path, "pin", revision=FIRST)[:2] == [FIRST, ["10", "11"]]


@pytest.mark.parametrize("source", [{"kind": "auto", "name": "", "path": NAME}, {"kind": "GSM8K"}])
def test_a_name_is_found_on_the_hub_and_pinned_without_its_kind(
    tmp_path: Path, source: dict[str, str]
) -> None:
    [said] = look(None, tmp_path, **source)
    assert f"{NAME} is no folder here" in said and "hf download --repo-type dataset" in said
    with serving({FIRST: commit(10)}) as hub:
        revision, answers, notes = look(hub, tmp_path, "pin", **source)
        assert (revision, answers) == (FIRST, ["10", "11"])
        assert f"{NAME} @ {FIRST[:12]} (main, split train): 2 prompts, read as GSM8K" in notes[0]


def test_wrong_names_revisions_and_splits_are_clear_errors(tmp_path: Path) -> None:
    with serving({FIRST: commit(10)}) as hub:
        assert (
            "the Hub has no data set 'openai/gsm9k'" in look(hub, tmp_path, name="openai/gsm9k")[0]
        )
        [said] = look(hub, tmp_path, revision="v9")
        assert "no data set 'openai/gsm8k' with the revision 'v9'" in said
        [said] = look(hub, tmp_path, dataset_split="")
        assert said.startswith(f"{NAME} has the splits test, train: choose one")
        assert "expected the name of a data set" in look(hub, tmp_path, name="../x")[0]
        assert hub.fetched.count("main/train-00000-of-00001.parquet") == 0


def test_offline_the_error_names_the_command_and_the_folder(tmp_path: Path) -> None:
    [said] = look(None, tmp_path, revision="v1")
    assert "the Hub does not answer" in said
    assert f"hf download --repo-type dataset {NAME} --revision v1 --local-dir FOLDER" in said
    with serving({FIRST: commit(10)}) as hub:
        [said] = look(hub, tmp_path, is_offline=True)
        assert "HF_HUB_OFFLINE is set" in said and hub.fetched == []


def test_a_name_outside_the_folder_is_refused(tmp_path: Path) -> None:
    files = {**commit(10), "../../evil-train.parquet": table("666")}
    with serving({FIRST: files}) as hub:
        assert "names a file outside its folder" in look(hub, tmp_path)[0]
