"""Three self-predictive objectives and the eigenvectors that each one learns: NumPy, no trainer.

    python examples/self_predictive/limits.py PLOT.svg [--seed 0]

Source: "A Unifying Framework for Action-Conditional Self-Predictive RL" (arXiv 2406.02035). The
representation Phi [states, k] predicts its own next value by a matrix P: BYOL-Pi has one P,
BYOL-AC one per action, and BYOL-VAR subtracts the loss of Pi from the loss of AC. The limits are
the top-k eigenvectors of T_pi^2, of mean_a T_a^2, and of mean_a T_a^2 - T_pi^2 = Var_a(T_a).

The paper assumes symmetric T_a with common eigenvectors v_i; let T_a v_i = g_ai v_i. An eigenspace
attracts if mean_a g_ai (g_aj - g_ai) < 0 for each v_i in it and each v_j outside (for VAR with g_ai
minus its mean over actions). The limit always does. Another eigenspace may attract, too, for
instance one with a negative g. STEPS is chosen so that none does.

Two controls fail. Without the stop-gradient Phi collapses (Pi, AC) or diverges (VAR: the targets
cancel, so the loss has no lower bound). With slow predictors that start with the wrong sign Phi
collapses. Slowness alone is harmless: gradient flow with predictors at rate r preserves
Phi^T Phi - mean_a P_a P_a^T / r (Pi, AC), so Phi cannot shrink if the predictors start at 0.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy import ndarray

STATES, K = 6, 2
# The states are a line of cells between two mirrors. STEPS[a][d] is the probability that action a
# moves by d cells; both directions are equally likely. All such walks have the same eigenvectors.
STEPS = np.array([
    [0.8, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.7, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0],
    [0.1, 0.0, 0.0, 0.1, 0.4, 0.1, 0.3],
])  # fmt: skip
# Weights of the loss with one predictor per action, and of the loss with a single predictor.
OBJECTIVES = {"Pi": (0.0, 1.0), "AC": (1.0, 0.0), "VAR": (1.0, -1.0)}
ODE_STEPS = 500
BATCH = 10_000
# In units of the ODE's time: constant for the first half, then falling to 0.
STEP_SIZES = np.minimum(1.0, np.linspace(2.0, 0.0, 1200, endpoint=False))
COLLAPSED, DIVERGED = 1e-8, 1e8

Trajectory = Iterator[tuple[float, ndarray]]


@dataclass(frozen=True)
class Method:
    """How training treats targets and predictors."""

    has_stop_gradient: bool = True
    rate: float | None = None
    """The predictors' step size over Phi's; None fits the predictors to each batch."""
    start: float = 0.0
    """With a rate: predictors start at this multiple of the first batch's best predictors."""
    is_sampled: bool = True
    """False takes the expectation over transitions at each step."""


METHODS = {
    "expected steps": Method(is_sampled=False),
    "sampled steps": Method(),
    "no stop-gradient": Method(has_stop_gradient=False),
    "slow predictor": Method(rate=0.01, start=-1.0),
}


def transitions(steps: ndarray = STEPS) -> ndarray:
    """T [actions, states, states] of walks between mirrors: symmetric, each row sums to 1."""
    walks = np.zeros((len(steps), STATES, STATES))
    cells = np.arange(STATES)
    for cell_count in range(STATES + 1):
        for move in (-cell_count, cell_count):
            target = (cells + move) % (2 * STATES)
            target = np.minimum(target, 2 * STATES - 1 - target)
            walks[:, cells, target] += steps[:, cell_count, None] / 2
    return walks


def terms(name: str, walks: ndarray) -> list[tuple[float, ndarray]]:
    """Weight and transition matrix of each predictor's loss."""
    per_action, single = OBJECTIVES[name]
    found = [(per_action / len(walks), walk) for walk in walks] + [(single, walks.mean(axis=0))]
    return [(weight, walk) for weight, walk in found if weight]


def limit(name: str, walks: ndarray) -> ndarray:
    """[states, K] eigenvectors of the largest eigenvalues of the objective's matrix."""
    matrix = sum(weight * walk @ walk for weight, walk in terms(name, walks))
    return np.linalg.eigh(matrix)[1][:, -K:]


def distance(phi: ndarray, subspace: ndarray) -> float:
    """Sine of the largest principal angle between Phi's columns and an orthonormal basis."""
    basis = np.linalg.svd(phi, full_matrices=False)[0]
    return float(np.linalg.norm(basis - subspace @ (subspace.T @ basis), ord=2))


def random_start(seed: int) -> ndarray:
    """Orthonormal Phi [states, K]."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(STATES, K)))[0]


def flow(name: str, walks: ndarray, phi: ndarray) -> ndarray:
    """dPhi of the ODE: best predictors, orthonormal Phi, states and actions of equal weight."""
    moves = sum(w * walk @ phi @ (phi.T @ walk @ phi).T for w, walk in terms(name, walks))
    return moves - phi @ (phi.T @ moves)


def integrate(name: str, walks: ndarray, phi: ndarray) -> Trajectory:
    """Time and Phi of the ODE, by Runge-Kutta steps of order 4 and length 1."""
    for time in range(1, ODE_STEPS + 1):
        a = flow(name, walks, phi)
        b = flow(name, walks, phi + a / 2)
        c = flow(name, walks, phi + b / 2)
        d = flow(name, walks, phi + c)
        phi = phi + (a + 2 * b + 2 * c + d) / 6
        yield float(time), phi


def best_predictor(walk: ndarray, phi: ndarray) -> ndarray:
    """[K, K] least squares of Phi(x') on Phi(x)."""
    return np.linalg.solve(phi.T @ (walk.sum(axis=1)[:, None] * phi), phi.T @ walk @ phi)


def train(name: str, walks: ndarray, phi: ndarray, *, seed: int, method: Method) -> Trajectory:
    """Time and Phi of gradient steps on E ||P^T Phi(x) - sg Phi(x')||^2, a new batch for each step.

    Ends early when Phi collapses or diverges. Phi is not kept orthonormal. Gradients are halved and
    multiplied by the number of states: in expectation the steps then follow the ODE.
    """
    rng = np.random.default_rng(seed)
    predictors: list[ndarray] = []
    for time, size in zip(np.cumsum(STEP_SIZES), STEP_SIZES, strict=True):
        batch = walks
        if method.is_sampled:
            # Scaled to have the expectation `walks`, although states and actions are drawn, too.
            counts = rng.multinomial(BATCH, (walks / walks.sum()).ravel())
            batch = counts.reshape(walks.shape) * (walks.sum() / BATCH)
        losses = terms(name, batch)
        if method.rate is None or not predictors:
            scale = 1.0 if method.rate is None else method.start
            predictors = [scale * best_predictor(walk, phi) for _, walk in losses]
        gradient = np.zeros_like(phi)
        for index, (weight, walk) in enumerate(losses):
            predictor = predictors[index]
            error = walk.sum(axis=1)[:, None] * phi @ predictor - walk @ phi
            gradient += weight * error @ predictor.T
            if not method.has_stop_gradient:
                target_error = walk.sum(axis=0)[:, None] * phi - walk.T @ phi @ predictor
                gradient += weight * target_error
            if method.rate is not None:
                predictors[index] = predictor - method.rate * size * phi.T @ error
        phi = phi - size * gradient
        yield float(time), phi
        widths = np.linalg.svd(phi, compute_uv=False)
        if widths[-1] < COLLAPSED * max(1.0, widths[0]) or widths[0] > DIVERGED:
            return


def measure(trajectory: Trajectory, subspace: ndarray) -> tuple[dict[str, float], ndarray]:
    """Figures at the end of a trajectory, and [steps, 2] time and distance at every step."""
    curve = [(time, distance(phi, subspace), phi) for time, phi in trajectory]
    time, last, phi = curve[-1]
    widths = np.linalg.svd(phi, compute_uv=False)
    end = {"time": time, "distance": last, "smallest": widths[-1], "largest": widths[0]}
    return {key: float(value) for key, value in end.items()}, np.array([c[:2] for c in curve])


def svg(curves: dict[str, dict[str, ndarray]]) -> str:
    """One panel per objective: distances from 1e-5 to 1 over times from 1 to 1000, logarithmic."""
    colors = ["#1b2a33", "#00796b", "#80cbc4", "#9b2c3a", "#b7791f"]
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 330" font-family="Arial">']

    def write(x: float, y: float, text: str, color: str = "#45606e") -> None:
        parts.append(f'<text x="{x}" y="{y}" font-size="13" fill="{color}">{text}</text>')

    for power in range(6):
        write(2, 35 + 50 * power, f"1e-{power}")
    for left, (name, runs) in zip((40, 350, 660), curves.items(), strict=True):
        parts.append(f'<path d="M{left} 30v250h285" fill="none" stroke="#b0bec5"/>')
        write(left, 18, f"BYOL-{name}: distance to its limit over time")
        for power in range(4):
            write(left + 88 * power, 296, f"{10**power}")
        for color, curve in zip(colors, runs.values(), strict=True):
            x = np.round(left + 88 * np.log10(curve[:, 0]))
            y = 30 - 50 * np.log10(np.clip(curve[:, 1], 1e-5, 1.0))
            shown = np.append(np.unique(x, return_index=True)[1], len(x) - 1)
            points = " ".join(f"{x[i]:.0f},{y[i]:.1f}" for i in shown)
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
            parts.append(f'<circle cx="{x[-1]:.0f}" cy="{y[-1]:.1f}" r="4" fill="{color}"/>')
    for index, (color, run) in enumerate(zip(colors, runs, strict=True)):
        write(40 + 180 * index, 322, run, color)
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the objectives with their limits.")
    parser.add_argument("plot", type=Path, help="SVG file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the start and the batches")
    args = parser.parse_args()
    walks, phi = transitions(), random_start(args.seed)
    limits = {name: limit(name, walks) for name in OBJECTIVES}
    assert all(distance(a, b) > 0.99 for a, b in combinations(limits.values(), 2))
    print("Distance to the limit (sine of the largest principal angle) [singular values of Phi]")
    print(f"{'':5}" + "".join(f"{run:28}" for run in ("ODE", *METHODS)))
    ends: dict[str, dict[str, dict[str, float]]] = {}
    curves: dict[str, dict[str, ndarray]] = {}
    for name, subspace in limits.items():
        runs = {"ODE": integrate(name, walks, phi)}
        for run, method in METHODS.items():
            runs[run] = train(name, walks, phi, seed=args.seed + 1, method=method)
        ends[name], curves[name] = {}, {}
        row = f"{name:5}"
        for run, trajectory in runs.items():
            end, curves[name][run] = measure(trajectory, subspace)
            ends[name][run] = end
            widths = f"[{end['smallest']:.1e}, {end['largest']:.1e}]"
            row += f"{end['distance']:.1e} {widths:20}"
        print(row)
    args.plot.write_text(svg(curves))
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
