"""Models by name, against a hub on loopback: what is fetched, pinned, kept, said when offline.

huggingface_hub reads its environment when it is imported, so each look is a process of its own.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.launcher import model_checks
from megatron_rl.launcher.hub_models import choose_files
from megatron_rl.weights.layout.shape import read_shape
from tests.data.tables.hub_server import FIRST, MODEL, SECOND, Hub, ask_beside, serving
from tests.tiny_models import write_model

_PROGRAM = """
import json, sys
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.launcher.prompt_record import pin_revisions
from megatron_rl.launcher.hub_models import pin_models
config = load_config(None, sys.argv[2:])
try:
    if sys.argv[1] == "sizes":
        config = pin_models(config, None, only_sizes=True)
    else:
        config = pin_revisions(config)
        config.run.dir.mkdir(exist_ok=True)
        (config.run.dir / "config.toml").write_text(dump_toml(config))
    model, reference = config.model, config.algorithm.reference.policy
    print(json.dumps([str(model.path), model.revision, reference]))
except InputError as error:
    print(json.dumps([str(error)]))
"""


def commit(content: bytes) -> dict[str, bytes]:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    return {
        "config.json": b"{}",
        "model-1-of-2.safetensors": content,
        "model-2-of-2.safetensors": content,
        "model.safetensors.index.json": json.dumps(index).encode(),
        "tokenizer.json": b"{}",
        "pytorch_model.bin": b"pickle",
        "modeling.py": b"raise SystemExit('a script was executed')\n",
        "onnx/model.safetensors": b"another format",
    }


def look(hub: Hub | None, home: Path, do: str, *overrides: str, **variables: str) -> list[Any]:
    """What a process with this cache says; without a hub it has no network."""
    arguments = (do, f"model.path={MODEL}", *overrides)
    return ask_beside(hub, home, _PROGRAM, *arguments, **variables)


def test_a_model_is_fetched_by_name_and_a_resumed_run_keeps_its_commit(tmp_path: Path) -> None:
    run = f"run.dir={tmp_path / 'run'}"
    with serving({FIRST: commit(b"one"), SECOND: commit(b"two")}) as hub:
        assert look(hub, tmp_path, "sizes")[1] == FIRST
        assert hub.fetched == ["config.json"]
        path, revision, reference = look(
            hub, tmp_path, "pin", run, f"algorithm.reference.policy={MODEL}"
        )
        folder = Path(path)
        assert (revision, folder.name, reference) == (FIRST, FIRST, path)
        wanted = {
            "config.json", "tokenizer.json", "model.safetensors.index.json",
            "model-1-of-2.safetensors", "model-2-of-2.safetensors",
        }  # fmt: skip
        assert {file.name for file in folder.iterdir()} == wanted
        assert (folder / "model-2-of-2.safetensors").read_bytes() == b"one"
        hub.main = SECOND
        # The run goes on with its own commit; a new one takes the newest.
        assert look(hub, tmp_path, "pin", run)[1] == FIRST
        new = f"run.dir={tmp_path / 'new'}"
        assert look(hub, tmp_path, "pin", new)[1] == SECOND
        assert look(hub, tmp_path, "pin", f"{new}er", f'model.revision="{FIRST}"')[1] == FIRST


def test_without_a_network_the_cache_is_taken_and_its_lack_says_what_to_download(
    tmp_path: Path,
) -> None:
    run = f"run.dir={tmp_path / 'run'}"
    text = look(None, tmp_path, "pin", run, HF_HUB_OFFLINE="1")[0]
    assert f"model.path = {MODEL}: there is no such folder (looked in {Path.cwd()};" in text
    assert f"HF_HUB_OFFLINE is set. On a machine with a network run `hf download {MODEL} " in text
    # A plan says so for a name of the Hub, and for a folder that is not there.
    enough = "(for `plan` and `simulate` one with config.json alone will do)"
    assert f"model.path=FOLDER {enough}" in look(None, tmp_path, "sizes", HF_HUB_OFFLINE="1")[0]
    with pytest.raises(InputError, match=re.escape(f"a Hugging Face model folder {enough}")):
        read_shape(tmp_path / "none")
    cache = tmp_path / "hub" / f"models--{MODEL.replace('/', '--')}"
    folder = cache / "snapshots" / FIRST
    folder.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(FIRST)
    for name, content in commit(b"x").items():
        if "/" not in name:
            (folder / name).write_bytes(content)
    (folder / "model-2-of-2.safetensors").unlink()
    # A shard is missing: config.json alone is enough for a plan, not for a run.
    assert look(None, tmp_path, "sizes") == [str(folder), FIRST, "none"]
    text = look(None, tmp_path, "pin", run, f'model.revision="{FIRST}"')[0]
    assert "the Hub does not answer" in text
    assert f"`hf download {MODEL} --revision {FIRST} --local-dir FOLDER`" in text
    (folder / "model-2-of-2.safetensors").write_bytes(b"x")
    assert look(None, tmp_path, "pin", run, HF_HUB_OFFLINE="1") == [str(folder), FIRST, "none"]


def test_weights_of_mistral_are_fetched_only_where_there_are_no_others() -> None:
    both = ["config.json", "consolidated.safetensors", "model.safetensors", "tekken.json"]
    assert choose_files(both) == ["config.json", "model.safetensors", "tekken.json"]
    alone = ["params.json", "consolidated-00001.safetensors", "a/model.safetensors", "x.bin"]
    assert choose_files(alone) == ["params.json", "consolidated-00001.safetensors"]


def test_a_folder_that_is_not_there_is_named_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(None, ["model.path=mine"])
    with pytest.raises(InputError, match=f"model.path = {tmp_path}/mine: there is no such folder"):
        model_checks.check_model_folder(config.model.path)


def test_weights_that_are_missing_or_cut_off_are_refused(tmp_path: Path) -> None:
    def refusal() -> str:
        with pytest.raises(InputError) as caught:
            model_checks.check_weights(tmp_path, "KEY")
        return str(caught.value).removeprefix(f"KEY: {tmp_path}")

    assert refusal() == " has no *.safetensors: give a Hugging Face folder with weights"
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in names:
        save_file({name: np.ones(8, np.float32)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    assert refusal() == f" has {names[0]} without {index.name}: fetch it"
    index.write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}))
    model_checks.check_weights(tmp_path, "KEY")
    whole = (tmp_path / names[1]).read_bytes()
    (tmp_path / names[1]).unlink()
    assert refusal() == f" lacks 1 of 2 files of weights, such as {names[1]}: fetch them"
    for wrong in (whole[:-1], b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"):
        (tmp_path / names[1]).write_bytes(wrong)
        expected = f"/{names[1]}, of {len(wrong)} bytes, is no whole file of safetensors"
        assert refusal().startswith(expected)
    index.write_text('{"weight_map": []}')
    assert refusal().startswith(f"/{index.name} is no index of safetensors")
    # The trainer takes the single file, if there is one.
    save_file({"w": np.ones(8, np.float32)}, tmp_path / "model.safetensors")
    model_checks.check_weights(tmp_path, "KEY")


def test_weights_are_those_that_the_configuration_means(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    config = tmp_path / "config.json"
    values = json.loads(config.read_text())
    vocab, hidden = values["vocab_size"], values["hidden_size"]

    def check(**changed: int) -> None:
        config.write_text(json.dumps(values | changed))
        model_checks.check_weights(tmp_path, "KEY", read_shape(tmp_path))

    check()
    said = f"KEY: {tmp_path}: model.embed_tokens.weight has shape ({vocab}, {hidden}), but "
    with pytest.raises(InputError, match=re.escape(f"{said}config.json means ({vocab + 1}, ")):
        check(vocab_size=vocab + 1)
    with pytest.raises(InputError, match=f"KEY: {tmp_path} lacks 9 tensors for .* with 2 layers"):
        check(num_hidden_layers=2)
