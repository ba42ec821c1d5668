"""Positions of a model by its config.json, against what SGLang counts and has angles for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.backend.cpu import sglang as sglang_cpu
from megatron_rl.config.hf_config import positions_of

KEY = "original_max_position_embeddings"
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
CASES: list[tuple[dict[str, Any], int, int]] = [
    ({}, 40_960, 40_960),
    ({"rope_type": "linear", "factor": 4.0}, 40_960, 163_840),
    ({"rope_type": "dynamic", "factor": 4.0}, 40_960, 163_840),
    # Qwen3's recipe: 4 x 32,768. Its max_position_embeddings stays.
    ({"rope_type": "yarn", "factor": 4.0, KEY: 32_768}, 40_960, 131_072),
    # Of gpt-oss: max_position_embeddings has the factor.
    ({"rope_type": "yarn", "factor": 32.0, KEY: 4_096}, 131_072, 131_072),
    ({"type": "yarn", "factor": 4.0, KEY: 32_768}, 32_768, 131_072),
    # As transformers 5: what is left out is max_position_embeddings.
    ({"rope_type": "yarn", "factor": 4.0}, 32_768, 131_072),
    # Of Llama 3.1 and Phi 4 mini.
    ({"rope_type": "llama3", KEY: 8_192, **LLAMA3}, 131_072, 131_072),
    ({"rope_type": "llama3", **LLAMA3}, 131_072, 131_072),
    ({"rope_type": "longrope", KEY: 4_096, **LONGROPE}, 131_072, 131_072),
    ({"rope_type": "longrope", **LONGROPE}, 131_072, 131_072),
]
"""(rope_scaling, max_position_embeddings, positions)."""
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64,
    "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "num_hidden_layers": 2, "vocab_size": 1000,
}  # fmt: skip
COUNTS = """
import json, sys
from transformers import AutoConfig
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.utils.hf_transformers.common import get_context_length

found = []
for folder in sys.argv[1:]:
    config = AutoConfig.from_pretrained(folder)
    longest = config.max_position_embeddings
    angles = get_rope(32, 32, longest, 10000, rope_scaling=dict(config.rope_parameters))
    # Of longrope SGLang keeps one table behind the other.
    cache = getattr(angles, "cos_sin_cache", None)
    found.append([get_context_length(config), None if cache is None else len(cache)])
print(json.dumps(found))
"""


@pytest.mark.parametrize(("rope", "longest", "positions"), CASES)
def test_positions_of_each_rotary_scaling(
    rope: dict[str, Any], longest: int, positions: int
) -> None:
    values = {"max_position_embeddings": longest}
    assert positions_of(values | {"rope_scaling": rope}) == positions
    assert positions_of(values | {"rope_parameters": rope}) == positions
    beside = {key: value for key, value in rope.items() if key != KEY}
    if KEY in rope:
        assert positions_of({**values, KEY: rope[KEY], "rope_scaling": beside}) == positions


def test_the_layers_that_see_farthest_count() -> None:
    plain, yarn = {"rope_type": "default"}, {"rope_type": "yarn", "factor": 8.0, KEY: 100}
    rope = {"sliding_attention": plain, "full_attention": yarn}
    assert positions_of({"max_position_embeddings": 200, "rope_parameters": rope}) == 800
    assert positions_of({"rope_parameters": rope}) is None


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_sglang_counts_no_more_and_has_angles_for_all(tmp_path: Path) -> None:
    """Look again when this fails: `generation/engine.py` has SGLang exceed what it counts."""
    folders = [tmp_path / str(number) for number in range(len(CASES))]
    for folder, (rope, longest, _) in zip(folders, CASES, strict=True):
        folder.mkdir()
        values = QWEN3 | {"max_position_embeddings": longest}
        (folder / "config.json").write_text(json.dumps(values | {"rope_scaling": rope or None}))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COUNTS, *map(str, folders)], check=True,
        env=os.environ | sglang_cpu.server_environment(1), capture_output=True, text=True,
        timeout=100,
    )  # fmt: skip
    for (counted, angles), case in zip(json.loads(done.stdout), CASES, strict=True):
        rope, longest, positions = case
        is_yarn = "yarn" in rope.values()
        assert counted == (longest if is_yarn else positions)
        assert angles is None or angles >= positions, case
