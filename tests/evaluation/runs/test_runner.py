"""Which folder an evaluation may go on in; the whole of it with real processes is end to end."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml
from megatron_rl.config.tree import Config
from megatron_rl.evaluation.runs.runner import _check_recorded, evaluate
from tests.evaluation.runs.folders import make_set, write_results


def started(folder: Path, label: str = "model", **sections: dict) -> Config:
    """A folder in which an evaluation was begun."""
    values = {
        "run": {"dir": folder}, "model": {"path": folder / "m"}, "train": {"steps": 0},
        "prompts": [{"path": folder / "p.jsonl"}], "checkpoint": {"resume": "never"},
    }  # fmt: skip
    config = Config.model_validate(values | sections)
    folder.mkdir()
    (folder / "config.toml").write_text(dump_toml(config))
    (folder / f"config.{label}.toml").write_text(dump_toml(config))
    return config


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"eval": {"samples": 3}}, "eval.samples"),
        ({"model": {"path": "elsewhere"}}, "model.path"),
        ({"run": {"dir": "X", "seed": 5}}, "run.seed"),
        (
            {"sampling": {"max_new_tokens": 5}, "reward": {"language": 0.1}},
            "reward.language, sampling.max_new_tokens",
        ),
    ],
)
def test_results_of_other_settings_never_mix(tmp_path: Path, changed: dict, named: str) -> None:
    config = started(tmp_path / "run")
    values = config.model_dump(mode="json", exclude_none=True) | changed
    values["run"] = values["run"] | {"dir": config.run.dir}
    with pytest.raises(InputError, match=f"with other values of {named}: name another folder"):
        evaluate(Config.model_validate(values), "model", Console(quiet=True))


def test_results_of_another_label_or_a_training_run_never_mix(tmp_path: Path) -> None:
    config = started(tmp_path / "run")
    with pytest.raises(InputError, match="another run, or another --label"):
        evaluate(config, "other", Console(quiet=True))
    with pytest.raises(InputError, match="name another folder with --out DIR"):
        evaluate(config, "other", Console(quiet=True), option="--out")
    trained = started(tmp_path / "trained", train={"steps": 5})
    with pytest.raises(InputError, match="with other values of train.steps"):
        evaluate(trained, "model", Console(quiet=True))


def test_what_cannot_be_evaluated_is_refused_at_once(tmp_path: Path) -> None:
    config = Config.model_validate({"run": {"dir": tmp_path / "run"}, "eval": {"prompts": 0}})
    with pytest.raises(InputError, match=r"no \[\[eval.sets\]\]"):
        evaluate(config, "model", Console(quiet=True))
    with pytest.raises(InputError, match="it names files"):
        evaluate(Config(), "a/b", Console(quiet=True))
    assert not (tmp_path / "run").exists()


def test_problems_that_a_set_lost_are_not_removed_from_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_results(folder, {"s": {"s/a": [1, 0], "s/b": [0, 0], "s/c": [1, 1]}})
    file = folder / "rollouts" / "eval_model.s.jsonl"
    earlier = file.read_bytes()
    assert len(earlier.splitlines()) == 6
    config = Config.model_validate({"run": {"dir": folder}})
    kept = make_set("s", {"s/a": [], "s/b": [], "s/c": [], "s/d": []}, 2, 1.0)
    assert _check_recorded(config, "model", [kept], "--run-dir") == 0
    prompts = [kept.prompts[0], msgspec.structs.replace(kept.prompts[1], answer="another")]
    changed = replace(kept, prompts=[*prompts, kept.prompts[2]])
    assert _check_recorded(config, "model", [changed], "--run-dir") == 1
    lacking = make_set("s", {"s/a": [], "s/d": []}, 2, 1.0)
    said = r"completions of 2 problems .* set s \(first 's/b'\).* --run-dir DIR"
    with pytest.raises(InputError, match=said):
        _check_recorded(config, "model", [lacking], "--run-dir")
    assert file.read_bytes() == earlier
