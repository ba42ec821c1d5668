"""`megatron-rl plan-weights` says what the trainer will do, for a layout worked out by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.cli.plan_weights import forecast
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.protocol.process import EXIT_BAD_INPUT

SIZES = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
    "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
LAYOUT = (
    "model.dtype=float32", "parallel.pipeline=2", "generator.tensor_parallel=2",
    "generator.replicas=2", "expert.weights.bucket_bytes=1048576",
)  # fmt: skip


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """A configuration whose model folder holds config.json alone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SIZES))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{tmp_path / "model"}"\n')
    return path


def test_the_numbers_are_those_worked_out_by_hand(config_path: Path) -> None:
    found = forecast(load_config(config_path, list(LAYOUT)))
    # 800 elements in each vocabulary matrix, 8 in each norm, 480 in the matrices of a layer.
    assert found.model_bytes == 4 * (2 * 800 + 8 + 2 * (2 * 8 + 480))
    # The vocabulary is padded to 128 rows, 64 a rank; norms go to both ranks.
    engine_ranks = [4 * (2 * 8 * rows + 8 + 2 * (2 * 8 + 240)) for rows in (64, 36)]
    assert list(found.received) == engine_ranks == [6176, 4384]
    # The stages: embedding and a layer; a layer, final norm and output matrix.
    stages = [4 * (800 + 2 * 16 + 480), 4 * (2 * 16 + 480 + 2 * 8 + 800)]
    assert list(found.sent) == stages == [5248, 5312]
    assert found.rounds == 1 and found.excess_bytes == 5312 - 6176
    # Each engine rank gets something from both stages, and there are two engines.
    assert (found.cost.lanes, found.lane_ranks, found.rank_lanes) == (2, 4, 2)
    # The first engine rank holds two parcels.
    assert found.peak_bytes == 6176 + 2 * 32


def test_replicas_of_the_trainer_share_what_is_sent_once(config_path: Path) -> None:
    # Ranks 0 and 1 are the first stage, ranks 2 and 3 the second one. Each sends to one lane: its
    # part of the vocabulary and of a layer, and in the second stage the last norm.
    found = forecast(load_config(config_path, [*LAYOUT, "parallel.data=2"]))
    first, second = (4 * (8 * rows + 2 * 8 + 240) for rows in (64, 36))
    assert list(found.sent) == [first, second, first + 32, second + 32]
    assert sum(found.sent) == 5248 + 5312
    assert (found.cost.lanes, found.lane_ranks, found.rank_lanes) == (2, 4, 1)
    # Files need no communicators. As evenly as the largest piece allows: 64 rows of the vocabulary.
    by_files = [*LAYOUT, "parallel.data=2", "weights.method=folder"]
    sent = forecast(load_config(config_path, by_files)).sent
    assert (sum(sent[:2]), sum(sent[2:])) == (5248, 5312)
    assert max(abs(sent[0] - sent[1]), abs(sent[2] - sent[3])) <= 64 * 8 * 4
    # The engines hand it on to each other.
    many = forecast(load_config(config_path, [*LAYOUT, "parallel.data=2", "generator.replicas=9"]))
    assert many.sent == found.sent and many.lane_ranks == found.lane_ranks + 7
    small = forecast(load_config(config_path, [*LAYOUT, "expert.weights.bucket_bytes=2048"]))
    assert small.rounds in {4, 5, 6} and small.peak_bytes <= 2 * 2048


def test_a_weight_sync_of_24b_takes_less_than_the_paper_says(config_path: Path) -> None:
    sizes = {
        "architectures": ["MistralForCausalLM"], "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (config_path.parent / "model" / "config.json").write_text(json.dumps(sizes))
    layout = ["parallel.tensor=8", "parallel.pipeline=2", "parallel.data=4"]
    engines = ["generator.tensor_parallel=8", "generator.replicas=24"]
    cost = forecast(load_config(config_path, [*layout, *engines])).cost
    # A layer: attention, format check, up and down, two norms; both vocabulary matrices, the last
    # norm.
    layer = 5120 * 128 * (32 + 8 + 8 + 32) + 3 * 5120 * 32768
    split = 40 * layer + 2 * 131072 * 5120
    norms = (2 * 40 + 1) * 5120
    rank = 2 * (split // 8 + norms)
    assert cost.rank_bytes == rank and cost.total_bytes == 24 * 8 * rank
    # At 25 GB/s an engine rank is the slower end: 5.9 GB in rounds of 64 MiB. The last engine gets
    # its first round when the first one gets its 24th.
    rounds = -(-rank // 2**26)
    assert (cost.lanes, cost.rounds) == (8, rounds) and cost.one_s == rank / 25e9
    assert cost.seconds == pytest.approx(rank / 25e9 * (rounds + 23) / rounds)
    assert cost.whole_seconds == pytest.approx(cost.seconds + 0.4) and cost.whole_seconds < 0.8


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["plan-weights", *arguments])
    return code, capsys.readouterr().out


def test_by_way_of_files_the_command_says_who_waits(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_files = ["weights.method=folder", "expert.weights.overlap=true", "parallel.data=2"]
    code, text = run(capsys, str(config_path), *LAYOUT, *by_files, "generator.replicas=3")
    words = " ".join(text.replace("│", " ").split())
    assert code == 0 and "by way of files at 2 GB/s a rank" in words
    assert "the trainer meanwhile computes the next step" in words


def test_the_command_prints_them(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, str(config_path), *LAYOUT)
    assert code == 0
    for words in ("0.005 MB, 0.005 MB", "0.004 MB, 0.006 MB", "1.015 times the model",
                  "2, of at most 4 ranks", "the paper: under 5 s",
                  "0.01 times", "trainer rank 1 sends 0.005 MB"):  # fmt: skip
        assert words in text
    assert "warning" not in text


def test_the_command_prints_what_communicators_take(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run(capsys, str(config_path), *LAYOUT, "expert.weights.deadline_s=3")
    words = " ".join(text.replace("│", " ").split())
    # On one node: 384 MiB for each of two lanes, and of two more of a generator that joins.
    assert code == 0 and "communicators of a trainer rank at most 1,610.613 MB" in words
    # Each engine rank gets something from both trainer ranks: lanes of four, and of three.
    assert "start of all communicators 3.5 s, if 1.4 s each and 0.085 s a rank" in words
    assert "start for a generator that joins 3.3 s, and of all at the next version" in words
    assert "may start later than expert.weights.deadline_s=3: raise it" in words
    _, text = run(capsys, str(config_path), *LAYOUT, "weights.method=folder")
    assert "communicators" not in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generator.tensor_parallel=3", "generator.tensor_parallel = 3 is not possible"),
        ("parallel.tensor=4", "parallel.tensor = 4 does not divide"),
        ("parallel.expert=2", "the model has no experts"),
        (
            "expert.weights.bucket_bytes=90",
            "expert.weights.bucket_bytes = 90 is not possible: a bucket",
        ),
        ("model.path=nowhere", "no folder .*nowhere"),
    ],
)
def test_impossible_sizes_are_refused(config_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        forecast(load_config(config_path, [*LAYOUT, override]))
    assert cli.main(["plan-weights", str(config_path), *LAYOUT, override]) == EXIT_BAD_INPUT


def test_it_needs_no_framework_but_torch() -> None:
    program = (
        "import sys, megatron_rl.cli.plan_weights;"
        "print(*({'megatron', 'transformers', 'sglang'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_trainer_rank_that_sets_the_pace_is_named(
    config_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank sends all that two engine ranks receive: 10560 bytes, of which one gets 6176."""
    words = "a trainer rank sends 0.004 MB more than any engine rank receives"
    for pipeline, is_named in ((1, True), (2, False)):
        more = [f"parallel.pipeline={pipeline}", "expert.weights.bucket_bytes=1024"]
        code, text = run(capsys, str(config_path), *LAYOUT, *more)
        assert code == 0 and (words in " ".join(text.split())) is is_named
