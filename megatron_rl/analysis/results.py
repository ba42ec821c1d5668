"""The content of analysis.json; each command of `megatron-rl analyse` replaces its section.

Distances are Euclidean, over all weights of two models.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from megatron_rl.analysis.checkpoints import Checkpoint
from megatron_rl.analysis.lengths import LengthsResult
from megatron_rl.analysis.principal import (
    Centre,
    Principal,
    distances,
    random_walk_explained,
    step_cosines,
)
from megatron_rl.config.errors import InputError

FILE = "analysis.json"
PLANE = 2
"""Number of directions."""


class CheckpointResult(msgspec.Struct, frozen=True):
    name: str
    folder: str
    files_from: str | None
    coordinates: list[float]
    """Along all directions."""
    off_plane: float
    """Distance from the plane of the first two directions."""
    from_first: float
    """Distance from the first checkpoint."""
    from_previous: float | None
    step_cosine: float | None
    """Cosine between the step to this checkpoint and the previous step; None without either."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The folder to open."""
        files = None if self.files_from is None else Path(self.files_from)
        return Checkpoint(self.name, Path(self.folder), files)


class WeightsResult(msgspec.Struct, frozen=True):
    """Result of `analyse weights`."""

    centre: Centre
    parameters: int
    checkpoints: list[CheckpointResult]
    explained: list[float]
    """Share of the squared distances from the centre, by direction."""
    random_walk: list[float]
    """The same for a random walk."""
    combinations: list[list[float]]
    """Each direction as a combination of checkpoints."""
    centre_weights: list[float]
    """The centre as a combination of checkpoints."""

    @property
    def principal(self) -> Principal:
        coordinates = np.array([one.coordinates for one in self.checkpoints])
        return Principal(np.array(self.centre_weights), coordinates, np.array(self.combinations))


class Figure(msgspec.Struct, frozen=True):
    """A mean over prompts."""

    value: float
    se: float | None = None


class PointFigures(msgspec.Struct, frozen=True):
    """Figures of a point from its eval.json; other keys there are ignored."""

    reward: Figure
    accuracy: Figure
    length_tokens: Figure


class PointResult(msgspec.Struct, frozen=True):
    """An evaluated point of the plane."""

    name: str
    row: int
    column: int
    first: float
    """Coordinate along the first direction."""
    second: float
    rounding: float | None
    """Distance of the written model from the point."""
    figures: PointFigures


class PlaneResult(msgspec.Struct, frozen=True):
    """Result of `analyse plane --read`."""

    grid: str
    set_name: str
    """Evaluation set."""
    first: list[float]
    """Coordinates of columns."""
    second: list[float]
    """Coordinates of rows."""
    points: list[PointResult]
    missing: list[str]
    """Points without an evaluation."""


class Analysis(msgspec.Struct, frozen=True):
    """The content of analysis.json."""

    version: Literal[1] = 1
    weights: WeightsResult | None = None
    plane: PlaneResult | None = None
    lengths: LengthsResult | None = None


def weights_result(
    checkpoints: Sequence[Checkpoint],
    gram: np.ndarray,
    principal: Principal,
    *,
    centre: Centre,
    parameters: int,
) -> WeightsResult:
    """Build the section of analysis.json."""
    apart, cosines = distances(gram), step_cosines(gram)
    off_plane = principal.residuals(PLANE)

    def result(number: int, one: Checkpoint) -> CheckpointResult:
        cosine = float(cosines[number - 2]) if number >= 2 else None
        return CheckpointResult(
            name=one.name,
            folder=str(one.folder.resolve()),
            files_from=None if one.files_from is None else str(one.files_from.resolve()),
            coordinates=principal.coordinates[number].tolist(),
            off_plane=float(off_plane[number]),
            from_first=float(apart[0, number]),
            from_previous=float(apart[number - 1, number]) if number else None,
            step_cosine=None if cosine is None or np.isnan(cosine) else cosine,
        )

    return WeightsResult(
        centre=centre,
        parameters=parameters,
        checkpoints=[result(number, one) for number, one in enumerate(checkpoints)],
        explained=principal.explained.tolist(),
        random_walk=random_walk_explained(len(checkpoints), centre).tolist(),
        combinations=principal.combinations.tolist(),
        centre_weights=principal.centre.tolist(),
    )


def read_analysis(folder: Path) -> Analysis:
    """The analysis in `folder`; empty without an analysis.json. Raises InputError."""
    path = folder / FILE
    if not path.exists():
        return Analysis()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Analysis)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(
            f"{path} is not an analysis ({error}): name another folder with --out"
        ) from error


def to_json(content: msgspec.Struct) -> str:
    """Text of analysis.json or grid.json."""
    return msgspec.json.format(msgspec.json.encode(content)).decode() + "\n"
