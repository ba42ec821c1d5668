"""The plan of an exchange, for random models and layouts, carried out on plain arrays."""

import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from megatron_rl.weights.exchange.plan import Move, Parcel, Plan, make_plan
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.place import Place
from megatron_rl.weights.layout.shape import ModelShape, read_shape
from megatron_rl.weights.layout.slices import Share, Slice
from megatron_rl.weights.layout.trainer_layout import hf_shapes, untrained
from tests.family_cases import ENDING, family_cases
from tests.tiny_models import write_model
from tests.weights.exchange.plan_cases import LLAMA, Case, cases
from tests.weights.made_up import buffer_bytes

DTYPES = {2: torch.bfloat16, 4: torch.float32}
UNSET = -1


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
        sizes = {
            rank: case.itemsize * sum(part.size for part in slices)
            for rank, slices in receivers.items()
        }
        even, few = (case.plan(senders, receivers, few_senders=few) for few in (False, True))
        for plan in (even, few):
            check_contents(plan, receivers, sent, tensors)
            check_sizes(plan, case)
            assert plan.received_bytes() == sizes
            assert sum(plan.sent_bytes().values()) == sum(sizes.values())
        check_balance(senders, even.sent_bytes(), case.bucket_bytes)
        # No sender is slower than the fullest receiver, or than the senders must be.
        slowest = max(*sizes.values(), *even.sent_bytes().values())
        assert max(few.sent_bytes().values()) <= slowest + case.bucket_bytes
        assert pairs(few) <= pairs(even)


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


def pairs(plan: Plan) -> int:
    """Pairs of a receiver and one of its senders."""
    return sum(len(plan.roots(receiver)) for receiver in plan.receivers)


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
    ("tensor", "pipeline", "data", "ranks", "roots"),
    [(1, 1, 8, 4, 1), (2, 2, 2, 8, 3), (4, 2, 1, 2, 4), (2, 1, 4, 1, 2), (4, 2, 8, 8, 2)],
)
def test_all_receivers_are_served_at_the_same_time(
    tensor: int, pipeline: int, data: int, ranks: int, roots: int
) -> None:
    """roots: most senders of a receiver. A stage has as many parts of it as trainer ranks per
    engine rank, and one more where every copy has sent its share."""
    shape = replace(
        LLAMA, vocab=997, layers=16, hidden=512, ffn=1536, heads=8, kv_heads=8, head_dim=64
    )
    like = Place(Share(0, tensor), Share(0, pipeline), Share())
    case = Case(shape, tensor * pipeline * data, like, (ranks,), 2, 1 << 20)
    senders, receivers = case.senders(), case.receivers(ranks)
    even, few = (case.plan(senders, receivers, few_senders=few) for few in (False, True))
    for plan in (even, few):
        busiest = max(*plan.sent_bytes().values(), *plan.received_bytes().values())
        least = math.ceil(busiest / (1 << 20))
        assert least >= 10 and len(plan.rounds) <= 1.05 * least + 1
    assert max(len(few.roots(receiver)) for receiver in receivers) == roots


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
