"""A scorer that could not serve is refused before anything starts; where it lies on a host."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config
from megatron_rl.config.gpus import GPUS
from megatron_rl.config.tree import Config
from megatron_rl.launcher.model_checks import check_judge, check_reference
from megatron_rl.launcher.placement import nodes_needed, place
from megatron_rl.launcher.ports import listed_ports, resolve_ports
from megatron_rl.launcher.restarts import Answer, Death, answer_death, restart_rule
from megatron_rl.plan.plan import Hardware, make_plan
from tests.weights.made_up import write_zeros

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 384, "vocab_size": 100,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip
TEACHER = SHAPE | {"num_hidden_layers": 7, "vocab_size": 104}


@pytest.fixture
def overrides(tmp_path: Path) -> list[str]:
    """A policy and a teacher whose layers the trainer could not divide."""
    for name, shape in (("policy", SHAPE), ("teacher", TEACHER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
        write_zeros(tmp_path / name)
    return [
        f"model.path={tmp_path}/policy", f"algorithm.reference.policy={tmp_path}/teacher",
        "algorithm.reference.source=engine", "parallel.pipeline=2", "parallel.data=2",
    ]  # fmt: skip


def test_a_teacher_that_the_trainer_could_not_divide_passes(overrides: list[str]) -> None:
    check_reference(load_config(None, overrides))
    # The policy's own layers can be divided: the message names the teacher's folder.
    words = r"^algorithm\.reference\.policy: .* cannot divide \S*/teacher: .*7 layers"
    with pytest.raises(InputError, match=words):
        check_reference(load_config(None, [*overrides, "algorithm.reference.source=trainer"]))


@pytest.mark.parametrize(
    ("shape", "given", "words"),
    [
        ({}, ["scorer.tensor_parallel=4"], "scorer.tensor_parallel = 4 does not divide"),
        (
            {"max_position_embeddings": 1024},
            [],
            "context_tokens = 2048 is above the 1024 positions of",
        ),
        ({"vocab_size": 200}, [], "take a reference with the policy's tokenizer"),
    ],
)
def test_a_teacher_that_cannot_be_served_is_refused(
    tmp_path: Path, overrides: list[str], shape: dict[str, Any], given: list[str], words: str
) -> None:
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(TEACHER | shape))
    with pytest.raises(InputError, match=words):
        check_reference(load_config(None, [*overrides, *given]))


def test_a_teacher_has_the_positions_of_its_scaling(tmp_path: Path, overrides: list[str]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    shape = TEACHER | {"max_position_embeddings": 640, "rope_scaling": yarn}
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(shape))
    check_reference(load_config(None, overrides))
    shape["rope_scaling"]["factor"] = 2.0
    (tmp_path / "teacher" / "config.json").write_text(json.dumps(shape))
    with pytest.raises(InputError, match="2048 is above the 1024 positions of"):
        check_reference(load_config(None, overrides))


def test_more_foreign_ids_than_an_engine_leaves_out_are_refused(
    tmp_path: Path, overrides: list[str]
) -> None:
    for name, vocab in (("policy", 100_000), ("teacher", 101_025)):
        shape = TEACHER | {"vocab_size": vocab}
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    with pytest.raises(InputError, match="has 1025 token ids more than the policy"):
        check_reference(load_config(None, overrides))


def test_a_teacher_without_weights_is_refused(tmp_path: Path, overrides: list[str]) -> None:
    (tmp_path / "teacher" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"teacher has no \*.safetensors"):
        check_reference(load_config(None, overrides))


def test_a_judge_that_could_grade_nothing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    write_zeros(folder)
    rubric = 'reward.tasks.essay.environment="verification.environments.judging:rubric"'
    with pytest.raises(InputError, match=r"essay.environment = .* give .* by expert.scorer.judge"):
        check_judge(load_config(None, [rubric]))
    config = load_config(None, [rubric, f"expert.scorer.judge={folder}"])

    def write(*words: str) -> None:
        known = {word: number for number, word in enumerate(("<unk>", "</s>", *words))}
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(known, unk_token="<unk>")),
            unk_token="<unk>", eos_token="</s>",
        ).save_pretrained(folder)  # fmt: skip

    write("Yes")
    with pytest.raises(InputError, match=r"write the judge's template to .*/chat_template.jinja"):
        check_judge(config)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    # "No" is another token than "Yes", and an unknown word.
    check_judge(config)
    write("A", "B")
    with pytest.raises(InputError, match="gives Yes and No the same tokens"):
        check_judge(config)
    # A word-level tokenizer without a splitter has one token for a text; a verdict is another one.
    write("Yes", "No")
    shape = SHAPE | {"max_position_embeddings": 2}
    (folder / "config.json").write_text(json.dumps(shape))
    check_judge(config)
    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 1}))
    with pytest.raises(InputError, match=r"room for 1 tokens, and .* takes 2 before .*essay"):
        check_judge(config)
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1}
    stretched = shape | {"max_position_embeddings": 1, "rope_scaling": yarn}
    (folder / "config.json").write_text(json.dumps(stretched))
    check_judge(config)


def test_the_scorer_has_the_gpus_behind_those_of_the_generators(overrides: list[str]) -> None:
    given = [*overrides, "generator.replicas=2", "scorer.tensor_parallel=2"]
    [roles] = place(load_config(None, given), nodes=1, gpus_per_node=8)
    assert (roles.trainer_ranks, roles.engines) == (4, {0: range(4, 5), 1: range(5, 6)})
    assert roles.scorer == range(6, 8)
    shared = [*given, "generator.colocate=true", "weights.method=folder"]
    [roles] = place(load_config(None, shared), nodes=1, gpus_per_node=8)
    assert (roles.engines[1], roles.scorer) == (range(1, 2), range(4, 6))
    [roles] = place(load_config(None, [*given, "train.steps=0"]), nodes=1, gpus_per_node=8)
    assert roles.scorer == range(0)


def test_a_node_without_room_for_the_scorer_is_refused(overrides: list[str]) -> None:
    config = load_config(None, overrides)
    with pytest.raises(InputError, match="a scorer of 1 need 2 nodes of 5 GPUs, and there are 1"):
        place(config, nodes=1, gpus_per_node=5)
    wide = load_config(None, [*overrides, "scorer.tensor_parallel=16"])
    with pytest.raises(InputError, match="scorer.tensor_parallel = 16 is more than the 8 GPUs"):
        place(wide, nodes=4, gpus_per_node=8)


def test_a_scorer_has_the_gpus_of_one_of_several_nodes(overrides: list[str]) -> None:
    # 4 trainer ranks and 3 engines of 1: of the second node's 4 GPUs one is free, two are not.
    given = [*overrides, "generator.replicas=3", "scorer.tensor_parallel=1"]
    roles = place(load_config(None, given), nodes=2, gpus_per_node=4)
    assert [(each.scorer_node, each.scorer) for each in roles] == [(1, range(3, 4))] * 2
    config = load_config(None, [*given, "scorer.tensor_parallel=2"])
    assert nodes_needed(config, gpus_per_node=4) == 3
    assert place(config, nodes=3, gpus_per_node=4)[0].scorer_node == 2


def test_a_plan_counts_the_scorer(overrides: list[str]) -> None:
    def plan(*given: str, gpus: int | None = None) -> Any:
        return make_plan(load_config(None, [*overrides, *given]), Hardware(gpus=gpus))

    assert plan().scorer_gpus == 1 and not plan(gpus=6).problems
    [problem] = plan(gpus=5).problems
    assert "takes 6 GPUs, 4 for the trainer and 1 for generators and 1 for the scorer" in problem
    # 2 heads of 32 in 7 layers, keys and values in bfloat16: 1,792 bytes a token. Of the GPU SGLang
    # leaves 512 + 1.5 * 8192 + 128 + 2 * 32 MiB free; the weights are 6 MB.
    [problem] = plan("scorer.kv_tokens=50000000").problems
    assert "scorer.kv_tokens=50000000" in problem
    room = int(problem.split("has room for ")[1].split()[0])
    assert room * 1792 == pytest.approx(GPUS["h100-80g"].memory_bytes - (12_992 << 20), rel=1e-3)
    assert plan("algorithm.reference.source=trainer", "parallel.pipeline=1").scorer_gpus == 0


def test_a_scorer_has_three_ports(overrides: list[str]) -> None:
    def ports(config: Config) -> list[int]:
        return [port for key, port in listed_ports(config) if key == "expert.ports.scorer"]

    config = resolve_ports(load_config(None, overrides))
    first = config.ports.scorer
    assert ports(config) == [first, first + 1, first + 2]
    assert first not in {config.ports.engine, config.ports.engine + 1}


def test_used_up_restarts_name_their_key(overrides: list[str]) -> None:
    config = load_config(None, [*overrides, "expert.scorer.max_restarts=1"])
    death = Death(
        exit_code=-9, can_start=True, restarts=1, is_run_ending=False, is_too_late=False, others=0
    )
    answer, reason = answer_death(
        death, restart_rule(config, "scorer", "scorer-0", until="trainer")
    )
    assert answer is Answer.END_RUN and "expert.scorer.max_restarts = 1" in reason
