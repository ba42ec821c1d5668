"""The load of the queue benchmark, and how many rollouts a cluster needs.

Used by tools.bench.queue and its scripted peers.
"""

from typing import NamedTuple

import numpy as np

from megatron_rl.plan.flops import step_flops
from megatron_rl.protocol.types import Rollout, VersionSpan
from megatron_rl.weights.layout.shape import ModelShape

GPUS = 512
TRAINER_SHARE = 0.5
"""Of the GPUs, as in examples/magistral_24b.toml."""
TRAINER_FLOPS = 400e12
"""Model FLOP/s of an H100 that trains a dense model in bf16: 0.4 of its peak."""
TARGET = 4.0
"""Times what the cluster produces."""
PROMPT_TOKENS = 340
"""The mean of tools/bench/packing.py."""
COMPLETION_TOKENS = 32_768
_CHARS_PER_TOKEN = 4


def _shape(**sizes: int) -> ModelShape:
    return ModelShape(
        architecture="",
        max_positions=40_960,
        norm_eps=1e-5,
        rope_theta=1e6,
        rope_scaling=None,
        is_tied=False,
        has_qkv_bias=False,
        has_qk_norm=False,
        sliding_window=None,
        **sizes,
    )


DENSE = _shape(
    layers=40, hidden=5120, ffn=32_768, heads=32, kv_heads=8, head_dim=128, vocab=131_072
)
"""Mistral Small 24B, as its config.json on Hugging Face says."""
EXPERTS = _shape(
    layers=48, hidden=2048, ffn=6144, heads=32, kv_heads=4, head_dim=128, vocab=151_936,
    experts=128, experts_per_token=8, moe_ffn=768,
)  # fmt: skip
"""Qwen3-30B-A3B, likewise."""


class Produced(NamedTuple):
    """What the engines of a cluster generate, by the simulator."""

    tokens_per_s: float
    completions_per_s: float
    """All of them, also of groups that turn out to have zero variance."""

    @property
    def mean_tokens(self) -> int:
        """Of a completion."""
        return round(self.tokens_per_s / self.completions_per_s)


DENSE_PRODUCED = Produced(283_500, 30.2)
EXPERTS_PRODUCED = Produced(553_200, 132.2)
"""The most of any split of GPUS H100s. `DIR/config.json` is that of the model, N 512 and 1,024:

    megatron-rl simulate examples/magistral_24b.toml model.path=DIR train.prompts_per_batch=N \\
        --gpus 512 --sweep split=96,128,160,192 --lanes all --steps 4 --warm-up 4 --json
    megatron-rl simulate examples/qwen3_30b_a3b.toml model.path=DIR train.prompts_per_batch=N \\
        --gpus 512 --sweep split=64,72,80,96,128 --lanes all --steps 4 --warm-up 4 --json

A batch has as many times more groups as there are more GPUs than the example's. The best are 128
and 96. completions_per_s: train.prompts_per_batch * train.group_size / (1 - zero_variance_share) /
step_s.
"""


class Load(NamedTuple):
    """What the scripted peers do."""

    generators: int = 1000
    slots: int = 2
    """Completions that a generator runs at once."""
    tokens: int = COMPLETION_TOKENS
    """Of each completion."""
    choices_per_token: int = 0
    """Expert choices of a token, uint8: layers x experts of a token; 0: no router replay."""
    prompts_per_batch: int = 128
    group_size: int = 16
    max_staleness: int = 3
    verifiers: int = 8
    leaders: int = 16
    """Data-parallel ranks."""

    @property
    def batch(self) -> int:
        """Completions of a batch."""
        return self.prompts_per_batch * self.group_size

    @property
    def held_bound(self) -> int:
        """Completions that admission lets be untrained at once."""
        return (self.max_staleness + 1) * self.batch

    @property
    def rollout_bytes(self) -> int:
        """Of a rollout's arrays and text."""
        arrays = 4 * (PROMPT_TOKENS + 2 * self.tokens)
        choices = (PROMPT_TOKENS + self.tokens - 1) * self.choices_per_token
        return arrays + choices + _CHARS_PER_TOKEN * self.tokens

    @property
    def sequence_bytes(self) -> int:
        """Of what the trainer gets of a rollout: token ids, logprobs, versions, expert choices."""
        return self.rollout_bytes + (4 - _CHARS_PER_TOKEN) * self.tokens


def learnt_rollouts_per_s(shape: ModelShape, tokens: int) -> float:
    """Completions of so many tokens that half of the cluster could learn from, were it never idle.

    An upper bound of what is produced, whatever the engines can do: admission stops them.
    """
    flops = step_flops(shape, sequences=1, length=PROMPT_TOKENS + tokens).total
    return GPUS * TRAINER_SHARE * TRAINER_FLOPS / flops


class Template:
    """Makes rollouts that share their arrays: scripted peers have no time to draw new ones."""

    def __init__(self, load: Load) -> None:
        chance = np.random.default_rng(0)
        self._prompt_ids = np.arange(PROMPT_TOKENS, dtype=np.int32)
        self._token_ids = chance.integers(0, 131_072, load.tokens, dtype=np.int32)
        self._logprobs = -chance.random(load.tokens, dtype=np.float32)
        count = (PROMPT_TOKENS + load.tokens - 1) * load.choices_per_token
        self._choices = chance.integers(0, 128, count, dtype=np.uint8)
        self._text = "".join(map(chr, chance.integers(97, 123, _CHARS_PER_TOKEN * load.tokens)))

    def rollout(self, lease_id: int, index: int, version: int) -> Rollout:
        """A completion whose second half was sampled under the version."""
        tokens, half = len(self._token_ids), len(self._token_ids) // 2
        begun = max(0, version - 1)
        return Rollout(
            lease_id,
            index,
            self._prompt_ids,
            self._token_ids,
            self._logprobs,
            [VersionSpan(begun, 0, half), VersionSpan(version, half, tokens)],
            "stop",
            self._text,
            expert_choices=self._choices,
        )
