"""The examples for GPUs: their scripts are sound, their configurations load, and they fit."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_rl.config.files import load_config
from megatron_rl.config.gpus import DEFAULT
from megatron_rl.config.staging import resolve_stages
from megatron_rl.launcher.placement import place
from megatron_rl.plan.card import Card, choose_card
from megatron_rl.plan.plan import Hardware, make_plan

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"
COMMON = {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}


class Example(NamedTuple):
    """What the script's own text claims, and the model as published."""

    name: str
    nodes: int
    gpus_per_node: int
    billions: float
    """Parameters, as the model's card states them."""
    shape: dict[str, Any]


SINGLE = [
    Example("one_gpu", 1, 1, 1.54, {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960,
        "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True,
    }),
    Example("one_node", 1, 8, 7.61, {
        "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "max_position_embeddings": 32768,
    }),
]  # fmt: skip
SLURM = [
    Example("magistral_24b", 16, 8, 23.6, {
        "architectures": ["MistralForCausalLM"], "hidden_size": 5120, "intermediate_size": 32768,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 131072,
    }),
    Example("magistral_medium_like", 64, 8, 122.6, {
        "architectures": ["MistralForCausalLM"], "hidden_size": 12288, "intermediate_size": 28672,
        "num_hidden_layers": 88, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 32768, "max_position_embeddings": 131072,
    }),
    Example("qwen3_30b_a3b", 4, 8, 30.5, {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }),
]  # fmt: skip
QWEN2 = SINGLE[0].shape
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "num_key_value_heads": 8,
}  # fmt: skip
RECIPES = [
    Example("recipes/gsm8k_qwen2.5_0.5b", 1, 1, 0.49, {
        **QWEN2, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }),
    Example("recipes/gsm8k_qwen2.5_1.5b", 1, 1, 1.54, QWEN2),
    Example("recipes/gsm8k_qwen3_0.6b_24gb", 1, 1, 0.6, {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    }),
    Example("recipes/dapo_qwen2.5_7b", 1, 8, 7.61, SINGLE[1].shape),
    Example("recipes/dapo_qwen2.5_32b", 8, 8, 32.76, {
        **SINGLE[1].shape, "hidden_size": 5120, "intermediate_size": 27648,
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
    }),
    Example("recipes/code_qwen3_8b", 1, 8, 8.19, {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32,
    }),
]  # fmt: skip
ALL = [*SINGLE, *SLURM, *RECIPES]
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))


@pytest.mark.parametrize("example", ALL, ids=lambda example: example.name)
def test_an_example_fits_the_gpus_that_it_names(tmp_path: Path, example: Example) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **example.shape}))
    config = load_config(EXAMPLES / f"{example.name}.toml", [f"model.path={tmp_path}"])
    gpus = example.nodes * example.gpus_per_node
    card = choose_card("rtx4090", 24, None) if "24gb" in example.name else Card(DEFAULT)
    plan = make_plan(config, Hardware(card, gpus=gpus))
    assert plan.problems == () and plan.free_bytes > 0
    assert plan.parameters / 1e9 == pytest.approx(example.billions, abs=0.05)
    # All GPUs are used, no weight sync is longer than its deadline, and nothing else is odd.
    assert [text for text in plan.advice if "takes the local layers" not in text] == []
    # That card has no kernel of TransformerEngine's for packed sequences.
    assert len(plan.advice) == ("24gb" in example.name)
    place(config, nodes=example.nodes, gpus_per_node=example.gpus_per_node)


def test_the_staged_example_follows_the_papers_schedule(tmp_path: Path) -> None:
    shape = next(example.shape for example in SLURM if example.name == "magistral_24b")
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **shape}))
    config = load_config(EXAMPLES / "magistral_stages.toml", [f"model.path={tmp_path}"])
    plan = make_plan(config, Hardware(gpus=128))
    assert plan.problems == ()
    stages = resolve_stages(config)
    free_of_penalty = [s.sampling.max_new_tokens - s.reward.length_margin_tokens for s in stages]
    assert free_of_penalty == [16 * 1024, 24 * 1024, 32 * 1024]
    assert [stage.plan.step.sequences for stage in plan.stages] == [8192, 4096, 2048]
    # The longest completions and 2,048 tokens of prompt: so many fit into 500,000 tokens of cache.
    held = [stage.plan.kv_tokens // stage.plan.context_tokens for stage in plan.stages]
    assert held == [500_000 // (length * 1024 + 4096 + 2048) for length in (16, 24, 32)]
    place(config, nodes=16, gpus_per_node=8)


@pytest.mark.parametrize("example", SLURM, ids=lambda example: example.name)
def test_a_slurm_script_asks_for_the_nodes_of_its_plan(example: Example) -> None:
    text = (EXAMPLES / f"{example.name}.sh").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    assert (int(asked["nodes"]), int(asked["gpus-per-node"])) == (
        example.nodes, example.gpus_per_node,
    )  # fmt: skip
    assert asked["ntasks-per-node"] == "1"
    assert "exec bash examples/launch.sh examples/" + example.name in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_is_sound(script: Path) -> None:
    text = script.read_text()
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    assert not re.search(r"\b(pkill|killall|kill -9)\b", text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "CONFIG.toml [--config MORE.toml ...] [--model DIR]"),
        (["examples/one_gpu.toml", "--model"], "CONFIG.toml"),
        (["examples/one_gpu.toml", "--config", "examples/none.toml"], "CONFIG.toml"),
        (["examples/one_gpu.toml", "--model", "m", "--prompts", "p", "loud"], "CONFIG.toml"),
        (["examples/none.toml", "--model", "m", "--prompts", "p"], "CONFIG.toml"),
    ],
)
def test_bad_arguments_print_the_usage(arguments: list[str], words: str) -> None:
    done = subprocess.run(
        ["bash", "examples/launch.sh", *arguments],
        cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and words in done.stderr and "Exit status" in done.stderr


# Stands for the launcher and for Slurm's programs: each call is a line of $CALLS.
CALL = """#!/usr/bin/env bash
[ "$1" != -c ] || exec env PYTHONPATH={root} {python} "$@"
echo "$(basename "$0") $*" >>"$CALLS"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames n[1-2]" ] && printf '%s\\n' 192.0.2.7 127.0.0.1
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_launch_gives_every_command_all_files_and_overrides(tmp_path: Path, nodes: int) -> None:
    for name, text in {"python": CALL, "srun": CALL, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text.format(root=EXAMPLES.parent, python=sys.executable))
        (tmp_path / name).chmod(0o755)
    for name in ("a.toml", "b.toml", "p.jsonl"):
        (tmp_path / name).touch()
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": f"{tmp_path}/python",
        "CALLS": f"{tmp_path}/calls", "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": "n[1-2]", "HEAD_ADDRESS": "10.0.0.1" if nodes == 1 else "",
    }  # fmt: skip
    words = ["a.toml", "--config", "b.toml", "--model", "Qwen/Qwen2.5-0.5B", "train.steps=7"]
    done = subprocess.run(
        ["bash", str(EXAMPLES / "launch.sh"), *words, "--run-dir", "run", "--gpus-per-node", "4"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env=os.environ | job,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cli = "python -m megatron_rl.cli.main"
    files = f"--config {tmp_path}/a.toml --config {tmp_path}/b.toml --run-dir {tmp_path}/run"
    given = "model.path=Qwen/Qwen2.5-0.5B train.steps=7"
    plan = f"{cli} plan {tmp_path}/a.toml --config {tmp_path}/b.toml {given}"
    calls = (tmp_path / "calls").read_text().splitlines()
    if nodes == 1:
        assert calls == [plan, f"{cli} run --dry-run {files} {given}", f"{cli} run {files} {given}"]
        return
    # The last node is reached by the loopback device, the first one of `hostname -I` is another.
    prepare = f"{cli} prepare {files} --nodes 2 --gpus-per-node 4 ports.host=127.0.0.1 {given}"
    assert calls[:3] == [plan, f"{prepare} --dry-run", prepare]
    assert calls[3].startswith("srun ") and not any(call.startswith(cli) for call in calls[3:])
    assert calls[-1].endswith(f"{cli[7:]} node {tmp_path}/run --gpus-per-node 4")


def test_launch_names_the_last_node_that_does_not_resolve(tmp_path: Path) -> None:
    scontrol = "#!/usr/bin/env bash\necho no-such-node.invalid\n"
    for name, text in {"python": CALL, "scontrol": scontrol}.items():
        (tmp_path / name).write_text(text.format(root=EXAMPLES.parent, python=sys.executable))
        (tmp_path / name).chmod(0o755)
    (tmp_path / "a.toml").touch()
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": f"{tmp_path}/python",
        "CALLS": f"{tmp_path}/calls", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]",
        "HEAD_ADDRESS": "",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(EXAMPLES / "launch.sh"), "a.toml", "--run-dir", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env=os.environ | job,
    )  # fmt: skip
    [error] = done.stderr.splitlines()
    assert done.returncode == 2 and "to no-such-node.invalid ([Errno -" in error
    assert "set HEAD_ADDRESS to the address" in error and "ports.host" not in error
    assert "prepare" not in (tmp_path / "calls").read_text()


# As srun: a task on each node, at the same time; the exit code of one that failed.
SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$CALLS"
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NNODES=2 SLURM_NODEID=$node "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit $((code))
"""
KILLED_ONCE = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
[[ "$*" == *" --node $KILLED "* && ! -e "$CALLS.killed" ]] || exit 0
touch "$CALLS.killed"
kill -9 $$
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_launcher_starts_again_unless_it_is_that_of_the_first_node(
    tmp_path: Path, killed: int
) -> None:
    for name, text in {"python": KILLED_ONCE, "srun": SRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "a.toml").touch()
    job = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": f"{tmp_path}/python",
        "CALLS": f"{tmp_path}/calls", "SLURM_JOB_NUM_NODES": "2", "HEAD_ADDRESS": "10.0.0.1",
        "KILLED": str(killed),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(EXAMPLES / "launch.sh"), "a.toml", "--run-dir", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env=os.environ | job,
    )  # fmt: skip
    calls = (tmp_path / "calls").read_text().splitlines()
    [srun] = [call for call in calls if call.startswith("srun ")]
    assert "--kill-on-bad-exit=0 --no-kill --wait=0 " in srun
    started = sorted(call.split()[-3] for call in calls if re.match("-m .* --node ", call))
    assert started == (["0", "1", "1"] if killed else ["0", "1"])
    assert done.returncode == (0 if killed else 137), done.stderr


# Stands for the launcher alone, which would train for minutes; tools run as they are.
PYTHON = """#!/usr/bin/env bash
if [ "$2" = megatron_rl.cli.main ]; then echo "$@" >>"$0.calls"; exit 7; fi
exec env PYTHONPATH={root} {python} "$@"
"""


def test_quickstart_given_again_goes_on_with_its_own_folder(tmp_path: Path) -> None:
    tree, run_dir = tmp_path / "tree", tmp_path / "run"
    for folder in ("examples", "tools", ".venv/bin"):
        (tree / folder).mkdir(parents=True)
    shutil.copy(EXAMPLES / "quickstart.sh", tree / "examples")
    (tree / "tools" / "install.sh").write_text("")
    python = tree / ".venv" / "bin" / "python"
    python.write_text(PYTHON.format(root=EXAMPLES.parent, python=sys.executable))
    python.chmod(0o755)

    def quickstart(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", "examples/quickstart.sh", "--tiny", "--run-dir", str(folder), *more]
        return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=200)

    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file()}

    assert quickstart(run_dir).returncode == 7
    made = files()
    assert {path.name for path in made} >= {"model.safetensors", "prompts.jsonl", "sft.jsonl"}
    (run_dir / "config.toml").touch()  # the run began
    again = quickstart(run_dir)
    assert again.returncode == 7, again.stderr
    assert {path: time for path, time in files().items() if path.name != "config.toml"} == made
    calls = Path(f"{python}.calls").read_text().splitlines()
    assert len(calls) == 2 and calls[0] == calls[1] and f"--run-dir {run_dir}" in calls[0]
    assert not any(load_config(EXAMPLES / f"{n}.toml").sft.baseline for n in ("quickstart", "tiny"))
    quickstart(run_dir, "--sft-baseline")
    assert Path(f"{python}.calls").read_text().splitlines()[2].split()[-1] == "sft.baseline=true"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").touch()
    refused = quickstart(tmp_path / "other")
    assert refused.returncode == 2 and "holds other files: name another folder" in refused.stderr


@pytest.mark.parametrize("name", [*(e.name for e in (*SINGLE, *SLURM)), "magistral_stages"])
def test_settings_for_speed_are_on_where_docs_clusters_says(name: str) -> None:
    config = load_config(EXAMPLES / f"{name}.toml", [])
    is_replicated = config.parallel.data > 1
    assert config.parallel.overlap_gradients == is_replicated
    assert (config.train.packing == "flops") == is_replicated
    assert config.has_expandable_segments == (name != "one_gpu")
    assert config.model.recompute == (
        "full" if name in ("qwen3_30b_a3b", "magistral_medium_like") else "selective"
    )
    chosen = ("swiglu", "gradient_accumulation", "moe_permute")
    assert config.model.fusions == (chosen if name == "qwen3_30b_a3b" else "auto")
