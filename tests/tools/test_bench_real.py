"""The workload `real` of the end-to-end benchmark: prompts, reward, settings and figures."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.config.lookup import find_function
from megatron_rl.protocol.types import ScoreRequest
from tools.bench import end_to_end
from tools.bench.children import ChildFailed
from tools.bench.end_to_end import REAL, SETTINGS, Variant, quickest, run_all
from tools.bench.end_to_end_peer import lines, vowel_share
from tools.bench.loops import (
    Scale,
    StepMark,
    compare_real,
    marks_from_metrics,
    marks_from_peer,
    spread,
    tokens_per_s,
)
from tools.bench.measuring import PeakMemory, pss_bytes, rounded
from tools.bench.variants import Workload, peer_job, write_peer_prompts
from verification.rules import RewardRules
from verification.score import score

SCALE = Scale(groups=8, max_new_tokens=192, steps=4, skip=2, peer_steps=3, peer_skip=1, repeats=1)


def marks(*steps: tuple[float, int]) -> list[StepMark]:
    return [StepMark(seconds, 64, 64, 0.0, tokens) for seconds, tokens in steps]


@pytest.mark.parametrize(
    ("text", "share"), [("aB", 0.5), ("Tree 42!", 0.5), ("rhythm", 0.0), ("", 0.0), ("12", 0.0)]
)
def test_reward_is_the_share_of_vowels_among_letters(text: str, share: float) -> None:
    assert vowel_share(text) == share


def test_our_verifier_gives_the_same_reward_as_the_peers(tmp_path: Path) -> None:
    config = load_config(REAL, [f"model.path={tmp_path}", f"run.dir={tmp_path}"])
    rules = RewardRules(reward=config.reward, max_tokens=config.sampling.max_new_tokens)
    text = "Bread is older than writing."
    request = ScoreRequest(0, "open", "none", "", text, 7, True)
    assert score(request, rules).reward == pytest.approx(vowel_share(text))
    (extra,) = config.reward.extra
    assert find_function({}, extra.function, key="reward.extra")(text, request) > 0


def test_prompts_are_distinct_and_enough_for_the_longest_run() -> None:
    assert len(set(lines())) == len(lines()) >= 8 * (end_to_end.FULL.steps + 4)


def test_lengths_are_described_by_percentiles() -> None:
    found = spread(list(range(1, 100)))
    assert found == {"p10": 10.0, "p50": 50.0, "p90": 90.0, "p90_over_p10": 9.0}


def test_the_peers_prompts_stand_in_the_order_of_our_queue(tmp_path: Path) -> None:
    from megatron_rl.data.prompts import PromptStream, read_prompts
    from megatron_rl.data.tiny_model import make_folder

    make_folder(tmp_path / "model", seed=0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(lines()[:8]).lower() + "\n")
    overrides = (
        f"model.path={tmp_path / 'model'}", f"prompts.0.path={prompts}", "render.chat_template=",
        "generator.context_tokens=400",
    )  # fmt: skip
    workload = Workload(REAL, overrides, tmp_path / "peer.jsonl")
    config = workload.config
    assert write_peer_prompts(config, workload.peer_prompts, task="open") == 8
    stream = PromptStream(read_prompts(config.prompts, config.run.seed).divide(), config.run.seed)
    written = workload.peer_prompts.read_text().splitlines()
    for line in written:
        assert " ".join(stream.next().messages[-1].content.split()[:3]) in line
    with pytest.raises(ValueError, match="grades the task 'exact' only"):
        write_peer_prompts(config, workload.peer_prompts)


def test_the_peers_job_has_its_settings_and_our_sizes(tmp_path: Path) -> None:
    config = load_config(REAL, [f"model.path={tmp_path}"])
    for name, setting in SETTINGS.items():
        job = peer_job(config, Path("p"), threads=2, run_dir=tmp_path, settings=setting)
        grpo = job["grpo"]
        # 8 groups of 8 in microbatches of 16.
        assert grpo["per_device_train_batch_size"] == 16
        assert grpo["gradient_accumulation_steps"] == 4
        assert (grpo["max_completion_length"], job["task"]) == (192, "open")
        assert grpo.get("use_transformers_continuous_batching", False) == ("paged" in name)
        assert not grpo["shuffle_dataset"] and grpo["bf16"] == (name == "bfloat16")


def test_the_quickest_setting_that_works_is_measured() -> None:
    assert quickest({"a": 3.0, "b": 2.0, "c": "RuntimeError: no such thing"}) == "b"
    with pytest.raises(ChildFailed, match="in every setting"):
        quickest({"a": "broken"})


def test_tokens_of_a_step_are_those_of_its_completions() -> None:
    rows = [
        {"time": 10.0, "source": "trainer", "step": 0, "weight_sync/s": 0.5},
        {
            "time": 12.0, "source": "trainer", "step": 1, "train/loss": 0.1,
            "queue/rollouts_trained": 64, "queue/groups_dropped_zero_variance": 0,
            "rollout/correct": 0.0,
            "rollout/length_tokens": 100.5,
        },
    ]  # fmt: skip
    assert marks_from_metrics(rows, group_size=8) == [StepMark(2.0, 64, 64, 0.0, 6432)]
    row = {"step": 1, "seconds": 3.0, "rollouts": 2, "accuracy": 0.0, "lengths": [3, 4]}
    assert marks_from_peer([row]) == [StepMark(3.0, 2, 2, 0.0, 7)]


def test_rate_of_tokens_leaves_the_first_steps_out() -> None:
    # 600 + 200 tokens between 20 and 40 s.
    assert tokens_per_s(marks((10, 900), (20, 900), (30, 600), (40, 200)), skip=2) == 40.0


def test_ratios_are_of_tokens_and_memory_is_beside_the_peers() -> None:
    loops = {
        "ours": [marks((5, 9), (10, 9), (12, 800), (14, 800))],
        "ours_sync": [marks((5, 9), (10, 9), (14, 800), (18, 800))],
        "trl": [marks((40, 9), (50, 1000), (60, 600))],
    }
    found = rounded(compare_real(loops, {"ours": 3, "ours_sync": 3, "trl": 10}, SCALE))
    # 1600 tokens in 4, 8 and (of 1600) 20 s.
    assert found["tokens_per_s"] == {"ours": 400.0, "ours_sync": 200.0, "trl": 80.0}
    assert (found["over_trl"], found["over_sync"]) == (5.0, 2.0)
    assert found["step_s"] == {"ours": 2.0, "ours_sync": 4.0, "trl": 10.0}
    assert found["over_trl_rollouts"] == 5.0 and found["peak_memory_over_trl"] == 0.3


def test_a_variant_with_fewer_repeats_is_run_less_often(tmp_path: Path) -> None:
    order = []

    def variant(name: str) -> Variant:
        def run(run_dir: Path) -> list[StepMark]:
            order.append(run_dir.name)
            return marks((1, 1))

        return run

    by_name = {name: variant(name) for name in ("a", "b")}
    runs = run_all(by_name, tmp_path, lambda: None, repeats=3, at_most={"b": 1})
    assert order == ["a-0", "b-0", "a-1", "a-2"]
    assert {name: len(found) for name, found in runs.loops.items()} == {"a": 3, "b": 1}


def test_memory_of_a_child_is_seen_and_divided_among_those_that_share_it() -> None:
    size = 64 << 20
    code = f"import time; kept = bytearray(b'x' * {size}); print('made', flush=True); time.sleep(9)"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        with PeakMemory(sample_s=0.05) as memory:
            assert child.stdout.readline() == "made\n"
            time.sleep(0.3)
        assert size < pss_bytes(child.pid) < 3 * size
        assert memory.peak_bytes > size
    finally:
        child.kill()
        child.wait()
    assert pss_bytes(child.pid) == 0
