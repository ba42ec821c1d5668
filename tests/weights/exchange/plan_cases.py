"""Random models and layouts of trainer and engine ranks, for tests of plans."""

import math
from dataclasses import dataclass

from hypothesis import strategies as st

from megatron_rl.weights.exchange.plan import Plan, make_plan
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.ranks import place_of
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.layout.trainer_layout import hf_shapes, trained_slices

LLAMA = ModelShape(
    architecture="LlamaForCausalLM", layers=4, hidden=16, ffn=32, heads=4, kv_heads=2,
    head_dim=4, vocab=257, max_positions=8, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
    is_tied=False, has_qkv_bias=False, has_qk_norm=False, sliding_window=None,
)  # fmt: skip
DRAWN = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Glm4MoeForCausalLM",
    "DeepseekV3ForCausalLM", "Olmo2ForCausalLM",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, the trainer's ranks and the engines that it syncs to."""

    shape: ModelShape
    world_size: int
    like: Place
    engines: tuple[int, ...]
    """Tensor ranks of each; 0 is an engine that holds transformers' parameters."""
    itemsize: int
    bucket_bytes: int

    def senders(self) -> dict[int, list[Slice]]:
        places = [place_of(rank, self.world_size, self.like) for rank in range(self.world_size)]
        return {rank: trained_slices(self.shape, place) for rank, place in enumerate(places)}

    def receivers(self, ranks: int) -> dict[int, list[Slice]]:
        first = self.world_size
        if not ranks:
            return {first: hf_slices(self.shape)}
        return {
            first + rank: engine_slices(
                self.shape, Share(rank, ranks), expert_parallel=self.divides_experts(ranks)
            )
            for rank in range(ranks)
        }

    def plan(
        self,
        senders: dict[int, list[Slice]],
        receivers: dict[int, list[Slice]],
        *,
        few_senders: bool,
    ) -> Plan:
        return make_plan(
            senders,
            receivers,
            itemsize=self.itemsize,
            bucket_bytes=self.bucket_bytes,
            few_senders=few_senders,
        )

    def divides_experts(self, ranks: int) -> int:
        """Ranks of an engine that hold experts of their own: all that can, of every second case."""
        if not self.shape.experts or self.bucket_bytes % 2:
            return 1
        wanted = math.gcd(self.shape.experts, ranks)
        return wanted if self.shape.moe_ffn % (ranks // wanted) == 0 else 1


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    architecture = draw(st.sampled_from(DRAWN))
    is_latent = architecture == "DeepseekV3ForCausalLM"
    has_experts = is_latent or "Mix" in architecture or "Moe" in architecture
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.sampled_from([1, 2, 4]))
    units = 4 * draw(st.integers(1, 3)) if has_experts else 0
    is_glm = architecture.startswith("Glm")
    is_corrected = is_glm or is_latent
    heads = kv_heads * draw(st.sampled_from([1, 2, 3]))
    return ModelShape(
        architecture=architecture,
        layers=layers,
        hidden=draw(st.integers(1, 9)),
        ffn=4 * draw(st.integers(1, 5)),
        heads=heads,
        kv_heads=heads if is_latent else kv_heads,
        head_dim=draw(st.integers(3, 4)) if is_latent else draw(st.integers(1, 4)),
        rotary_dim=2 if is_latent else 0,
        kv_rank=draw(st.integers(1, 3)) if is_latent else 0,
        q_rank=draw(st.integers(0, 3)) if is_latent else 0,
        value_dim=draw(st.integers(1, 3)) if is_latent else 0,
        # Primes: no count of ranks divides them.
        vocab=draw(st.sampled_from([131, 257, 397])),
        max_positions=8, norm_eps=1e-6, rope_theta=1e4, rope_scaling=None, sliding_window=None,
        is_tied=draw(st.booleans()) and not has_experts,
        has_qkv_bias=draw(st.booleans()) if is_glm else architecture == "Qwen2ForCausalLM",
        has_qk_norm=draw(st.booleans()) if is_glm else architecture.startswith(("Qwen3", "Olmo")),
        norms_all_heads=architecture.startswith("Olmo"),
        norms_behind=architecture.startswith("Olmo"),
        experts=draw(st.sampled_from([2, 4])) if has_experts else 0,
        experts_per_token=1,
        moe_ffn=units,
        dense_layers=draw(st.integers(0, layers - 1)) if is_corrected else 0,
        shared_ffn=units * draw(st.integers(0, 2)) if is_corrected else 0,
        is_router_corrected=is_corrected,
    )  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = draw(shapes())
    tensor = draw(st.sampled_from([size for size in (1, 2, 4) if shape.kv_heads % size == 0]))
    pipeline = draw(st.sampled_from([size for size in (1, 2, 4) if shape.layers % size == 0]))
    data = draw(st.integers(1, 3))
    shared = math.gcd(shape.experts, tensor * data) if shape.experts else 1
    expert = draw(st.sampled_from([size for size in (1, 2, 4) if shared % size == 0]))
    halves = [1, 2] if shape.experts and tensor * data // expert % 2 == 0 else [1]
    expert_tensor = draw(st.sampled_from(halves))
    chunks = draw(st.sampled_from([n for n in (1, 2) if shape.layers % (pipeline * n) == 0]))
    possible = [size for size in (0, 1, 2, 3, 4, 6) if not size or is_possible(shape, size)]
    itemsize = draw(st.sampled_from([2, 4]))
    rows = [columns for size in hf_shapes(shape).values() for columns in size[1:]]
    engines = draw(st.lists(st.sampled_from(possible), min_size=1, max_size=2))
    world_size = tensor * pipeline * data
    least = itemsize * max(1, *rows) + 32 * max(world_size, *engines)
    return Case(
        shape,
        world_size,
        Place(
            Share(0, tensor),
            Share(0, pipeline),
            Share(0, expert),
            Share(0, expert_tensor),
            chunks if pipeline > 1 else 1,
        ),
        tuple(engines),
        itemsize,
        least * draw(st.sampled_from([1, 3, 20, 100])) + draw(st.integers(0, 9)),
    )


def is_possible(shape: ModelShape, ranks: int) -> bool:
    try:
        engine_slices(shape, Share(ranks - 1, ranks))
    except ValueError:
        return False
    return True
