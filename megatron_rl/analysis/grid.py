"""Writes models at grid points of the plane, and reads their evaluations.

Used by `megatron-rl analyse plane`.

    GRID/grid.json                 the points and their coordinates
    GRID/point_ROW_COLUMN/         a Hugging Face folder; its weights may go after the evaluation
    GRID/point_ROW_COLUMN/eval.json, or eval/eval.json: the evaluation

A point is a combination of checkpoints. Writing streams: memory holds a shard, a tensor and a chunk
of all checkpoints. The combination is computed in float64 and rounded once to the dtype. Opening
checkpoints refuses formats other than floating point.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import torch
from torch import Tensor

from megatron_rl.analysis.checkpoints import (
    CHUNK_BYTES,
    Checkpoint,
    OpenCheckpoints,
    open_checkpoints,
)
from megatron_rl.analysis.results import (
    PLANE,
    PlaneResult,
    PointFigures,
    PointResult,
    WeightsResult,
    to_json,
)
from megatron_rl.config.errors import InputError
from megatron_rl.protocol.whole_file import write_whole
from megatron_rl.weights.folders.conversion import check_space
from megatron_rl.weights.folders.fused_experts import fuse_experts
from megatron_rl.weights.folders.hf_folder import SHARD_BYTES, write_config, write_tensors
from megatron_rl.weights.folders.model_files import files_to_carry
from megatron_rl.weights.folders.staging import staged


@dataclass(frozen=True)
class PointFormat:
    """Format of a written point."""

    dtype: torch.dtype | None = None
    """None: each tensor's dtype in the first checkpoint."""
    shard_bytes: int = SHARD_BYTES
    chunk_bytes: int = CHUNK_BYTES


def write_point(
    checkpoints: OpenCheckpoints,
    first: Checkpoint,
    weights: np.ndarray,
    target: Path,
    form: PointFormat = PointFormat(),
) -> float:
    """Write sum_k weights[k] * checkpoint k to `target`; returns the norm of the rounding error.

    weights: [checkpoints]. The configuration and tokenizer of `first` are copied. The folder
    appears complete or not at all. Raises InputError when it exists, when the disk is full, and
    when a value exceeds the range of the dtype.
    """
    if target.exists():
        raise InputError(f"{target} exists already: name another folder, or delete it")
    check_space(target, point_bytes(checkpoints, form.dtype))
    source = checkpoints.sources[0]
    mixing = _Mixing(checkpoints, weights, target, form)
    with staged(target) as staging:
        files_to_carry(first.folder, first.files_from).write(staging)
        if source.kind != "hf" or form.dtype is not None:
            write_config(source.config, staging, mixing.dtype_of("model.embed_tokens.weight"))
        write_tensors(staging, fuse_experts(mixing.stream(), source.shape), form.shard_bytes)
    return math.sqrt(mixing.rounding)


def point_bytes(checkpoints: OpenCheckpoints, dtype: torch.dtype | None) -> int:
    """Size of the tensors of a point."""
    source = checkpoints.sources[0]
    return sum(
        math.prod(size) * (dtype or source.dtype_of(name)).itemsize
        for name, size in checkpoints.sizes.items()
    )


class _Mixing:
    def __init__(
        self, checkpoints: OpenCheckpoints, weights: np.ndarray, target: Path, form: PointFormat
    ) -> None:
        self.rounding = 0.0
        """Sum of squared rounding errors so far."""
        self._checkpoints = checkpoints
        self._weights = weights
        self._target = target
        self._form = form

    def dtype_of(self, name: str) -> torch.dtype:
        return self._form.dtype or self._checkpoints.sources[0].dtype_of(name)

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._checkpoints.sizes:
            yield name, self._mix(name)

    def _mix(self, name: str) -> Tensor:
        mixed = torch.empty(*self._checkpoints.sizes[name], dtype=self.dtype_of(name))
        for rows, values in self._checkpoints.chunks(name, self._form.chunk_bytes):
            exact = torch.from_numpy(self._weights @ values)
            part = mixed[rows].view(-1)
            part.copy_(exact)
            error = part.double().sub_(exact)
            square = float(error @ error)
            if not math.isfinite(square):
                self._refuse(name, mixed.dtype)
            self.rounding += square
        return mixed

    def _refuse(self, name: str, dtype: torch.dtype) -> NoReturn:
        self._checkpoints.check_finite(name)
        raise InputError(
            f"{self._target}: {name} would have values beyond the range of {dtype}: take a point "
            "nearer to the checkpoints, or --dtype float32"
        )


FILE = "grid.json"
EVALUATIONS = ("eval.json", "eval/eval.json")
"""Places of the evaluation in a point's folder."""


class GridPoint(msgspec.Struct, frozen=True):
    name: str
    """Name of its folder."""
    row: int
    column: int
    first: float
    second: float
    weights: list[float]
    """The point as a combination of checkpoints."""
    rounding: float | None = None
    """Distance of the written model from the point; None: not written yet."""


class Grid(msgspec.Struct, frozen=True):
    """The content of grid.json."""

    checkpoints: list[str]
    """Folders."""
    dtype: str | None
    first: list[float]
    second: list[float]
    points: list[GridPoint]


class _Evaluation(msgspec.Struct, frozen=True):
    sets: dict[str, PointFigures]


def plan_grid(weights: WeightsResult, side: int, margin: float, dtype: str | None) -> Grid:
    """side x side points over the checkpoints' extent, widened by the share `margin` at each end.

    Raises InputError when the checkpoints span no plane.
    """
    principal = weights.principal
    if principal.coordinates.shape[1] < PLANE:
        raise InputError(
            f"the {len(weights.checkpoints)} checkpoints lie on one line and span no plane: give "
            "three or more"
        )
    if side < 2:
        raise InputError(f"--points {side}: a grid needs 2 points a side or more")
    axes = []
    for coordinates in principal.coordinates.T[:PLANE]:
        low, high = coordinates.min(), coordinates.max()
        room = margin * (high - low)
        axes.append(np.linspace(low - room, high + room, side).tolist())
    points = [
        GridPoint(
            f"point_{row:02d}_{column:02d}", row, column, first, second,
            principal.weights_of((first, second)).tolist(),
        )
        for row, second in enumerate(axes[1])
        for column, first in enumerate(axes[0])
    ]  # fmt: skip
    return Grid([one.folder for one in weights.checkpoints], dtype, *axes, points)


def write_grid(
    weights: WeightsResult, grid: Grid, folder: Path, form: PointFormat, *, at_most: int | None
) -> Iterator[str]:
    """Write up to `at_most` missing points of the grid to `folder`; yields the name of each.

    Raises InputError when `folder` holds another grid.
    """
    grid = _resume(grid, folder)
    chosen = points_left(grid, folder)[:at_most]
    if not chosen:
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, to_json(grid))
    checkpoints = [one.checkpoint for one in weights.checkpoints]
    with open_checkpoints(checkpoints, folder) as opened:
        for point in chosen:
            mixed = np.array(point.weights)
            rounding = write_point(opened, checkpoints[0], mixed, folder / point.name, form)
            written = msgspec.structs.replace(point, rounding=rounding)
            points = [written if one.name == point.name else one for one in grid.points]
            grid = msgspec.structs.replace(grid, points=points)
            write_whole(folder / FILE, to_json(grid))
            yield point.name


def points_left(grid: Grid, folder: Path) -> list[GridPoint]:
    """Points that have no folder yet."""
    return [point for point in grid.points if not (folder / point.name).exists()]


def _resume(grid: Grid, folder: Path) -> Grid:
    """The grid in `folder`, which must equal `grid` apart from the written points; else `grid`."""
    if not (folder / FILE).exists():
        return grid
    found = read_grid(folder)
    for name in ("checkpoints", "dtype", "first", "second"):
        if getattr(found, name) != getattr(grid, name):
            raise InputError(
                f"{folder} holds another grid ({name} differ: other checkpoints, --points, "
                "--margin or --dtype): name another folder, or delete it"
            )
    return found


def read_grid(folder: Path) -> Grid:
    """The content of grid.json. Raises InputError."""
    path = folder / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Grid)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(
            f"cannot read {path} ({error}): give a folder that `analyse plane --write` made"
        ) from error


def collect_grid(folder: Path, weights: WeightsResult, set_name: str | None) -> PlaneResult:
    """Figures of the evaluated points; set_name may be None when evaluations have one set.

    Raises InputError when the grid's directions differ from those of `weights`, when a file is no
    evaluation, and when no point is evaluated.
    """
    grid = read_grid(folder)
    _check_same_plane(grid, weights, folder)
    results: list[PointResult] = []
    missing: list[str] = []
    for point in grid.points:
        places = [folder / point.name / place for place in EVALUATIONS]
        path = next((place for place in places if place.exists()), None)
        if path is None:
            missing.append(point.name)
            continue
        set_name, figures = read_figures(path, set_name)
        results.append(
            PointResult(
                point.name, point.row, point.column, point.first, point.second, point.rounding,
                figures,
            )
        )  # fmt: skip
    if set_name is None or not results:
        raise InputError(
            f"no point of {folder} is evaluated: each needs {' or '.join(EVALUATIONS)}, such as "
            f"{folder / grid.points[0].name / EVALUATIONS[0]}"
        )
    return PlaneResult(str(folder), set_name, grid.first, grid.second, results, missing)


def _check_same_plane(grid: Grid, weights: WeightsResult, folder: Path) -> None:
    is_same = grid.checkpoints == [one.folder for one in weights.checkpoints]
    if is_same:
        principal = weights.principal
        is_same = all(
            np.allclose(point.weights, principal.weights_of((point.first, point.second)), atol=1e-6)
            for point in grid.points
        )
    if not is_same:
        raise InputError(
            f"{folder} is a grid of other directions than those of --out: name the folder from "
            "which it was written"
        )


def read_figures(path: Path, set_name: str | None) -> tuple[str, PointFigures]:
    """(set, its figures) of an eval.json: {"sets": {NAME: {"reward": {"value", "se"}, ...}}}.

    Raises InputError.
    """
    try:
        sets = msgspec.json.decode(path.read_bytes(), type=_Evaluation).sets
    except msgspec.DecodeError as error:
        raise InputError(
            f"{path} is not an evaluation ({error}): expected sets with reward, accuracy "
            "and length_tokens"
        ) from error
    if set_name is None and len(sets) == 1:
        set_name = next(iter(sets))
    if set_name is None or set_name not in sets:
        raise InputError(
            f"{path} has the sets {', '.join(sorted(sets)) or '(none)'}: choose one by --set NAME"
        )
    return set_name, sets[set_name]
