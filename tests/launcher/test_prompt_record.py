"""Files of prompts and their digests in the run folder; what a run that goes on refuses."""

import json
from pathlib import Path

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.evaluation import EvalSet
from megatron_rl.config.files import ConfigError, dump_toml, load_config
from megatron_rl.config.prompts import PromptSource
from megatron_rl.config.tree import Config, RunConfig
from megatron_rl.data.prompts import PromptStream, material_of_run, prompts_of_run
from megatron_rl.launcher.prompt_record import RECORD, pin_revisions, record_prompts

COMMIT = "0123456789" * 4


def config_of(folder: Path, *sources: PromptSource) -> Config:
    return Config(run=RunConfig(dir=folder), prompts=list(sources))


def test_digests_are_those_of_xxhsum(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"abc")
    record_prompts(config_of(tmp_path, PromptSource(path=path)), [path], [path], is_resumed=False)
    # XXH3 of 128 bits of "abc", as the reference implementation gives it.
    expected = {"path": str(path), "bytes": 3, "xxh3_128": "06b05ab6733a618578af5f94892f3950"}
    assert json.loads((tmp_path / RECORD).read_text()) == {
        "files": [expected], "hub": [], "own": [expected["xxh3_128"]], "code": []
    }  # fmt: skip


def test_a_changed_file_is_refused_when_the_run_goes_on(tmp_path: Path) -> None:
    path, other = tmp_path / "mine.jsonl", tmp_path / "eval.jsonl"
    path.write_text("one\n")
    other.write_text("two\n")
    config = config_of(tmp_path, PromptSource(path=path))
    record_prompts(config, [path, other], [path], is_resumed=False)
    record_prompts(config, [path], [path], is_resumed=True)
    record_prompts(config, [path, other], [path], is_resumed=True)
    path.write_text("One\n")
    with pytest.raises(InputError, match=r"mine\.jsonl has changed since .* Put the old file back"):
        record_prompts(config, [path, other], [path], is_resumed=True)
    # A new run in the folder begins with what there is.
    record_prompts(config, [path, other], [path], is_resumed=False)
    record_prompts(config, [path, other], [path], is_resumed=True)


def test_other_files_of_prompts_are_refused_and_moved_ones_are_not(tmp_path: Path) -> None:
    old, moved, changed, held = (tmp_path / f"{name}.jsonl" for name in ("a", "b", "c", "eval"))
    for path, text in ((old, "one\n"), (moved, "one\n"), (changed, "ONE\n"), (held, "two\n")):
        path.write_text(text)
    config, at_moved, at_changed = (
        config_of(tmp_path, PromptSource(path=path)) for path in (old, moved, changed)
    )
    record_prompts(config, [old], [old], is_resumed=False)
    # Files of evaluation sets come and go.
    record_prompts(config, [old, held], [old], is_resumed=True)
    with pytest.raises(InputError, match=r"began \(.*a\.jsonl\), .* Give files with the same"):
        record_prompts(at_changed, [changed, held], [changed], is_resumed=True)
    record_prompts(at_moved, [moved], [moved], is_resumed=True)
    both = config_of(tmp_path, PromptSource(path=moved), PromptSource(path=changed))
    with pytest.raises(InputError, match="others than those with which the run began"):
        record_prompts(both, [moved, changed], [moved, changed], is_resumed=True)


def test_files_of_an_evaluation_set_in_the_same_folder_are_not_those_of_prompts(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / "data" / f"{split}.jsonl" for split in ("train", "test")]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text(json.dumps({"question": f"{path.stem}?", "answer": "1"}) + "\n")
    source = PromptSource(path=paths[0].parent, dataset_split="train", task="exact")
    alone = config_of(tmp_path, source)
    other = source.model_copy(update={"dataset_split": "test"})
    sets = alone.eval.model_copy(update={"sets": [EvalSet(name="test", prompts=other)]})
    for config, files in ((alone, paths[:1]), (alone.model_copy(update={"eval": sets}), paths)):
        material = material_of_run(config)
        assert (material.own_files, material.files) == ((paths[0],), tuple(files))


def test_configurations_without_the_hub_stay_as_they_are(tmp_path: Path) -> None:
    config = config_of(tmp_path, PromptSource(path=tmp_path / "mine.jsonl"))
    assert pin_revisions(config) is config


def test_a_run_that_goes_on_keeps_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network and a cache the error names the revision that was looked for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    source = PromptSource(kind="hub", name="openai/gsm8k")
    earlier = source.model_copy(update={"revision": COMMIT})
    (tmp_path / "config.toml").write_text(dump_toml(config_of(tmp_path, earlier)))
    with pytest.raises(InputError, match=f"--revision {COMMIT} --local-dir"):
        pin_revisions(config_of(tmp_path, source))
    # The same name, found without a kind.
    for same in (PromptSource(path=Path("openai/gsm8k")), PromptSource(name="openai/gsm8k")):
        with pytest.raises(InputError, match=f"--revision {COMMIT} --local-dir"):
            pin_revisions(config_of(tmp_path, same))
    # Another data set in its place has no commit yet.
    other = PromptSource(kind="hub", name="openai/gsm8k", subset="socratic")
    with pytest.raises(InputError, match="openai/gsm8k --local-dir"):
        pin_revisions(config_of(tmp_path, other))


def test_each_source_of_one_data_set_keeps_its_own_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache/datasets--mine--set"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache.parent))
    commits = [str(number) * 40 for number in range(4)]
    for commit in commits:
        (cache / "snapshots" / commit).mkdir(parents=True)
        (cache / "snapshots" / commit / "rows.jsonl").write_text('{"question": "q", "answer": "1"}')
    (cache / "refs").mkdir()

    def pin(versions: str, sets: str, refs: dict[str, int]) -> list[str]:
        """Commits of [[prompts]] and evaluation sets of these revisions, and the run's new file."""
        for name, number in refs.items():
            (cache / "refs" / name).write_text(commits[number])
        sources = [PromptSource(kind="hub", name="mine/set", revision=one) for one in versions]
        config = config_of(tmp_path, *sources)
        evaluated = [
            EvalSet(name=f"of_{one}", prompts=sources[0].model_copy(update={"revision": one}))
            for one in sets
        ]
        own = config.eval.model_copy(update={"sets": evaluated})
        found = pin_revisions(config.model_copy(update={"eval": own}))
        (tmp_path / "config.toml").write_text(dump_toml(found))
        both = [*found.prompts, *(one.prompts for one in found.eval.sets)]
        return [one.revision[0] for one in both]

    assert pin("ab", "cb", {"a": 0, "b": 1, "c": 2}) == ["0", "1", "2", "1"]
    moved = {"a": 3, "b": 3, "c": 3}
    assert pin("ab", "cb", moved) == ["0", "1", "2", "1"]
    # Evaluation sets come and go.
    assert pin("ab", "b", moved) == ["0", "1", "1"]


def write_sums(path: Path, count: int) -> None:
    lines = [json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) for n in range(count)]
    path.write_text("\n".join(lines))


def test_epochs_become_steps_of_the_prompts_that_are_drawn(tmp_path: Path) -> None:
    write_sums(tmp_path / "mine.jsonl", 25)
    (tmp_path / "mine.toml").write_text(
        "[train]\nepochs = 3\nprompts_per_batch = 4\n"
        '[[prompts]]\npath = "mine.jsonl"\nheld_out_share = 0\n'
        '[[prompts]]\nname = "unused"\npath = "mine.jsonl"\nheld_out_share = 0\nweight = 0\n'
    )
    model = f"model.path={tmp_path}"
    config = pin_revisions(load_config(tmp_path / "mine.toml", [model]))
    # 3 x 25 groups in batches of 4: 18.75.
    assert (config.train.steps, config.train.epochs) == (19, 0)
    with pytest.raises(
        ConfigError, match=r"train\.steps of command line and train\.epochs of .*toml"
    ):
        load_config(tmp_path / "mine.toml", [model, "train.steps=5"])
    stage = ["stages.0.at_step=1", "stages.0.train.prompts_per_batch=2"]
    with pytest.raises(InputError, match=r"stages of \[2, 4\] groups a batch: give train\.steps"):
        pin_revisions(load_config(tmp_path / "mine.toml", [model, *stage]))


def test_epochs_count_no_prompt_of_a_source_that_is_held_out_whole(tmp_path: Path) -> None:
    for name, count in (("mine", 25), ("held", 7)):
        lines = [json.dumps({"question": f"{n} + {name}?", "answer": str(n)}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.toml").write_text(
        "[train]\nepochs = 3\nprompts_per_batch = 4\n"
        '[[prompts]]\npath = "held.jsonl"\nheld_out_share = 1\n'
        '[[prompts]]\npath = "mine.jsonl"\nheld_out_share = 0\n'
    )
    given = [f"model.path={tmp_path}"]
    assert pin_revisions(load_config(tmp_path / "mine.toml", given)).train.steps == 19
    with pytest.raises(InputError, match="train.epochs=3 counts no prompt"):
        pin_revisions(load_config(tmp_path / "mine.toml", [*given, "prompts.1.held_out_share=1"]))


def test_epochs_count_the_spare_prompts_that_no_evaluation_holds_out(tmp_path: Path) -> None:
    write_sums(tmp_path / "mine.jsonl", 200)
    (tmp_path / "mine.toml").write_text(
        "[train]\nepochs = 1\nprompts_per_batch = 1\n"
        '[[prompts]]\npath = "mine.jsonl"\nheld_out_share = 0.5\n'
    )
    for held_out in (0, 20):
        given = [f"model.path={tmp_path}", f"eval.prompts={held_out}"]
        config = pin_revisions(load_config(tmp_path / "mine.toml", given))
        assert config.train.steps == 200 - held_out
        stream = PromptStream(prompts_of_run(config), config.run.seed)
        # One epoch draws each prompt once, and leaves none out.
        assert len({stream.next().id for _ in range(config.train.steps)}) == 200 - held_out


def test_stop_strings_of_the_model_join_those_of_the_run(tmp_path: Path) -> None:
    model, path = f"model.path={tmp_path}", tmp_path / "generation_config.json"
    given = load_config(None, [model, 'sampling.stop=["</answer>"]', f"run.dir={tmp_path}"])
    for written, expected in [
        ("<|eot|>", ["</answer>", "<|eot|>"]),
        (["\nUser:", "</answer>", "\nUser:"], ["</answer>", "\nUser:"]),
        (None, ["</answer>"]),
    ]:
        path.write_text(json.dumps({"eos_token_id": 2, "stop_strings": written}))
        found = pin_revisions(given)
        assert found.sampling.stop == expected
        # Evaluations and rollouts read them from the saved file, and a resumed run adds none twice.
        (tmp_path / "config.toml").write_text(dump_toml(found))
        saved = load_config(tmp_path / "config.toml")
        assert saved.sampling.stop == expected == pin_revisions(saved).sampling.stop
        (tmp_path / "config.toml").unlink()
    path.write_text(json.dumps({"stop_strings": [1]}))
    with pytest.raises(InputError, match=r"stop_strings=\[1\] is no text and no list of texts"):
        pin_revisions(given)
    path.write_text(json.dumps({"stop_strings": "###"}))
    with pytest.raises(InputError, match=r"stop_strings=\['###'\], and generator.engine='vllm'"):
        pin_revisions(load_config(None, [model, "generator.engine=vllm", f"run.dir={tmp_path}"]))
