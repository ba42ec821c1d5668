"""The product's coordinator, with nothing written and no arrays made.

Used by the simulation. Evaluations, stages, replay and the curriculum are switched off: what is
simulated is the steady state of one configuration.
"""

from pathlib import Path

import numpy as np

from megatron_rl.algorithms.minibatch import AdvantageFunctions
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.prompts import CurriculumConfig
from megatron_rl.config.replay import ReplayConfig
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.prompt import ChatMessage, Prompt
from megatron_rl.protocol.types import MinibatchShare, Rollout, ScoredRollout, VersionSpan
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.batches import MinibatchPlan
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.drop_reasons import ScoreFailure
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.record import Recorder

PROMPTS = 4096
TASK = "math"


class NoFiles(Recorder):
    """A recorder that writes nothing, and makes no lines to write."""

    def __init__(self) -> None:
        self.keeps_evaluated = False
        self.run_dir = Path()
        self.dropped_file = None

    def write_step(self, step: int, groups: list[Group], now: float) -> None:
        """Nothing."""

    def write_dropped(self, group: Group, reason: str) -> None:
        """Nothing."""

    def write_left_out(self, group: Group, scored: ScoredRollout, reason: str) -> None:
        """Nothing."""

    def write_ungraded(self, failure: ScoreFailure) -> Path:
        """Nothing; the path of no file."""
        return self.run_dir

    def begin_evaluation(self, label: str, *, keeps_lines: bool = False) -> None:
        """Nothing."""

    def write_evaluation(self, label: str, groups: list[Group]) -> None:
        """Nothing."""

    @property
    def put(self) -> int:
        """No job."""
        return 0

    @property
    def written(self) -> int:
        """No job."""
        return 0

    @property
    def is_full(self) -> bool:
        """Never: nothing waits for the disk."""
        return False

    def check(self) -> None:
        """Nothing."""


class NoRows(JsonlWriter):
    """A writer of metrics that keeps none."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, values: object) -> None:
        """Nothing."""


class PlannedBatches:
    """Takes the place of what fills batches with arrays: keeps the plans of each step."""

    def __init__(self) -> None:
        self._plans: list[MinibatchPlan] = []

    def fill(
        self, plan: MinibatchPlan, advantage_functions: AdvantageFunctions
    ) -> list[MinibatchShare]:
        """Empty shares, and the plan kept."""
        self._plans.append(plan)
        return [MinibatchShare([], len(plan.groups)) for _ in plan.ranks]

    def take(self) -> list[MinibatchPlan]:
        """The plans of the minibatches since the last call."""
        plans, self._plans = self._plans, []
        return plans


def simulated_config(config: Config, steps: int) -> Config:
    """The configuration of a simulated run of so many steps."""
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"steps": steps}),
            "eval": EvalConfig(prompts=0),
            "stages": (),
            "replay": ReplayConfig(),
            "curriculum": CurriculumConfig(),
        }
    )


def open_queue(
    config: Config, planned: PlannedBatches, recorder: Recorder | None = None
) -> Coordinator:
    """A coordinator at time 0; `config` as `simulated_config` gives it.

    recorder: writes what is simulated as a real run does; None: nothing is written.
    """
    prompts = [
        Prompt(f"p{number}", TASK, [ChatMessage("user", f"question {number}")], "1", "train")
        for number in range(PROMPTS)
    ]
    return Coordinator(
        config,
        PromptSets([prompts], [1.0], [], 0),
        recorder=recorder or NoFiles(),
        metrics=NoRows(),
        maker=BatchMaker(planned.fill),
        now=0.0,
    )


_TOKEN = np.zeros((), np.int32)
_LOGPROB = np.zeros((), np.float32)


def make_rollout(
    lease_id: int,
    index: int,
    spans: list[VersionSpan],
    *,
    prompt_tokens: int,
    is_cut: bool,
) -> Rollout:
    """A rollout whose arrays take no memory; its text is its place in the group."""
    tokens = spans[-1].end
    return Rollout(
        lease_id,
        index,
        np.broadcast_to(_TOKEN, (prompt_tokens,)),
        np.broadcast_to(_TOKEN, (tokens,)),
        np.broadcast_to(_LOGPROB, (tokens,)),
        spans,
        "length" if is_cut else "stop",
        str(index),
    )
