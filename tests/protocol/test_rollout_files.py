"""Recorded rollouts are read back from files that are written out by hand here."""

import collections
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.protocol.rollout_files import read_records, read_rollouts, rollout_files

PROMPT, TOKENS, LOGPROBS = [5, 6, 7], [11, 12], [-0.5, -0.25]
OLD_LINE = {
    "prompt_id": "p", "group": 3, "index": 1, "task": "math", "problem": "1+1?", "language": "",
    "text": "2", "answer": "2", "reward": 1.0, "parts": {"correct": 1.0}, "reason": "correct",
    "tokens": 2, "versions": [4, 5], "finish_reason": "stop", "seed": 9, "prompt_tail": "",
}  # fmt: skip
"""Without the fields that were added later."""
LINE = OLD_LINE | {
    "generator": "generator-0", "prompt_tokens": 3, "spans": [[4, 0, 1], [5, 1, 2]],
    "times": {"leased": 10.5, "done": 12.0, "scored": 12.5}, "words": [1, 4],
}  # fmt: skip
# A word of another rollout stands first.
WORDS = struct.pack("<i3i2i2f", 99, *PROMPT, *TOKENS, *LOGPROBS)


def write(
    run_dir: Path, *lines: dict[str, Any], name: str = "step_000002", words: bytes = WORDS
) -> Path:
    folder = run_dir / "rollouts"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path.with_suffix(".int32").write_bytes(words)
    return path


def test_a_rollout_is_read_with_its_arrays(tmp_path: Path) -> None:
    write(tmp_path, LINE)
    (rollout,) = read_rollouts(tmp_path)
    assert rollout.prompt_ids.tolist() == PROMPT and rollout.token_ids.tolist() == TOKENS
    assert rollout.logprobs.tolist() == LOGPROBS
    assert [(s.version, s.start, s.end) for s in rollout.spans] == [(4, 0, 1), (5, 1, 2)]
    assert (rollout.reward, rollout.parts, rollout.reason) == (1.0, {"correct": 1.0}, "correct")
    assert (rollout.times.done, rollout.times.trained) == (12.0, None)
    assert (rollout.source.step, rollout.line, rollout.dropped) == (2, 1, "")


def test_files_come_by_step_with_what_was_dropped_first_and_evaluations_last(
    tmp_path: Path,
) -> None:
    names = [
        "dropped_000002", "step_000002", "dropped_000010", "step_999999", "step_1000000",
        "dropped_eval_before", "eval_before", "eval_step_4",
    ]  # fmt: skip
    for name in [*reversed(names), "notes", "step_x"]:
        write(tmp_path, LINE, name=name)
    aside = tmp_path / "rollouts" / "superseded_1"
    aside.mkdir()
    (aside / "step_000003.jsonl").touch()
    files = rollout_files(tmp_path)
    assert [file.path.stem for file in files] == names
    assert [file.step for file in files] == [2, 2, 10, 999_999, 1_000_000, None, None, None]
    assert [file.label for file in files[5:]] == ["before", "before", "step_4"]
    assert [file.path.stem for file in files if file.is_dropped] == [names[i] for i in (0, 2, 5)]
    assert len(list(read_rollouts(tmp_path))) == len(names)


@pytest.mark.parametrize("kept", [1, 100, -1])
def test_a_last_line_that_was_cut_short_is_left_out_and_counted(tmp_path: Path, kept: int) -> None:
    path = write(tmp_path, LINE, LINE)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    path.write_bytes(whole[:first] + whole[first:][:kept])
    torn: collections.Counter[str] = collections.Counter()
    assert [rollout.line for rollout in read_rollouts(tmp_path)] == [1]
    assert len(list(read_records(path, torn))) == 1 and torn == {str(path): 1}


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({}, WORDS[:-4], r"needs words 1 to 4 and 4 to 8 of .*, which has 7"),
        ({"words": [-1, 4]}, WORDS, r"needs words -1 to 2"),
        ({"tokens": 3}, WORDS + b"\0" * 8, r"do not fit 3 completion tokens"),
        ({"spans": [[4, 0, 1]]}, WORDS, r"do not fit 2 completion tokens"),
        ({"spans": [[4, 0, 2], [5, 1, 2]]}, WORDS, r"do not fit 2 completion tokens"),
        ({"prompt_tokens": 0}, WORDS, r"0 prompt tokens and 2 completion tokens"),
        # Two words on, logprobs stand where token ids should.
        ({"words": [1, 6]}, WORDS + WORDS, r"are not its token ids and logprobs"),
        ({"words": [1, 2]}, WORDS[:16] + struct.pack("<2f", 7.5, 8.0), r"are not its token ids"),
        ({"words": None}, WORDS, r"has no token ids: .*queue.record_tokens"),
    ],
)
def test_arrays_that_contradict_a_line_are_refused_with_its_place(
    tmp_path: Path, change: dict[str, Any], words: bytes, message: str
) -> None:
    write(tmp_path, LINE | change, words=words)
    with pytest.raises(InputError, match=r"rollouts/step_000002\.jsonl:1:? .*" + message):
        list(read_rollouts(tmp_path))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no rollouts"):
        list(read_rollouts(tmp_path))
    write(tmp_path, LINE).with_suffix(".int32").unlink()
    with pytest.raises(InputError, match=r"step_000002\.jsonl:1 .*step_000002\.int32, which does"):
        list(read_rollouts(tmp_path))


def test_a_whole_line_that_is_no_record_is_refused_with_its_place(tmp_path: Path) -> None:
    write(tmp_path, LINE, {"text": "?"}, LINE)
    with pytest.raises(InputError, match=r"step_000002\.jsonl:2: .*prompt_id"):
        list(read_rollouts(tmp_path))


def test_lines_of_an_older_release_are_read_without_arrays(tmp_path: Path) -> None:
    path = write(tmp_path, OLD_LINE)
    (record,) = read_records(path)
    assert (record.text, record.generator, record.times) == ("2", "", None)
