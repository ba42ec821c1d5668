"""`megatron-rl init`: what it writes loads, fits the GPUs, and is ten lines."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli.init import InitOptions, configuration, init
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.data.tables.source import read_files
from megatron_rl.launcher.placement import place

CPU = Path("/proc/cpuinfo")


@pytest.mark.parametrize("gpus", [0, 1, 2, 3, 8])
def test_what_is_written_loads_and_fits(gpus: int, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    path = tmp_path / "made" / "my.toml"
    output = io.StringIO()
    options = InitOptions(path, "/models/mine", str(tmp_path / "train.jsonl"), "math", gpus, 50)
    assert init(options, Console(file=output, width=200)) == 0
    config = load_config(path)
    assert (config.train.steps, str(config.model.path)) == (50, "/models/mine")
    assert config.prompts[0].path == tmp_path / "train.jsonl"
    assert f"run --config {path} --dry-run" in output.getvalue()
    if gpus:
        [roles] = place(config, nodes=1, gpus_per_node=gpus)
        used = {
            *range(roles.trainer_ranks),
            *(gpu for one in roles.engines.values() for gpu in one),
        }
        assert used == set(range(gpus))
    # Emulated bfloat16 is slow, and a GPU has its own.
    is_slow = not gpus and not {"avx512_bf16", "amx_bf16"} & set(CPU.read_text().split())
    assert config.model.dtype == ("float32" if is_slow else "bfloat16")
    keys = [line for line in path.read_text().splitlines() if " = " in line]
    assert len(keys) <= 11
    with pytest.raises(InputError, match="my.toml exists: name another file"):
        init(options, Console(file=output))


def test_paths_are_those_of_the_current_folder_and_missing_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    output = io.StringIO()
    options = InitOptions(Path("made/my.toml"), "qwen", "train.jsonl", "math", 0, 3)
    assert init(options, Console(file=output, width=200)) == 0
    config = load_config(tmp_path / "made" / "my.toml")
    assert config.prompts[0].path == tmp_path / "train.jsonl"
    assert config.model.path == tmp_path / "qwen"
    text = output.getvalue()
    assert "warning: model qwen is not on this machine" in text and "warning: data" not in text


def test_data_whose_columns_are_not_found_is_told_and_the_file_is_written(tmp_path: Path) -> None:
    data, path, output = tmp_path / "train.jsonl", tmp_path / "my.toml", io.StringIO()
    options = InitOptions(path, "/models/mine", str(data), "math", 0, 3)
    data.write_text('{"my_prompt": "1+1=", "gold": "2"}\n')
    assert init(options, Console(file=output)) == 0 and path.exists()
    text = output.getvalue()
    assert "warning: a run would refuse the data as it is: " in text
    assert "it has my_prompt, gold: name one by prompts.columns.question" in text
    path.unlink()
    data.write_text('{"question": "1+1=", "answer": "2"}\n')
    output = io.StringIO()
    assert init(options, Console(file=output)) == 0 and "refuse the data" not in output.getvalue()


def test_a_data_set_of_the_hub_is_named(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(configuration("Qwen/Qwen3-0.6B", "openai/gsm8k", "math", 0, 3))
    config = load_config(path)
    assert (config.prompts[0].kind, config.prompts[0].name) == ("hub", "openai/gsm8k")
    assert str(config.model.path) == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["train-00000-of-00001", "mine"])
def test_a_folder_with_splits_is_trained_on_one_and_evaluated_on_the_other(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "data").mkdir()
    for split, count in ((name, 5), ("test-00000-of-00001", 3)):
        rows = [{"question": f"{split} {n}?", "answer": f"#### {n}"} for n in range(count)]
        file = tmp_path / "data" / f"{split}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "my.toml"
    options = InitOptions(path, "m", str(tmp_path / "data"), "math", 0, 3)
    assert init(options, Console(file=io.StringIO())) == 0
    config = load_config(path)
    assert (config.prompts[0].dataset_split, len(config.prompts)) == ("train", 1)
    [held_out] = config.eval.sets
    assert (held_out.name, held_out.prompts.dataset_split) == ("test", "test")
    assert (held_out.problems, config.eval.samples, config.eval.prompts) == (32, 1, "auto")
    counts = [len(read_files(one).prompts) for one in (config.prompts[0], held_out.prompts)]
    assert counts == [5, 3]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "maths"}, "task 'maths' is none of math, exact"),
        ({"steps": 0}, "steps='0' is not a whole number of at least 1"),
        ({"model": None, "gpus": None}, "give --model --gpus: nobody can be asked"),
    ],
)
def test_bad_answers_write_nothing(
    changed: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    given = {"model": "m", "data": "d", "task": "math", "gpus": 0, "steps": 5} | changed
    with pytest.raises(InputError, match=message):
        init(InitOptions(tmp_path / "my.toml", **given), Console(file=io.StringIO()))  # type: ignore[arg-type]
    assert not (tmp_path / "my.toml").exists()
