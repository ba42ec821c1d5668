import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.cli import main as cli
from megatron_rl.cli.run import RunOptions, load, with_tiny
from megatron_rl.config.errors import ConfigError
from megatron_rl.config.files import load_config
from megatron_rl.config.shipped import shipped
from megatron_rl.config.tree import Config
from megatron_rl.data import tiny
from megatron_rl.launcher import model_checks
from tests.cli.command_line.parsed import parse


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    out = io.StringIO()
    monkeypatch.setattr(cli, "open_console", lambda: Console(file=out, width=200))
    return cli.main(["config", *words]), out.getvalue()


def test_what_is_printed_is_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = call(monkeypatch)
    # The default is a folder of the shell's, not one beside this file.
    text = text.replace('path = "model"', f'path = "{Config().model.path}"')
    (tmp_path / "all.toml").write_text(text)
    assert code == 0 and load_config(tmp_path / "all.toml") == load_config(None)


def test_explain_names_default_and_presets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code, text = call(monkeypatch, "explain", "algorithm.policy_loss.eps_high")
    assert code == 0 and "default: 0.28" in text and "preset dr_grpo: 0.2" in text
    assert call(monkeypatch, "explain", "trian.steps")[0] == 2
    assert "near it: train.steps" in caplog.text
    # Names of verl, TRL, slime and prime-rl.
    for name, key in (("lr", "optimizer.lr"), ("rollout.n", "train.group_size"),
                      ("beta", "algorithm.kl.coefficient"), ("tp", "parallel.tensor")):  # fmt: skip
        code, text = call(monkeypatch, "explain", name)
        assert code == 0 and f"{name} is here {key}" in text and "default: " in text
    code, text = call(monkeypatch, "explain", "eps_high")
    assert code == 0 and "eps_high is here algorithm.policy_loss.eps_high" in text
    # Those of items of a list, and of a section.
    code, text = call(monkeypatch, "explain", "data.train_files", "trian.steps")
    assert code == 2 and text.startswith("data.train_files is here prompts.path\nprompts.0.path\n")
    code, text = call(monkeypatch, "explain", "val_files", "train.steps")
    heads = [line for line in text.splitlines() if not line.startswith(" ")]
    assert code == 0 and heads[:2] == ["val_files is here eval.sets", "eval.sets.0.name"]
    assert heads[-2:] == ["eval.sets.0.prompts.columns.pass_rate", "train.steps"]


def test_explain_takes_keys_as_errors_and_files_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, key in (
        ("prompts.faulty", "prompts.0.faulty"),
        ("prompts.2.faulty", "prompts.0.faulty"),
        ("eval.sets.prompts.columns.answer", "eval.sets.0.prompts.columns.answer"),
        ("reward.tasks.math.compare", "reward.tasks.NAME.compare"),
    ):
        code, text = call(monkeypatch, "explain", given)
        assert code == 0 and text.startswith(f"{key}\n")
    code, text = call(monkeypatch, "explain", "reward.tasks.own")
    assert [line for line in text.splitlines() if not line.startswith(" ")] == [
        f"reward.tasks.NAME.{key}" for key in ("format_check", "compare", "environment")
    ]


def test_show_tells_origins_of_several_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[train]\nsteps = 3\n")
    words = ["show", "tiny", "--config", str(mine), "--changed", "--json", "run.seed=4"]
    code, text = call(monkeypatch, *words)
    found = json.loads(text)
    assert code == 0
    assert found["train.steps"] == {"value": 3, "from": str(mine)}
    assert found["run.seed"] == {"value": 4, "from": "command line"}
    assert found["train.group_size"]["from"] == str(shipped()["tiny"])
    assert "expert.weights.deadline_s" not in found


def test_diff_finds_exactly_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("[train]\nsteps = 3\n[[stages]]\nat_step = 1\n")
    second.write_text("[train]\nsteps = 3\n[optimizer]\nlr = 2e-6\n")
    code, text = call(monkeypatch, "diff", str(first), str(second), "--json")
    found = json.loads(text)
    assert code == 1 and found["optimizer.lr"] == [1e-6, 2e-6]
    assert {key.split(".")[0] for key in found} == {"optimizer", "stages"}
    assert call(monkeypatch, "diff", str(first), str(first)) == (0, "no difference\n")
    # The folder of a run is given by a path; a bare name is the shipped configuration's.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.toml").write_text(first.read_text())
    assert call(monkeypatch, "diff", "./tiny", str(first)) == (0, "no difference\n")
    code, text = call(monkeypatch, "diff", "tiny", str(shipped()["tiny"]))
    assert (code, text) == (0, "no difference\n")


def test_a_run_takes_layers_and_names(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[train]\nsteps = 3\n")
    options = parse(["run", "--config", "tiny", "--config", str(mine), "run.seed=4",
                     "model.path=m", "run.dir=r"])  # fmt: skip
    config = load(options.config, options.overrides, options.run_dir)
    tiny = load_config(shipped()["tiny"])
    assert (config.train.steps, config.run.seed) == (3, 4)
    assert config.train.group_size == tiny.train.group_size


def test_the_list_names_every_shipped_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = call(monkeypatch, "list")
    assert code == 0 and all(name in text for name in shipped())


def test_the_list_says_what_each_shipped_configuration_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    lines = {line.split()[0]: line for line in call(monkeypatch, "list")[1].splitlines()}
    assert lines["tiny"].split()[1] == "nothing"
    assert "model.path, prompts.0.path  " in lines["one_gpu"]
    assert "model.path, prompts.0.path, sft.dataset" in lines["quickstart"]
    # Name, needs, and what it is.
    assert all(len(re.split(r"\s{2,}", lines[name].strip())) == 3 for name in shipped())


def test_tiny_by_name_makes_its_model_and_tasks_where_none_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "TRAIN", 40)
    monkeypatch.setattr(tiny, "HELD_OUT", 10)
    monkeypatch.setattr(tiny, "SFT_EXAMPLES", 20)
    run_dir = tmp_path / "first"
    options = RunOptions(["tiny"], [f"run.dir={run_dir}", "run.seed=3"])
    files = with_tiny(options, None)
    start = run_dir / "start"
    assert files == ["tiny", str(start / "paths.toml")]
    config = load(files, options.overrides, None)
    model_checks.check_model_folder(config.model.path)
    assert config.model.path == start / "model" and config.sft.dataset.is_file()
    assert len(config.prompts) == 1 and config.prompts[0].path.is_file()
    # The same command finds them again; another folder serves a dry run.
    changed = start.stat().st_mtime_ns
    assert with_tiny(options, None) == files and start.stat().st_mtime_ns == changed
    assert with_tiny(options, tmp_path / "dry")[1] == str(tmp_path / "dry" / "paths.toml")
    named = RunOptions(["tiny"], ["model.path=/mine", "run.dir=/none"])
    assert with_tiny(named, None) == ["tiny"]
    assert with_tiny(RunOptions(["one_gpu"], []), None) == ["one_gpu"]
    with pytest.raises(ConfigError, match="run.dir is not given"):
        with_tiny(RunOptions(["tiny"], []), None)


def test_import_writes_a_configuration_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script, out = tmp_path / "grpo.py", tmp_path / "ours.toml"
    script.write_text("GRPOConfig(num_generations=4, wibble=1)")
    code, text = call(monkeypatch, "import", str(script), "--out", str(out))
    assert code == 0 and "1 mapped, 0 default here, 0 without counterpart, 1 unknown" in text
    assert load_config(out).train.group_size == 4
    assert call(monkeypatch, "import", str(script))[1] == out.read_text()
    assert call(monkeypatch, "import", str(script), "--out", str(out))[0] == 2
    assert "is there already" in caplog.text
    script.write_text("GRPOConfig(num_generations=1)")
    code, text = call(monkeypatch, "import", str(script))
    assert code == 1 and "it does not load yet" in text


def test_import_refuses_an_objective_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, out = tmp_path / "grpo.py", tmp_path / "ours.toml"
    script.write_text("GRPOConfig(num_generations=4, loss_type='sapo')")
    code, text = call(monkeypatch, "import", str(script), "--out", str(out))
    assert code == 1 and not out.exists()
    assert all(word in text for word in ("loss_type = 'sapo'", "dr_grpo", "nearest, dapo"))
