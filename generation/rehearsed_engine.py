"""Checks, without a GPU, that the slices of a weight sync fit SGLang's own model at its real size.

Runs where a run is rehearsed; a child process builds the model (`sglang_trace.py`).
"""

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from generation.child import ChildFailed, ask
from generation.engine import engine_setup
from generation.sglang_command import server_arguments, server_environment
from generation.sglang_orders import LOADER
from generation.sglang_trace import ENVIRONMENT, Question, RankTrace
from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config
from megatron_rl.weights.exchange.plan import EngineKind
from megatron_rl.weights.layout.engine_checks import check_slices
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.families.family import PLAIN, Spelling
from megatron_rl.weights.layout.shape import ModelShape
from megatron_rl.weights.layout.slices import Slice
from megatron_rl.weights.layout.trainer_layout import file_shapes, hf_shapes, untrained

_MODULE = "generation.sglang_trace"
_LIMIT_S = 180.0
_LIMIT_PER_RANK_S = 30.0
"""Seconds of the child for SGLang's import, and for one rank. 235B take 6 s a rank."""


def check_engine(config: Config, shape: ModelShape) -> list[str]:
    """Problems of weight syncs to the configuration's engines, in words; [] if there are none.

    Every rank of one engine is built from SGLang's own class, at the real size and without memory
    for weights. SGLang then loads a checkpoint of `shape`. A weight sync must copy exactly what
    SGLang copies, rectangle by rectangle; together they must cover each parameter once; dtypes must
    agree. Replicas are all alike. An FP8 engine is checked up to its codes.

    `model.path` needs config.json alone. Takes 10 s for SGLang's import, then 1 to 6 s a rank, and
    1 GiB of memory. Raises InputError for another engine than "sglang": nothing is known of it.
    """
    kind = _kind_of(config)
    try:
        wanted = [kind.slices(shape, rank) for rank in range(kind.world_size)]
    except ValueError as error:
        return [str(error)]
    try:
        traces = trace_engine(config, shape)
    except ChildFailed as error:
        return [f"SGLang cannot build its model of this engine: {error}"]
    return _summarised(
        [
            (rank, problem)
            for rank, (slices, trace) in enumerate(zip(wanted, traces, strict=True))
            for problem in differences(slices, trace, config.model.dtype)
        ]
    )


def trace_engine(config: Config, shape: ModelShape) -> list[RankTrace]:
    """The parameters and loads of each rank of one engine. Raises ChildFailed and InputError."""
    [traces] = trace_engines([(config, shape)])
    return traces


def trace_engines(engines: Sequence[tuple[Config, ModelShape]]) -> list[list[RankTrace]]:
    """The same of several engines, for which SGLang is imported once."""
    asked = [_question(config, shape) for config, shape in engines]
    limit_s = _LIMIT_S + _LIMIT_PER_RANK_S * sum(question.ranks for question in asked)
    answer = ask(_MODULE, msgspec.json.encode(asked), asked[0].environment, limit_s)
    found = msgspec.json.decode(answer, type=list[list[RankTrace]])
    return [
        [_of_slices(trace, config, shape, rank) for rank, trace in enumerate(traces)]
        for (config, shape), traces in zip(engines, found, strict=True)
    ]


def _question(config: Config, shape: ModelShape) -> Question:
    setup = engine_setup(config, 0, ())
    # Neither has a part in the shape of a parameter, and both want a GPU.
    setup = replace(setup, is_deterministic=False, releases_memory=False)
    # The last of equal options counts. Attention has no parameters, and none is computed.
    given = server_arguments(setup, LOADER)
    arguments = [*given, "--device=cuda", "--attention-backend=torch_native"]
    environment = {**os.environ, **server_environment(setup), **ENVIRONMENT}
    spelling = _spelling(shape)
    tensors = {spelling.rename(name): size for name, size in file_shapes(shape).items()}
    ranks = _kind_of(config).world_size
    return Question(arguments, environment, ranks, config.model.dtype, tensors)


def _spelling(shape: ModelShape) -> Spelling:
    wrapper = FAMILIES[shape.architecture].wrapper
    return PLAIN if wrapper is None else wrapper.spellings[0]


def _of_slices(trace: RankTrace, config: Config, shape: ModelShape, rank: int) -> RankTrace:
    """What weight syncs are about, under the text model's own names."""
    spelling, kept = _spelling(shape), untrained(shape)
    own = {spelling.rename(name): name for name in hf_shapes(shape)}
    return RankTrace(
        _kind_of(config).trained(shape, rank, trace.parameters),
        [part._replace(hf=own[part.hf]) for part in trace.loaded if own[part.hf] not in kept],
        trace.odd,
    )


def _kind_of(config: Config) -> EngineKind:
    generator = config.generator
    if generator.engine != "sglang":
        raise InputError(
            f"generator.engine = {generator.engine!r}: only models of 'sglang' can be built "
            "without a GPU and compared with the slices of a weight sync"
        )
    # Without `ffn_multiple`: only SGLang's CPU mode pads MLP units.
    return EngineKind(
        "sglang", generator.tensor_parallel, expert_parallel=generator.expert_parallel
    )


def differences(slices: Sequence[Slice], trace: RankTrace, dtype: str) -> list[str]:
    """Where the slices of a rank and SGLang's own loading differ, in words.

    dtype: of the trainer's weights, which a weight sync sends.
    """
    ours, theirs = _by_parameter(slices), _by_parameter(trace.loaded)
    problems = [f"SGLang copies {text}: slices cannot follow it" for text in trace.odd]
    for name in sorted(ours.keys() | theirs.keys() | trace.parameters.keys()):
        if name not in trace.parameters:
            problems.append(f"a weight sync sends {name}, which SGLang's model does not have")
        elif name not in ours:
            problems.append(f"no weight sync reaches {name}")
        elif set(ours[name]) != set(theirs[name]):
            problems.append(f"{name}: {_difference(set(ours[name]), set(theirs[name]))}")
        else:
            problems += _misfits(name, ours[name], trace, dtype)
    return problems


def _difference(ours: set[Slice], theirs: set[Slice]) -> str:
    """The first slices that only one side has."""
    sides = (("a weight sync copies", ours - theirs), ("SGLang copies", theirs - ours))
    return "; ".join(
        f"{who} {_text(min(only)) if only else 'nothing of it'}"
        + (f" and {len(only) - 1} more" if len(only) > 1 else "")
        for who, only in sides
    )


def _misfits(name: str, slices: list[Slice], trace: RankTrace, dtype: str) -> list[str]:
    """Holes and overlaps of the slices of one parameter, and another dtype."""
    shape, stored = trace.parameters[name]
    problems = []
    # SGLang computes some products in float32, and a copy into it is exact.
    if stored not in (dtype, "float32"):
        problems.append(f"{name}: SGLang stores {stored}, and a weight sync sends {dtype}")
    try:
        check_slices(slices, {name: torch.empty(shape, device="meta")})
    except ValueError as error:
        problems.append(str(error))
    return problems


def _by_parameter(slices: Sequence[Slice]) -> dict[str, list[Slice]]:
    found: dict[str, list[Slice]] = defaultdict(list)
    for part in slices:
        found[part.local].append(part)
    return found


def _summarised(problems: Sequence[tuple[int, str]]) -> list[str]:
    """One line for all problems whose texts differ in numbers alone; problems: (rank, text)."""
    alike: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for rank, text in problems:
        alike[re.sub(r"\d+", "N", text)].append((rank, text))
    return [
        f"engine rank {found[0][0]}: {found[0][1]}"
        + (f" ({len(found)} such problems on ranks {_ranks(found)})" if len(found) > 1 else "")
        for found in alike.values()
    ]


def _ranks(problems: Sequence[tuple[int, str]]) -> str:
    return ", ".join(map(str, sorted({rank for rank, _ in problems})))


def _text(part: Slice) -> str:
    rows = f"rows {part.row} to {part.row + part.rows - 1}"
    columns = f"columns {part.column} to {part.column + part.columns - 1}"
    return f"{rows}, {columns} of {part.hf} to row {part.local_row}, column {part.local_column}"
