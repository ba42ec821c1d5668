"""`megatron-rl plan`: a whole plan by hand, remedies that do fit, and what the command prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.cli import main as cli
from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.gpus import GIB, GPUS
from megatron_rl.config.trainer import ModelConfig
from megatron_rl.config.tree import Config
from megatron_rl.plan.card import Card
from megatron_rl.plan.fit import recomputations
from megatron_rl.plan.plan import Hardware, SizingPlan, make_plan
from megatron_rl.plan.report import as_tree
from megatron_rl.protocol.process import EXIT_BAD_INPUT

# Llama 3.1 8B, as published.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}  # fmt: skip
PARAMETERS = 8_030_261_248
SHAPED = ("parallel.tensor=4", "parallel.sequence=true", "parallel.data=2",
          "parallel.distributed_optimizer=true", "generator.tensor_parallel=1",
          "generator.replicas=8", "generator.context_tokens=8192", "generator.kv_tokens=262144",
          "train.microbatch_tokens=8192")  # fmt: skip


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    """A configuration whose model folder holds config.json alone."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\npath = "{tmp_path / "model"}"\n')
    return path


def planned(config_path: Path, *overrides: str, **hardware: float | Card) -> SizingPlan:
    return make_plan(load_config(config_path, [*SHAPED, *overrides]), Hardware(**hardware))


def test_a_plan_worked_by_hand(config_path: Path) -> None:
    plan = planned(config_path, mfu=0.4, bytes_per_s=1e10)
    assert plan.parameters == plan.active_parameters == PARAMETERS
    # 128256 rows are padded to 128512; norms are whole on each of 4 tensor ranks.
    norms = 65 * 4096
    rank = (PARAMETERS + 2 * 256 * 4096 - norms) // 4 + norms
    states = plan.trainer.states
    assert plan.trainer.parameters == rank
    assert (states.weights, states.gradients) == (2 * rank, 4 * rank)
    assert (states.masters, states.moments) == (4 * rank // 2, 8 * rank // 2)
    # expert.train.logprob_chunk_tokens rows at a time.
    assert plan.trainer.logits == 2048 * 128512 // 4 * 4
    assert plan.free_bytes == GPUS["h100-80g"].memory_bytes - plan.trainer.total > 0
    # 16 groups of 16, of half of 8192 tokens; 2 replicas take 8192 at a time.
    step = plan.step
    assert (step.sequences, step.mean_tokens, step.microbatches) == (256, 4096, 64)
    per_token = 6 * (PARAMETERS - 128256 * 4096 - 65 * 4096)
    quadratic = 6 * 2 * 32 * 4096 * (4097 / 2)
    assert step.flops.total == pytest.approx(256 * 4096 * (per_token + quadratic), rel=1e-9)
    assert step.seconds == pytest.approx(step.flops.total / (8 * 989e12 * 0.4))
    # Keys and values of 32 layers, 8 heads of 128, two bytes.
    assert plan.engine.kv_per_token == 2 * 32 * 8 * 128 * 2
    assert plan.kv_completions == plan.engine.kv_room // plan.engine.kv_per_token // 8192
    assert plan.sync.total_bytes == 8 * 2 * PARAMETERS
    # The single rank of an engine is the slower end; the eighth one is seven rounds later.
    sync = plan.sync
    rounds = -(-2 * PARAMETERS // 2**26)
    assert (sync.lanes, sync.rounds) == (1, rounds)
    assert sync.one_s == pytest.approx(2 * PARAMETERS / 1e10)
    assert sync.seconds == pytest.approx(sync.one_s * (rounds + 7) / rounds)
    assert sync.whole_seconds == pytest.approx(sync.seconds + 0.4)
    assert plan.problems == ()


@pytest.mark.parametrize(
    ("given", "share"),
    [
        (["parallel.data=1"], 1),
        (["parallel.data=8"], 8),
        # Stages send at the same time.
        (["parallel.data=4", "parallel.pipeline=2"], 4),
        (["parallel.data=8", "generator.tensor_parallel=2"], 4),
        # At most a bucket in each of two rounds.
        (["parallel.data=2", "generator.tensor_parallel=2"], 1),
    ],
)
def test_the_ranks_of_a_stage_share_the_buffers_of_a_weight_sync(
    config_path: Path, given: list[str], share: int
) -> None:
    size = ["expert.weights.bucket_bytes=80000000", "weights.method=reshard", "parallel.tensor=1"]
    assert planned(config_path, *size, *given).trainer.sync_buffers == 160_000_000 // share


def test_parameters_in_fp8_are_held_twice_during_a_weight_sync(config_path: Path) -> None:
    given = ["model.fp8=tensorwise", "parallel.distributed_optimizer=true"]
    plain = planned(config_path, *given).trainer
    quantised = planned(config_path, *given, "expert.model.fp8_parameters=true").trainer
    assert quantised.sync_buffers - plain.sync_buffers == 2 * plain.parameters


def test_exact_kl_needs_the_references_output_layer_and_hidden_states(config_path: Path) -> None:
    given = ["algorithm.kl.placement=loss", "algorithm.reference.policy=start"]
    sampled = planned(config_path, *given).trainer
    exact = planned(config_path, *given, "algorithm.kl.estimator=exact").trainer
    budget = 8192
    assert exact.logits - sampled.logits == 2 * 4096 * (128512 // 4 + budget)


def with_remedy(config_path: Path, problem: str, *overrides: str) -> Config:
    """The configuration with the overrides that the problem's text proposes."""
    remedy = problem.partition("nearest setting that fits: ")[2].split()
    assert remedy, problem
    return load_config(config_path, [*SHAPED, *overrides, *remedy])


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        (["train.microbatch_tokens=65536"], "train.microbatch_tokens=32768"),
        (["parallel.tensor=1", "parallel.data=8", "parallel.sequence=false"], "model.recompute"),
        (["parallel.tensor=1", "parallel.data=1", "parallel.sequence=false"], "parallel.tensor"),
    ],
)
def test_a_proposed_setting_fits(config_path: Path, overrides: list[str], first: str) -> None:
    [problem] = planned(config_path, *overrides).problems
    assert problem.startswith("a trainer rank of pipeline stage 0 needs") and first in problem
    assert make_plan(with_remedy(config_path, problem, *overrides), Hardware()).problems == ()


def test_modules_are_recomputed_before_whole_layers_are(config_path: Path) -> None:
    """By memory: at 49,152 tokens the MLPs' activations suffice, at 131,072 they do not."""
    few = "train.microbatch_tokens=49152", "generator.context_tokens=49152"
    [problem] = planned(config_path, *few).problems
    remedy = problem.partition("nearest setting that fits: ")[2]
    assert remedy == 'model.recompute=selective model.recompute_modules=["mlp"]'
    assert make_plan(with_remedy(config_path, problem, *few), Hardware()).problems == ()
    many = "train.microbatch_tokens=131072", "generator.context_tokens=131072"
    [problem] = planned(config_path, *many).problems
    assert problem.endswith("nearest setting that fits: model.recompute=full")


def test_what_may_be_recomputed_depends_on_model_and_scaling() -> None:
    def offered(*, has_experts: bool, **model: object) -> list[tuple[str, ...]]:
        found = recomputations(ModelConfig(**model), has_experts=has_experts)
        # Each is a possible configuration.
        for updates in found:
            ModelConfig(**(model | updates))
        return [updates.get("recompute_modules", (updates.get("recompute", ""),))
                for updates in found]  # fmt: skip

    assert offered(has_experts=False) == [("",), ("mlp",), ("full",)]
    assert offered(has_experts=True) == [
        ("",), ("layernorm", "moe_act"), ("layernorm", "moe"), ("full",)
    ]  # fmt: skip
    assert offered(has_experts=True, fp8="delayed") == [("",), ("moe",), ("full",)]
    assert offered(has_experts=False, recompute="full") == [("",)]
    used = {"recompute": "selective", "recompute_modules": ("moe_act",)}
    assert offered(has_experts=True, **used) == [
        ("",), ("layernorm", "moe_act"), ("layernorm", "moe"), ("full",)
    ]  # fmt: skip
    used = {"recompute": "selective", "recompute_modules": ("mlp",)}
    assert offered(has_experts=False, **used) == [("",), ("full",)]


@pytest.mark.parametrize(
    "overrides",
    [["generator.kv_tokens=1000000"], ["generator.kv_tokens=900000", "model.dtype=float32"]],
)
def test_an_engine_that_does_not_fit_gets_a_setting_that_does(
    config_path: Path, overrides: list[str]
) -> None:
    problem = next(p for p in planned(config_path, *overrides).problems if "engine" in p)
    changed = make_plan(with_remedy(config_path, problem, *overrides), Hardware())
    assert not any("engine" in problem for problem in changed.problems)


def test_problems_and_advice_name_the_settings(config_path: Path) -> None:
    plan = planned(config_path, "generator.kv_tokens=4096", gpus=12)
    assert len(plan.problems) == 2
    assert "generator.kv_tokens=4096 does not hold one completion" in plan.problems[0]
    assert "the run takes 16 GPUs, 8 for the trainer and 8 for generators" in plan.problems[1]
    few = [*SHAPED, "train.microbatch_tokens=4096", "generator.max_running=128"]
    plan = make_plan(load_config(config_path, few), Hardware(gpus=20), mean_tokens=4096)
    assert plan.problems == ()
    # Without --mean-tokens nothing is known of the lengths.
    guessed = make_plan(load_config(config_path, few), Hardware(gpus=20)).advice
    assert len(guessed) == len(plan.advice) - 1
    for words in ("4 of 20 GPUs are idle", "more than train.microbatch_tokens=4096",
                  "holds 64 completions of 4096 tokens"):  # fmt: skip
        assert any(words in text for text in plan.advice), words


def test_a_long_pipeline_with_few_microbatches_is_noted(config_path: Path) -> None:
    plan = planned(config_path, "parallel.pipeline=4", "parallel.tensor=1",
                   "parallel.sequence=false", "train.prompts_per_batch=1")  # fmt: skip
    assert plan.step.microbatches == 4 and plan.step.bubble_share == 3 / 7
    assert any("pipeline stages idle 43%" in text for text in plan.advice)
    # The last stage holds one microbatch, the first one four.
    assert plan.trainer.stage == 0


def test_an_engine_on_the_trainers_gpus_must_fit_beside_it(config_path: Path) -> None:
    shared = ("generator.colocate=true", "weights.method=folder", "generator.replicas=1")
    plan = planned(config_path, *shared, gpus=8)
    assert plan.generator_gpus == 0
    # Alone, each fits; 32 GiB of cache, 15 GiB of weights and the trainer do not.
    [problem] = plan.problems
    needed = plan.trainer.total + plan.engine.weights + plan.engine.reserve
    needed += 262144 * plan.engine.kv_per_token
    assert f"need {needed / GIB:.1f} GiB of 79.6" in problem
    smaller = planned(config_path, *shared, "generator.kv_tokens=65536", "model.recompute=full")
    assert smaller.problems == ()


def test_what_never_fits_is_said(config_path: Path) -> None:
    [problem] = planned(
        config_path, "generator.context_tokens=4000000", "generator.kv_tokens=4000000",
        "generator.tensor_parallel=8",
    ).problems[:1]  # fmt: skip
    assert "8 times the ranks make it fit" in problem


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = cli.main(["plan", *arguments])
    return code, capsys.readouterr().out


def test_the_command_prints_the_plan(config_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, str(config_path), *SHAPED, "--gpus", "16", "--mfu", "0.4")
    assert code == 0
    for words in ("8.03 B", "8 trainer, 8 generators", "128.0 KiB", "at 40% MFU", "262,144"):
        assert words in text
    assert "does not work" not in text
    code, text = run(capsys, str(config_path), *SHAPED, "--gpu", "a100-40g", "--json")
    tree = json.loads(text)
    assert code == 1 and tree["fits"] is False and tree["gpu_bytes"] == 40 * GIB
    assert tree["trainer"]["total"] + tree["free_bytes"] == 40 * GIB


def test_files_are_given_as_to_run_and_later_ones_win(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = tmp_path / "later.toml"
    later.write_text("[train]\ngroup_size = 6\nprompts_per_batch = 64\n")
    first, second = str(config_path), str(later)
    for files in ([first, "--config", second], ["--config", first, "--config", second]):
        _, text = run(capsys, *files, *SHAPED, "train.prompts_per_batch=32", "--json")
        # 32 groups of 6.
        assert json.loads(text)["step"]["sequences"] == 192
    # Without a positional file the first word is an override.
    _, text = run(capsys, "train.group_size=3", "--config", first, "--config", second, *SHAPED,
                  "--json")  # fmt: skip
    assert json.loads(text)["step"]["sequences"] == 64 * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["later.toml"], "give a further file by --config later.toml"),
        (["--gpu", "h1000"], "--gpu 'h1000' is not known"),
        (["--mfu", "0"], "--mfu 0.0 must be above 0"),
        (["parallel.tensor=3"], "parallel.tensor = 3 does not divide"),
        (["model.fp8=blockwise", "--gpu", "a100-80g"], "model.fp8 needs FP8 tensor cores"),
    ],
)
def test_bad_input_is_one_line(
    config_path: Path, caplog: pytest.LogCaptureFixture, arguments: list[str], message: str
) -> None:
    assert cli.main(["plan", str(config_path), *SHAPED, *arguments]) == EXIT_BAD_INPUT
    assert message in caplog.text


NVIDIA_SMI = """#!/bin/sh
[ "$1" = --query-gpu=name,memory.total,compute_cap ] && printf '%s\\n' "{says}" "another, 1, 8.0"
"""


def test_an_unknown_card_is_planned_by_its_memory_and_only_warned_about(
    config_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def listed(says: str, *arguments: str) -> tuple[int, str, int]:
        program = tmp_path / "nvidia-smi"
        program.write_text(NVIDIA_SMI.format(says=says))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        code, text = run(capsys, str(config_path), *SHAPED, "--json", *arguments)
        tree = json.loads(text)
        return code, tree["gpu"], tree["gpu_bytes"]

    # A model of 8B fits no rank of a card of 24 GiB here.
    rtx = "NVIDIA GeForce RTX 4090, 24564, 8.9"
    assert listed(rtx) == (0, "NVIDIA GeForce RTX 4090", 24_564 << 20)
    assert listed("NVIDIA A100-SXM4-40GB, 40960, 8.0") == (1, "a100-40g", 40_960 << 20)
    assert listed("NVIDIA H100 80GB HBM3, 81559, 9.0") == (0, "h100-80g", 81_559 << 20)
    # Its memory is not that of the H200 of the table.
    assert listed("NVIDIA GH200 480GB, 97871, 9.0") == (0, "NVIDIA GH200 480GB", 97_871 << 20)
    # What the command line names counts, and a card of the table that is too small is refused.
    assert listed(rtx, "--gpu", "a100-40g")[:2] == (1, "a100-40g")
    assert listed(rtx, "--gpu", "rtx4090", "--gpu-memory", "24") == (0, "rtx4090", 24 << 30)
    code, text = run(capsys, str(config_path), *SHAPED, "--gpu", "rtx4090", "--gpu-memory", "24")
    assert code == 0 and "warning: may not work: a trainer rank" in text
    assert "rtx4090 is not in the table of GPUs" in text and "does not work" not in text


def test_an_unknown_gpu_is_bad_input(config_path: Path) -> None:
    with pytest.raises(InputError, match="known: a100-40g"):
        planned(config_path, card=Card("tpu"))


def test_it_loads_no_framework() -> None:
    program = (
        "import sys, megatron_rl.cli.main;"
        "print(*({'torch', 'megatron', 'transformers', 'sglang'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_each_stage_is_planned_with_its_own_batch_and_lengths(config_path: Path) -> None:
    text = config_path.read_text()
    config_path.write_text(
        text
        + """
[[stages]]
name = "longer"
at_step = 50
sampling = {max_new_tokens = 6144}
train = {prompts_per_batch = 8}

[[stages]]
at_step = 100
queue = {max_staleness = 1}
"""
    )
    plan = planned(config_path, "train.microbatch_tokens=4096", "train.steps=90")
    first, second, third = plan.stages
    # Prompts have 8192 - 6144 tokens; stage 0 has completions of 1024.
    assert [stage.plan.context_tokens for stage in plan.stages] == [3072, 8192, 8192]
    assert [stage.plan.step.sequences for stage in plan.stages] == [256, 128, 128]
    assert [stage.plan.step.mean_tokens for stage in plan.stages] == [1536, 4096, 4096]
    # A microbatch of 4096 tokens holds no sequence of 8192: it is one of its own.
    assert second.plan.trainer.activations == plan.trainer.activations
    assert first.plan.trainer.activations < second.plan.trainer.activations
    assert [stage.begins for stage in plan.stages] == [
        "batch 0", "batch 50", "batch 100 (never: train.steps)",
    ]  # fmt: skip
    assert third.max_staleness == 1 and plan.problems == ()
    tree = as_tree(plan)
    assert [stage["plan"]["step"]["sequences"] for stage in tree["stages"]] == [256, 128, 128]
    small = planned(config_path, "generator.kv_tokens=8000")
    assert any(
        text.startswith("stage 1 (longer): generator.kv_tokens=8000") for text in small.problems
    )


def test_a_plan_counts_the_layers_that_the_gpu_takes(config_path: Path) -> None:
    hopper, ampere = planned(config_path), planned(config_path, card=Card("a100-80g"))
    # Unfused, a gated MLP keeps 5 elements of a unit instead of 3, of 2 bytes each.
    units = 32 * 8192 * 14336 // 4
    assert ampere.trainer.activations - hopper.trainer.activations == (5 - 3) * units * 2
    local = planned(config_path, "expert.model.layers=local")
    assert local.trainer == ampere.trainer
    [note] = set(ampere.advice) - set(local.advice)
    assert note.endswith("on compute capability 8.0 without flash-attn")
    hopper, ada = (Card("l40s-48g", capability=capability) for capability in ((9, 0), (8, 9)))
    [problem] = set(planned(config_path, "model.fp8=tensorwise", card=ada).problems) - set(
        planned(config_path, "model.fp8=tensorwise", card=hopper).problems
    )
    assert problem.startswith("model.fp8 = 'tensorwise': TransformerEngine has no attention kernel")
    # What needs TransformerEngine's layers is no remedy where they are not taken.
    few = ("parallel.data=1", "parallel.tensor=1", "parallel.sequence=false")
    problems = planned(config_path, *few, card=Card("a100-40g")).problems
    remedies = [text for text in problems if "nearest" in text]
    assert remedies and not any("layernorm" in p or "moe_act" in p for p in remedies)
