"""Dry runs: every shipped configuration passes, what would start is said, and nothing is left."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from megatron_rl.cli.main import main
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.shipped import FOLDER, shipped
from megatron_rl.config.tree import PromptSource
from megatron_rl.launcher import nodes
from megatron_rl.launcher.dry_run_text import run_lines
from megatron_rl.protocol.checkpoint_folder import CHECKPOINTS, QUEUE_STATE, seal
from megatron_rl.protocol.queue_state import (
    CurriculumState,
    PromptCursor,
    PromptVisits,
    QueueState,
    StageState,
    UnfinishedEvaluation,
    UnfinishedGroup,
)
from tests.analysis.planted import plant
from tests.launcher.test_dry_run import LINES, write_byte_tokenizer
from tests.launcher.test_examples import ALL, COMMON, RECIPES
from tests.plan.test_plan import LLAMA_8B
from tests.weights.made_up import write_zeros

pytestmark = pytest.mark.usefixtures("forked_tokenizer_children")
SHAPES = {example.name: {**COMMON, **example.shape} for example in ALL}
SHAPES["magistral_stages"] = SHAPES["magistral_24b"]
TRAIN_PROMPTS = 60
"""Of the file of `files`: a quarter of 80 lines is held out."""
ASKED = {
    "sft.steps=0": "would do: 7 steps of reinforcement learning, then evaluations",
    "train.steps=0": "would do: cold start of 5 steps, then evaluations",
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model whose weights take no room, prompts and SFT examples."""
    model = tmp_path / "model"
    model.mkdir()
    write_byte_tokenizer(model)
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    write_zeros(model)
    # Enough of each task to hold some out and to fill a batch.
    lines = [line | {"id": f"{n}-{number}"} for n, line in enumerate(LINES[:2])
             for number in range(40)]  # fmt: skip
    for number, line in enumerate(lines):
        line["messages"] = [
            message | {"content": f"{message['content']} ({number})"}
            for message in line["messages"]
        ]
        line["split"] = "held_out" if number % 4 == 0 else "train"
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    trace = {"messages": [{"role": "user", "content": "1+1="}],
             "response": "<think>2</think>\\boxed{2}"}  # fmt: skip
    (tmp_path / "sft.jsonl").write_text((json.dumps(trace) + "\n") * 4)
    return tmp_path


def given(files: Path, *more: str) -> list[str]:
    return [
        f"run.dir={files / 'run'}", f"model.path={files / 'model'}",
        f"prompts.0.path={files / 'prompts.jsonl'}", *more,
    ]  # fmt: skip


def hub_keys(source: PromptSource, prefix: str) -> list[str]:
    """Words that take a data set of the Hub away, for which a file stands."""
    keys = ("name", "subset", "dataset_split") if source.kind == "auto" else ()
    return [f"{prefix}.{key}=" for key in keys if getattr(source, key)]


def save(run_dir: Path, step: int, **changes: Any) -> Path:
    """A checkpoint of a run of `given`, without weights. changes: fields of the queue's state."""
    (partial := run_dir / CHECKPOINTS / "step.partial").mkdir(parents=True)
    state = QueueState(step, PromptCursor(0, [0], [TRAIN_PROMPTS], seed=0), 0, [], [])
    state = msgspec.structs.replace(state, **changes)
    (partial / QUEUE_STATE).write_bytes(msgspec.json.encode(state))
    return seal(partial, step, {})


def left_by(files: Path) -> set[str]:
    return {path.name for path in files.iterdir()}


def command_of(name: str) -> list[str]:
    """What examples/launch.sh checks an example with, on the hosts that its script asks for."""
    script = FOLDER / f"{name}.sh"
    text = script.read_text() if script.exists() else ""
    asked = re.search(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE)
    nodes = next((one.nodes for one in RECIPES if one.name == name and one.nodes > 1), None)
    nodes = asked.group(1) if asked else nodes
    return ["prepare", "--nodes", str(nodes)] if nodes else ["run"]


@pytest.mark.slow(40)
@pytest.mark.usefixtures("torch_for_gpus")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name.startswith("recipes/") else ())
        for name in shipped()
    ],
)
def test_every_shipped_configuration_passes_on_nodes_of_8_gpus(
    name: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    before = left_by(files)
    (files / "model" / "config.json").write_text(json.dumps(SHAPES.get(name, LLAMA_8B)))
    write_zeros(files / "model")
    config = load_config(shipped()[name])
    words = given(files, "eval.prompts=10")
    for number, source in enumerate(config.prompts):
        if source.kind == "reasoning_gym":
            words.append(f"prompts.{number}.kind=files")
        words.append(f"prompts.{number}.path={files / 'prompts.jsonl'}")
        words += hub_keys(source, f"prompts.{number}")
    for number in range(len(config.eval.sets)):
        words += [
            f"eval.sets.{number}.prompts.path={files / 'prompts.jsonl'}",
            f"eval.sets.{number}.problems=10",
        ]
        words += hub_keys(config.eval.sets[number].prompts, f"eval.sets.{number}.prompts")
    if config.sft.steps:
        words.append(f"sft.dataset={files / 'sft.jsonl'}")
    # The prompts here are longer than what the smallest models are asked.
    if config.generator.context_tokens < 2048:
        words += ["generator.context_tokens=4096", "generator.kv_tokens=65536"]
    command = command_of(name)
    code = main([*command, "--config", name, "--dry-run", *words])
    text = capsys.readouterr().out
    places = f"on {command[-1]} nodes: " if "--nodes" in command else "on the GPUs of this node: "
    assert places in text and "would start: " in text
    assert f"would write {files / 'run'}: config.toml" in text
    assert text.rstrip().endswith("Dry run: nothing was started.")
    assert code == 0 and left_by(files) == before, text


@pytest.mark.usefixtures("torch_for_gpus")
def test_a_run_of_several_nodes_says_its_places_or_how_many_nodes_it_needs(
    files: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    # 4 trainer ranks, then 7 engines of 2 GPUs: 2 fit the first node, 4 the second, 1 is left.
    words = ["--config", "one_node", "parallel.tensor=1", "parallel.data=4", "eval.prompts=4",
             *given(files, "generator.replicas=7", "generator.tensor_parallel=2")]  # fmt: skip
    assert main(["prepare", "--dry-run", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "7 generator (sglang, 2 wide), 3 verifiers" in text
    assert "on 3 nodes: 4 trainer ranks on node 0; generator-0 on [4, 5] of node 0" in text
    assert "generator-6 on [0, 1] of node 2 ports" in text
    for command in (["prepare", "--nodes", "2"], ["run"]):
        caplog.clear()
        assert main([*command, *words]) == 2 and "need 3 nodes of 8 GPUs" in caplog.text
    caplog.clear()
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert main(["prepare", *words]) == 2 and "need 3 nodes of 8 GPUs" in caplog.text
    assert not (files / "run").exists()


def test_prepare_says_on_a_node_without_gpus_that_node_needs_their_number(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = ["prepare", "--dry-run", "--nodes", "2", "--config", "one_node", "eval.prompts=4",
             *given(files, "parallel.tensor=1", "generator.replicas=1")]  # fmt: skip
    for more, is_warned in ([], True), (["--gpus-per-node", "1"], False):
        assert main([*words, *more]) == 0
        text = capsys.readouterr().out
        assert ("give --gpus-per-node 1 here, and to `megatron-rl node`" in text) is is_warned
        assert ("on 2 nodes: 1 trainer ranks on node 0; generator-0" in text) is not is_warned


def test_a_model_too_large_for_the_memory_of_a_cpu_host_is_said(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    memory = psutil.virtual_memory()._replace(total=int(20e9))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    words = ["run", "--config", "one_gpu", "--dry-run", "eval.prompts=4", "sft.steps=0"]
    others = ["generator.colocate=false", "weights.method=reshard", "model.dtype=bfloat16"]
    main([*words, *others, *given(files)])
    # 8.03e9 parameters x (2 + 2 + 16) bytes.
    text = capsys.readouterr().out
    assert "note: a run on this host would be refused: this host lists no GPU" in text
    assert "memory of 20.0 GB" in text and "take 160.6 GB" in text
    assert text.rstrip().endswith("Dry run: nothing was started.")


@pytest.mark.parametrize(("words", "said"), ASKED.items())
def test_what_a_run_would_start_is_said(files: Path, words: str, said: str) -> None:
    asked = (
        "train.steps=7", "sft.steps=5", f"sft.dataset={files / 'sft.jsonl'}", "eval.prompts=4",
        "parallel.tensor=2", "generator.replicas=3", "expert.ports.prompts=5001", words,
    )  # fmt: skip
    config = load_config(shipped()["one_gpu"], given(files, "generator.colocate=false", *asked))
    lines = run_lines(config)
    assert lines[0] == said
    assert lines[1] == (
        "would start: 2 trainer ranks, 1 rollout queue, 3 generator (sglang, 1 wide), 1 verifier"
    )
    assert "ports on 127.0.0.1: prompts 5001, 7 free ones, chosen at the start" in lines
    # 8.03e9 parameters in bfloat16.
    name = "final" if words == "sft.steps=0" else "cold_start"
    assert any(f"to hf/: {name} (16.1 GB each" in line for line in lines)


def test_a_dry_run_says_what_the_folder_holds_and_goes_on(
    files: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["run", "--config", "tiny", "--dry-run", "sft.steps=0", "eval.prompts=10",
             "expert.render.form_known=true",
             "generator.context_tokens=4096", "generator.kv_tokens=65536"]  # fmt: skip
    others = [word for word in given(files) if not word.startswith("model.path=")]
    (files / "run").mkdir()
    try:
        (files / "run" / "config.toml").write_text("[train]\nsteps = 3\n")
        assert main([*words, *others, "--model", str(files / "model")]) == 0
    finally:
        shutil.rmtree(files / "run")
    text = capsys.readouterr().out
    assert "note: a run would be refused: " in text and "already holds a run" in text
    assert text.rstrip().endswith("Dry run: nothing was started.")
    try:
        saved = save(files / "run", 2)
        (files / "run" / "config.toml").write_text("[train]\nsteps = 3\n")
        assert main([*words, *others, "--model", str(files / "model")]) == 0
        told = f"note: a run would resume from {saved}; what came before is"
        text = capsys.readouterr().out
        assert told in text and "\nchanged: optimizer.lr: 1e-06 -> 0.0004\n" in text
        # Of many changes most are told by their number.
        assert text.count("\nchanged: ") == 20 and "more keys; config.toml has" in text
        record = {"files": [], "hub": [], "own": ["digest of other prompts"]}
        (files / "run" / "prompts.json").write_text(json.dumps(record))
        torn = files / "run" / "checkpoints" / "step_000004"
        torn.mkdir()
        assert main([*words, *others, "--model", str(files / "model")]) == 0
        text = capsys.readouterr().out
        assert "note: a run would be refused: the files of [[prompts]] are others" in text
        assert f"warning: {torn} is passed over: it has no file COMPLETE" in text
        assert main([*words, *others, "--model", str(files / "model"), "run.seed=5"]) == 2
    finally:
        shutil.rmtree(files / "run")
    assert f"[{TRAIN_PROMPTS}] train prompts with run.seed=0; this run has 1 of" in caplog.text
    assert "with run.seed=5: resume with the prompts and the seed" in caplog.text


_VISITED = CurriculumState(1, [], {"gone": PromptVisits(1, 0, False)}, 0)
_BEGUN = UnfinishedEvaluation("step_1", 1, has_begun=True)


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({"stages": StageState([0, 1, 2], [])}, [], "was in stage 2, but this configuration has"),
        ({"unfinished": [UnfinishedGroup(3, "gone")]}, [], "names the prompt 'gone'"),
        ({"curriculum": _VISITED}, ["curriculum.retire_after=1"], "curriculum names the prompt"),
        ({"unfinished_evaluations": [_BEGUN]}, [], "eval_step_1.jsonl"),
    ],
)
def test_a_saved_state_that_the_queue_would_refuse_is_refused_before_the_folder_changes(
    files: Path, changes: dict[str, Any], words: list[str], message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    run_dir = files / "run"
    save(run_dir, 2, **changes)
    (run_dir / "rollouts").mkdir()
    contents = {"config.toml": "", "summary.json": "{}", "rollouts/eval_step_1.jsonl": "x\n{}\n"}
    for name, content in contents.items():
        (run_dir / name).write_text(content)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    command = ["run", "--config", "tiny", *given(files), "sft.steps=0", "eval.prompts=10",
               "generator.context_tokens=4096", "generator.kv_tokens=65536", *words]  # fmt: skip
    for one in (command, [*command, "--dry-run"]):
        caplog.clear()
        assert main(one) == 2
        assert message in caplog.text and "same command" not in caplog.text
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_cold_start_alone_needs_no_queue(
    files: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    before = left_by(files)
    words = ["sft", "--config", "tiny", "--dry-run", *given(files)]
    assert main([*words, f"sft.dataset={files / 'sft.jsonl'}", "generator.context_tokens=4096",
                 "generator.kv_tokens=65536"]) == 0  # fmt: skip
    text = capsys.readouterr().out
    assert "would do: cold start of 140 steps\n" in text
    assert "would start: 2 trainer ranks\n" in text and "rollout queue" not in text
    assert left_by(files) == before
    assert main([*words, "sft.steps=0"]) == 2
    assert "sft.steps is 0" in caplog.text


def test_evaluations_and_grading_say_how_much_is_missing(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = left_by(files)
    words = ["eval", str(files / "model"), "--config", "tiny", "--dry-run", "eval.prompts=20",
             "generator.context_tokens=4096", "generator.kv_tokens=65536"]  # fmt: skip
    assert main([*words, *given(files)]) == 0
    text = capsys.readouterr().out
    assert f"would evaluate {files / 'model'} as 'model': 20 of 20 problems" in text
    assert "1 rollout queue, 1 generator (sglang, 1 wide), 1 verifier" in text
    assert "trainer" not in text
    words = ["data", "grade", str(files / "prompts.jsonl"), "--model", str(files / "model")]
    assert main([*words, "--out", str(files / "graded"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "80 of 80 problems" in text and f"would write {files / 'graded'}: " in text
    assert main([*words, "--out", str(files / "graded"), "--dry-run", "--samples", "0"]) == 2
    assert left_by(files) == before


def test_analyses_and_conversions_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders, _ = plant(tmp_path, [(0.0, 0.0), (4.0, 0.0), (0.0, 2.0)])
    out = tmp_path / "out"
    words = ["analyse", "weights", *map(str, folders), "--out", str(out), "--no-plots"]
    assert main([*words, "--dry-run"]) == 0 and not out.exists()
    assert str(folders[0]) in capsys.readouterr().out
    assert main(words) == 0
    capsys.readouterr()
    words = ["analyse", "plane", "--out", str(out), "--write", str(tmp_path / "grid")]
    assert main([*words, "--points", "3", "--at-most", "4", "--dry-run", "--no-plots"]) == 0
    assert "would write 4 of 9 models" in capsys.readouterr().out
    target = tmp_path / "megatron"
    assert main(["convert", str(folders[0]), str(target), "--dry-run"]) == 0
    assert "hf to megatron" in (text := capsys.readouterr().out) and "Dry run" in text
    assert main(["convert", str(folders[0]), str(tmp_path), "--dry-run"]) == 2
    assert not target.exists() and not (tmp_path / "grid").exists()


def test_run_of_several_nodes_is_prepared_again_to_resume(files: Path) -> None:
    words = given(files, "eval.prompts=4", "sft.steps=0", "ports.host=127.0.0.2", "train.steps=9")
    words += ["generator.context_tokens=4096", "generator.kv_tokens=65536"]
    config = load_config(shipped()["tiny"], words)
    wrong = load_config(shipped()["tiny"], [*words, "ports.host=192.0.2.1"])
    with pytest.raises(InputError, match="is 192.0.2.1 an address of this machine"):
        nodes.prepare(wrong, Console(quiet=True))
    # What it left, keys and no configuration, is no other run.
    assert not (files / "run" / "config.toml").exists()
    prepared = nodes.prepare(config, Console(quiet=True))
    keys = {path: path.read_bytes() for path in prepared.ports.keys_dir.iterdir()}
    save(files / "run", 6)
    again = nodes.prepare(config, Console(quiet=True))
    assert again.ports.keys_dir == prepared.ports.keys_dir
    assert {path: path.read_bytes() for path in again.ports.keys_dir.iterdir()} == keys
    assert (files / "run" / "config.until_step_000006.toml").exists()
