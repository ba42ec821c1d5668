"""Bad files are refused with all that is wrong in them."""

from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.sweep.sweep_file import load_sweep
from tests.sweep.places import SWEEP, write_sweep


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        load_sweep(write_sweep(folder, text))
    return str(caught.value)


def test_base_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    sweep = load_sweep(write_sweep(tmp_path / "deep", SWEEP.replace("base.toml", "../base.toml")))
    assert sweep.base == tmp_path / "base.toml"
    assert sweep.seeds == [0, 1] and [variant.name for variant in sweep.variants] == ["low", "high"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seeds =", "seed =", "unknown key 'seed'; did you mean 'seeds'?"),
        ("overrides = [\"optimizer.lr=0.5\"]", "overides = []", "did you mean 'overrides'?"),
        ("timeout_s = 60", "[slurm]\ngpus_a_node = 4", "did you mean 'gpus_per_node'?"),
        ("[0, 1]", "[0, 1, 0]", "seeds: 0 is given twice"),
        ("[0, 1]", "[]", "seeds: List should have at least 1 item"),
        ('"high"', '"low"', "variants: 'low' is given twice"),
        ('"high"', '"../high"', "variants.1.name: String should match"),
        ('"high"', '"lock"', "variants: 'lock' is a file of the sweep: give another name"),
        ('"accuracy_after"', '"acuracy"', "'acuracy' is not a key of summary.json; did you mean"),
        ("optimizer.lr=0.5", "run.seed=5", "run.seed is set by the sweep"),
        ("optimizer.lr=0.5", "run.dir=x", "run.dir is set by the sweep"),
        ("timeout_s = 60", "timeout_s = 0", "timeout_s: Input should be greater than 0"),
        ("timeout_s = 60", '[grid]\n"train.steps" = []', "grid.'train.steps' has no values"),
        ("timeout_s = 60", '[grid]\n"optimizer.lr" = [1]', "'low' and the grid both set optimizer"),
        ("timeout_s = 60", '[slurm]\noptions = ["p"]', "'p' is not of the form --name=value"),
        ("name =", "name", "is not valid TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert SWEEP.count(old) >= 1
    assert words in refusal(tmp_path, SWEEP.replace(old, new))


def test_all_errors_are_shown_together(tmp_path: Path) -> None:
    text = refusal(tmp_path, SWEEP.replace("seeds =", "seed =").replace("= 60", "= -1"))
    assert "unknown key 'seed'" in text and "timeout_s: " in text


def test_nothing_to_compare_and_no_file_are_refused(tmp_path: Path) -> None:
    assert "nothing to compare" in refusal(tmp_path, 'name = "a"\nbase = "base.toml"\n')
    with pytest.raises(InputError, match="cannot read the sweep .*nowhere"):
        load_sweep(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes('name = "é"'.encode("latin-1"))
    with pytest.raises(InputError, match="cannot read the sweep .*latin.toml: .*utf-8"):
        load_sweep(tmp_path / "latin.toml")
