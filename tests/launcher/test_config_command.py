import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from megatron_rl.config.files import load_config
from megatron_rl.config.shipped import shipped
from megatron_rl.config.tree import Config
from megatron_rl.launcher import cli
from megatron_rl.launcher.run_command import load
from tests.launcher.command_line.parsed import parse


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    out = io.StringIO()
    monkeypatch.setattr(cli, "Console", lambda: Console(file=out, width=200))
    return cli.main(["config", *words]), out.getvalue()


def test_what_is_printed_is_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = call(monkeypatch)
    (tmp_path / "all.toml").write_text(text)
    assert code == 0 and load_config(tmp_path / "all.toml") == Config()


def test_explain_names_default_and_presets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code, text = call(monkeypatch, "explain", "algorithm.surrogate.eps_high")
    assert code == 0 and "default: 0.28" in text and "preset dr_grpo: 0.2" in text
    assert call(monkeypatch, "explain", "trian.steps")[0] == 2
    assert "near it: train.steps" in caplog.text
    # Names of verl, TRL, slime and prime-rl.
    for name, key in (("lr", "optimizer.lr"), ("rollout.n", "train.group_size"),
                      ("beta", "algorithm.kl.coefficient"), ("tp", "parallel.tensor")):  # fmt: skip
        caplog.clear()
        assert call(monkeypatch, "explain", name)[0] == 2
        assert f"near it: {key}" in caplog.text


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
    assert "weights.deadline_s" not in found


def test_diff_finds_exactly_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("[train]\nsteps = 3\n[[stages]]\nat_step = 1\n")
    second.write_text("[train]\nsteps = 3\n[optimizer]\nlr = 2e-6\n")
    code, text = call(monkeypatch, "diff", str(first), str(second), "--json")
    found = json.loads(text)
    assert code == 1 and found["optimizer.lr"] == [1e-6, 2e-6]
    assert {key.split(".")[0] for key in found} == {"optimizer", "stages"}
    assert call(monkeypatch, "diff", str(first), str(first)) == (0, "no difference\n")


def test_a_run_takes_layers_and_names(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[train]\nsteps = 3\n")
    options = parse(["run", "--config", "tiny", "--config", str(mine), "run.seed=4"])
    config = load(options.config, options.overrides, options.run_dir)
    tiny = load_config(shipped()["tiny"])
    assert (config.train.steps, config.run.seed) == (3, 4)
    assert config.train.group_size == tiny.train.group_size


def test_the_list_names_every_shipped_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = call(monkeypatch, "list")
    assert code == 0 and all(name in text for name in shipped())
