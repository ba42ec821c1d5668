"""The plan of an exchange, for random models and layouts, carried out on plain arrays."""

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.weights.exchange.plan import Move, Parcel, Plan, make_plan
from megatron_rl.weights.layout.engine_layout import engine_slices, hf_slices
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.ranks import place_of
from megatron_rl.weights.layout.shape import ModelShape, read_shape
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.layout.trainer_layout import hf_shapes, trained_slices, untrained
from tests.family_cases import ENDING, family_cases
from tests.tiny_models import write_model
from tests.weights.made_up import buffer_bytes

DTYPES = {2: torch.bfloat16, 4: torch.float32}
UNSET = -1
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


def numbered(shape: ModelShape) -> dict[str, np.ndarray]:
    """Every element of every HF tensor has a number of its own."""
    tensors, start = {}, 0
    for name, size in hf_shapes(shape).items():
        count = math.prod(size)
        rows = size[0]
        tensors[name] = np.arange(start, start + count).reshape(rows, count // rows)
        start += count
    return tensors


def filled(slices: list[Slice], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters that hold their slices; what is in none is UNSET."""
    rows: dict[str, int] = defaultdict(int)
    columns: dict[str, int] = defaultdict(int)
    for part in slices:
        rows[part.local] = max(rows[part.local], part.local_row + part.rows)
        columns[part.local] = max(columns[part.local], part.local_column + part.columns)
    parameters = {name: np.full((rows[name], columns[name]), UNSET) for name in rows}
    for part in slices:
        values = tensors[part.hf][part.row :, part.column :][: part.rows, : part.columns]
        window(parameters[part.local], part.local_row, part.local_column, part)[:] = values
    return parameters


def window(matrix: np.ndarray, row: int, column: int, size: Slice | Move) -> np.ndarray:
    return matrix[row : row + size.rows, column : column + size.columns]


def carry_out(
    plan: Plan, sent: dict[int, dict[str, np.ndarray]], wanted: dict[int, dict[str, np.ndarray]]
) -> dict[int, dict[str, np.ndarray]]:
    """The receivers' parameters after the plan; fails on an element that comes twice."""
    got = {
        rank: {name: np.full_like(matrix, UNSET) for name, matrix in parameters.items()}
        for rank, parameters in wanted.items()
    }
    for parcel in (parcel for each in plan.rounds for parcel in each):
        for move in parcel.moves:
            target = window(
                got[parcel.receiver][move.target], move.target_row, move.target_column, move
            )
            assert target.shape == (move.rows, move.columns) and (target == UNSET).all()
            source = sent[parcel.sender][move.source]
            target[:] = window(source, move.source_row, move.source_column, move)
    return got


def bytes_in_round(parcels: tuple[Parcel, ...], itemsize: int) -> dict[tuple[str, int], int]:
    """Buffers of each rank."""
    held: dict[tuple[str, int], int] = defaultdict(int)
    for parcel in parcels:
        size = buffer_bytes(parcel, DTYPES[itemsize])
        held["sender", parcel.sender] += size
        held["receiver", parcel.receiver] += size
    return held


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(cases())
def test_every_element_arrives_once_within_the_buckets(case: Case) -> None:
    tensors = numbered(case.shape)
    senders = case.senders()
    sent = {rank: filled(slices, tensors) for rank, slices in senders.items()}
    for ranks in case.engines:
        receivers = case.receivers(ranks)
        plan = make_plan(senders, receivers, itemsize=case.itemsize, bucket_bytes=case.bucket_bytes)
        check_contents(plan, receivers, sent, tensors)
        check_sizes(plan, case)
        sizes = {
            rank: case.itemsize * sum(part.size for part in slices)
            for rank, slices in receivers.items()
        }
        assert plan.received_bytes() == sizes
        assert sum(plan.sent_bytes().values()) == sum(sizes.values())
        check_balance(senders, plan.sent_bytes(), case.bucket_bytes)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "options"), family_cases())
def test_every_family_arrives_whole(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    family, many = FAMILIES[name + ENDING], 3 if "tie_word_embeddings" in options else 2
    # No engine has tied embeddings besides experts.
    other = {"tie_word_embeddings": False} if family.experts else {}
    write_model(tmp_path, family=name, vocab_size=331, **(options | other))
    shape = read_shape(tmp_path)
    tensors = numbered(shape)
    trained = [tensors[key].ravel() for key in tensors.keys() - untrained(shape)]
    # 0 ranks: the hf engine, which takes no gates and ups in pairs. Even: see `divides_experts`.
    engines = [*itertools.product((0,) * (not family.pairs_units) + (1, many), (8192, 8193))]
    for like in (Place(), Place(Share(0, many)), Place(pipeline=Share(0, 2))):
        world_size = like.tensor.size * like.pipeline.size
        for ranks, bucket_bytes in engines:
            case = Case(shape, world_size, like, (ranks,), 4, bucket_bytes)
            senders, receivers = case.senders(), case.receivers(ranks)
            plan = make_plan(senders, receivers, itemsize=4, bucket_bytes=bucket_bytes)
            sent = {rank: filled(slices, tensors) for rank, slices in senders.items()}
            got = check_contents(plan, receivers, sent, tensors)
            arrived = [one.ravel() for held in got.values() for one in held.values()]
            assert np.array_equal(
                np.setdiff1d(np.concatenate(arrived), UNSET), np.sort(np.concatenate(trained))
            )


def check_contents(
    plan: Plan,
    receivers: dict[int, list[Slice]],
    sent: dict[int, dict[str, np.ndarray]],
    tensors: dict[str, np.ndarray],
) -> dict[int, dict[str, np.ndarray]]:
    """What the receivers get, if it is right."""
    wanted = {rank: filled(slices, tensors) for rank, slices in receivers.items()}
    got = carry_out(plan, sent, wanted)
    for rank, parameters in wanted.items():
        for name, matrix in parameters.items():
            assert np.array_equal(got[rank][name], matrix), name
    return got


def check_sizes(plan: Plan, case: Case) -> None:
    by_round = [bytes_in_round(parcels, case.itemsize) for parcels in plan.rounds]
    assert all(size <= case.bucket_bytes for held in by_round for size in held.values())
    two = [
        first.get(end, 0) + second.get(end, 0)
        for first, second in zip(by_round, [*by_round[1:], {}], strict=True)
        for end in first.keys() | second.keys()
    ]
    assert max(two) <= plan.peak_bytes() <= 2 * case.bucket_bytes
    for parcels in plan.rounds:
        pairs = [(parcel.sender, parcel.receiver) for parcel in parcels]
        assert parcels and len(set(pairs)) == len(pairs)


def check_balance(
    senders: dict[int, list[Slice]], loads: dict[int, int], bucket_bytes: int
) -> None:
    alike: dict[tuple[Slice, ...], list[int]] = defaultdict(list)
    for rank, slices in senders.items():
        alike[tuple(slices)].append(loads.get(rank, 0))
    assert all(max(group) - min(group) <= bucket_bytes for group in alike.values())


def part(hf: str, row: int, rows: int, columns: int = 4, local: str = "w") -> Slice:
    return Slice(hf, row, 0, rows, columns, local, 0, 0)


def test_tensors_that_all_hold_make_up_for_those_that_one_holds() -> None:
    senders = {
        0: [part("own", 0, 30), part("common", 0, 60, local="c")],
        1: [part("common", 0, 60, local="c")],
        2: [part("common", 0, 60, local="c")],
    }
    receivers = {3: [part("own", 0, 30), part("common", 0, 60, local="c")]}
    plan = make_plan(senders, receivers, itemsize=4, bucket_bytes=4 * 4 * 8 + 3 * 32)
    assert plan.sent_bytes() == {0: 480, 1: 480, 2: 480}


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "ranks"),
    [(1, 1, 8, 4), (2, 2, 2, 8), (4, 2, 1, 2), (2, 1, 4, 1)],
)
def test_all_receivers_are_served_at_the_same_time(
    tensor: int, pipeline: int, data: int, ranks: int
) -> None:
    shape = replace(
        LLAMA, vocab=997, layers=16, hidden=512, ffn=1536, heads=8, kv_heads=8, head_dim=64
    )
    like = Place(Share(0, tensor), Share(0, pipeline), Share())
    case = Case(shape, tensor * pipeline * data, like, (ranks,), 2, 1 << 20)
    plan = make_plan(case.senders(), case.receivers(ranks), itemsize=2, bucket_bytes=1 << 20)
    busiest = max(*plan.sent_bytes().values(), *plan.received_bytes().values())
    least = math.ceil(busiest / (1 << 20))
    assert least >= 10 and len(plan.rounds) <= 1.05 * least + 1


def test_rounds_are_few() -> None:
    senders = {rank: [part("a", 25 * rank, 25)] for rank in range(4)}
    receivers = {4 + rank: [part("a", 50 * rank, 50)] for rank in range(2)}
    plan = make_plan(senders, receivers, itemsize=4, bucket_bytes=4 * 4 * 10 + 4 * 32)
    # Each receiver takes 50 rows, 10 a round.
    assert len(plan.rounds) == 5


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (2, 2), (1, 4)])
def test_a_stage_fills_one_parameter_of_a_receiver_after_the_other(
    tensor: int, pipeline: int
) -> None:
    """So an engine that quantises whole layers stages few of them."""
    like = Place(Share(0, tensor), Share(0, pipeline), Share())
    case = Case(LLAMA, tensor * pipeline, like, (2,), 2, 1024)
    receivers = case.receivers(2)
    plan = make_plan(case.senders(), receivers, itemsize=2, bucket_bytes=1024)
    for receiver in receivers:
        missing = Counter({part.local: 0 for part in receivers[receiver]})
        for part in receivers[receiver]:
            missing[part.local] += part.size
        whole = dict(missing)
        for parcels in plan.of_receiver(receiver):
            for move in (move for parcel in parcels for move in parcel.moves):
                missing[move.target] -= move.size
            parts = [name for name, left in missing.items() if 0 < left < whole[name]]
            assert len(parts) <= pipeline, parts
        assert not any(missing.values())


def test_an_element_that_nobody_holds_is_refused() -> None:
    senders = {0: [part("a", 0, 4)], 1: [part("a", 5, 5)]}
    with pytest.raises(ValueError, match="of the 40 elements that rank 2 needs of a, .* hold 36"):
        make_plan(senders, {2: [part("a", 0, 10)]}, itemsize=4, bucket_bytes=1000)
    words = "^1 names that the engine does not take: a; 2 parameters that nothing covers: b, c$"
    with pytest.raises(ValueError, match=words):
        needed = {2: [part("b", 0, 1)], 3: [part("c", 0, 1)]}
        make_plan(senders, needed, itemsize=4, bucket_bytes=1000)


def test_a_row_larger_than_a_bucket_is_refused_and_one_as_large_is_not() -> None:
    senders, receivers = {0: [part("a", 0, 3, 100)]}, {1: [part("a", 0, 3, 100)]}
    plan = make_plan(senders, receivers, itemsize=4, bucket_bytes=432)
    assert len(plan.rounds) == 3
    for bucket_bytes in (431, 31, 1):
        with pytest.raises(ValueError, match="weights.bucket_bytes.* one row of w has 100"):
            make_plan(senders, receivers, itemsize=4, bucket_bytes=bucket_bytes)


def test_a_plan_does_not_depend_on_the_order_of_the_ranks() -> None:
    case = Case(LLAMA, 8, Place(Share(0, 2), Share(0, 2), Share()), (2,), 2, 2048)
    senders = dict(reversed(case.senders().items()))
    plans = [
        make_plan(given, case.receivers(2), itemsize=2, bucket_bytes=2048)
        for given in (case.senders(), senders)
    ]
    assert plans[0] == plans[1]
