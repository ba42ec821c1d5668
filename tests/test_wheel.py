"""The wheel: holds all that the product reads, and works in an environment without a clone."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from megatron_rl import __version__
from megatron_rl.config.files import load_config
from megatron_rl.config.shipped import shipped
from tests.wheel_venv import ROOT, Installed, build_wheel, copy_tree, tracked_files

pytestmark = [pytest.mark.slow(40), pytest.mark.timeout(300)]

PACKAGES = ("megatron_rl/", "generation/", "verification/")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    copy_tree(folder)
    return folder


@pytest.fixture(scope="module")
def wheel(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(clone, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(wheel, tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="module")
def start(installed: Installed) -> Path:
    """Folder with a model and tasks for `--config tiny`."""
    made = installed.call("python", "-m", "megatron_rl.data.tiny", "start")
    assert made.returncode == 0, made.stderr
    return installed.elsewhere / "start"


def test_the_wheel_holds_every_file_of_the_packages_and_the_examples(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {name for name in tracked_files() if name.startswith(PACKAGES)}
    shipped = [*ROOT.glob("examples/*.toml"), *ROOT.glob("examples/recipes/*.toml")]
    expected |= {f"megatron_rl/{path.relative_to(ROOT)}" for path in shipped}
    assert names == expected
    assert f"-{__version__}-" in wheel.name


def test_a_second_build_has_nothing_of_what_was_deleted(clone: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    subprocess.run(["cp", "-r", f"{clone}/.", source], check=True, timeout=60)
    late = source / "megatron_rl" / "config" / "late.py"
    late.write_text("")
    (tmp_path / "first").mkdir()
    with zipfile.ZipFile(build_wheel(source, tmp_path / "first")) as archive:
        assert "megatron_rl/config/late.py" in archive.namelist()
    late.unlink()
    with zipfile.ZipFile(build_wheel(source, tmp_path / "second")) as archive:
        assert "megatron_rl/config/late.py" not in archive.namelist()


def test_a_wheel_of_the_source_package_is_the_same(
    clone: Path, wheel: Path, tmp_path: Path, installed: Installed
) -> None:
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    made = subprocess.run(
        [installed.python, "-c", program], cwd=clone, capture_output=True, text=True, timeout=200
    )
    assert made.returncode == 0, made.stderr
    (package,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(package) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    again = build_wheel(source, tmp_path / "again")
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(again) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_modules_come_from_the_wheel(installed: Installed) -> None:
    program = (
        "import generation, megatron_rl, verification\n"
        "print(*(m.__file__ for m in (generation, megatron_rl, verification)), sep='\\n')"
    )
    done = installed.call("python", "-c", program)
    assert done.returncode == 0, done.stderr
    assert [Path(line).parent.parent for line in done.stdout.split()] == [installed.packages] * 3
    hidden = installed.call("python", "-c", "import tools.versions")
    assert "ModuleNotFoundError" in hidden.stderr


def test_doctor_finds_the_components(installed: Installed) -> None:
    done = installed.call("megatron-rl", "doctor")
    # Little memory or disk at the moment is no fault of the wheel.
    assert done.returncode in (0, 1), done.stderr
    rows = [line for line in done.stdout.splitlines() if "megatron-core" in line]
    assert rows, done.stdout + done.stderr
    assert len(rows) == 1 and "ok" in rows[0] and "missing" not in done.stdout.rpartition("└")[0]


def test_every_shipped_configuration_is_there_by_name(installed: Installed) -> None:
    listed = installed.call("megatron-rl", "config", "list")
    assert listed.returncode == 0, listed.stderr
    assert {line.split()[0] for line in listed.stdout.splitlines()[1:]} >= set(shipped())
    shown = installed.call("megatron-rl", "config", "show", "magistral_24b", "--json")
    found = json.loads(shown.stdout)["train.prompts_per_batch"]
    expected = load_config(ROOT / "examples" / "magistral_24b.toml").train.prompts_per_batch
    where = str(installed.packages / "megatron_rl" / "examples" / "magistral_24b.toml")
    assert found == {"value": expected, "from": where}


def test_the_tree_of_settings_is_the_same(installed: Installed) -> None:
    done = installed.call("megatron-rl", "config")
    path = installed.elsewhere / "all.toml"
    model = f"model.path={ROOT / 'model'}"
    path.write_text(done.stdout)
    assert load_config(path, [model]) == load_config(None, [model])


_LIGHT_ALONE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HEAVY:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

HEAVY = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, Missing())
from megatron_rl.cli import main as cli
sys.exit(cli.main(sys.argv[1:]))
"""


def test_the_wheel_alone_brings_what_doctor_config_and_plan_need(
    wheel: Path, installed: Installed, tmp_path: Path
) -> None:
    """All that is neither a requirement of the wheel nor needed by one is hidden."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    needed = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    light = [one for one in needed if one.marker is None]
    for file in ("cpu", "gpu"):
        pins = (Requirement(pin) for pin in read_pins(file))
        versions = {canonical(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
        assert all(one.specifier.contains(versions[canonical(one.name)]) for one in light), file
    assert [str(one.specifier) for one in needed if one.name == "wandb" and 'wandb"' in str(one)]
    names = closure(one.name for one in light)
    provided = importlib.metadata.packages_distributions()
    hidden = {
        module for module, owners in provided.items() if not {canonical(o) for o in owners} & names
    }
    hidden -= {"megatron_rl", "generation", "verification", "__editable___megatron_rl_finder"}
    assert {"torch", "transformers", "sglang", "megatron", "pyarrow", "huggingface_hub"} <= hidden
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    plan = ("plan", "one_gpu", f"model.path={tmp_path}", "prompts.0.path=/none")
    for words in (("doctor",), ("config",), ("config", "explain", "train.steps"), plan):
        done = installed.call("python", "-c", _LIGHT_ALONE, ",".join(hidden), *words)
        assert "Error" not in done.stderr, (words, done.stderr)
        assert done.returncode in ((0, 1) if words == ("doctor",) else (0,)), (words, done.stderr)


def closure(names: Iterable[str]) -> set[str]:
    """Distributions of these names, and what they need."""
    found: set[str] = set()
    waiting = [canonical(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            for text in importlib.metadata.requires(name) or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    waiting.append(canonical(requirement.name))
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(file: str) -> list[str]:
    lines = (ROOT / "requirements" / f"{file}.txt").read_text().splitlines()
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 96, "max_position_embeddings": 65536,
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


def run_words(start: Path, *words: str) -> tuple[str, ...]:
    return ("run", "--config", "tiny", "--config", str(start / "paths.toml"), *words)


def test_a_dry_run_by_name_finds_that_a_reward_can_be_earned(
    installed: Installed, start: Path
) -> None:
    done = installed.call("megatron-rl", *run_words(start, "--run-dir", "dry", "--dry-run"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (installed.elsewhere / "dry").exists()


def test_what_tiny_makes_is_what_the_quickstart_makes(start: Path, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "quickstart.sh").read_text()
    (line,) = (line for line in text.splitlines() if "tools.make_tasks sort" in line)
    options = line.partition('--seed "$SEED"')[2].split()
    subprocess.run(
        [*(sys.executable, "-m", "tools.make_tasks", "sort", tmp_path, "--seed", "0"), *options],
        cwd=ROOT, check=True, timeout=200, capture_output=True,
    )  # fmt: skip
    for name in ("prompts.jsonl", "sft.jsonl"):
        assert (tmp_path / name).read_bytes() == (start / "tasks" / name).read_bytes()


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_whole_run_needs_no_clone(installed: Installed, start: Path) -> None:
    done = installed.call(
        "megatron-rl",
        *run_words(start, "--run-dir", "whole", "sft.steps=20", "train.steps=2", "eval.prompts=64"),
        timeout_s=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir = installed.elsewhere / "whole"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["eval_n"] == 64
    reported = installed.call("megatron-rl", "report", "whole", timeout_s=120)
    assert reported.returncode == 0, reported.stderr
    assert (run_dir / "report.html").stat().st_size > 100_000
