"""Virtual time and the real coordinator, shared by all parts of a simulated run.

The coordinator writes nothing and makes no arrays. Evaluations, stages, replay and the curriculum
are off: the simulation shows the steady state of one configuration.
"""

import heapq
import itertools
from collections.abc import Callable
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
from megatron_rl.protocol.rollout import ConversationTurn
from megatron_rl.protocol.types import AnyMessage, MinibatchShare, Rollout, VersionSpan
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.batches import MinibatchPlan
from megatron_rl.rollout_queue.coordinator import Coordinator
from megatron_rl.rollout_queue.record import Recorder
from megatron_rl.rollout_queue.record_files import RecordFiles
from megatron_rl.simulation.machines import ClusterModel
from megatron_rl.simulation.workload import Workload

PROMPTS = 4096
TASK = "math"


class VirtualRun:
    """A clock that jumps from event to event, the queue, and the cluster model."""

    def __init__(
        self,
        config: Config,
        model: ClusterModel,
        workload: Workload,
        *,
        steps: int,
        recorder: Recorder | None = None,
    ) -> None:
        """recorder: writes rollouts like a real run; None: no files."""
        off = {"eval": EvalConfig(prompts=0), "stages": (), "replay": ReplayConfig()}
        train = config.train.model_copy(update={"steps": steps})
        self.config = config.model_copy(
            update=off | {"train": train, "curriculum": CurriculumConfig()}
        )
        self.model, self.workload = model, workload
        self.now = 0.0
        """Virtual seconds."""
        self.events = 0
        """Number of past events."""
        self.planned: list[MinibatchPlan] = []
        """The queue's planned minibatches that the trainer has not taken."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        prompts = [
            Prompt(f"p{number}", TASK, [ChatMessage("user", f"question {number}")], "1", "train")
            for number in range(PROMPTS)
        ]
        self.queue = Coordinator(
            self.config,
            PromptSets([prompts], [1.0], [], 0),
            recorder=recorder or _NoFiles(),
            metrics=_NoRows(),
            maker=BatchMaker(self._keep_plan),
            now=0.0,
        )

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Schedule an event, now at the earliest; events of one time run in order of calls."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an event in `seconds`."""
        self.at(self.now + seconds, action)

    @property
    def next_at(self) -> float | None:
        """Time of the next event; None without one."""
        return self._events[0][0] if self._events else None

    def step(self) -> None:
        self.now, _, action = heapq.heappop(self._events)
        self.events += 1
        action()

    def say(self, endpoint: str, peer: str, message: AnyMessage) -> None:
        """Send a message to the queue."""
        self.queue.handle(endpoint, peer, message, self.now)

    def _keep_plan(
        self, plan: MinibatchPlan, advantage_functions: AdvantageFunctions
    ) -> list[MinibatchShare]:
        self.planned.append(plan)
        return [MinibatchShare([], len(plan.groups)) for _ in plan.ranks]


class _NoFiles(Recorder):
    """A recorder that writes nothing."""

    run_dir, dropped_file, keeps_evaluated = Path(), None, False

    def __init__(self) -> None:
        self.writer = RecordFiles(self.run_dir, keeps_tokens=False)

    def _ignore(self, *_: object, **__: object) -> Path:
        return self.run_dir

    write_step = write_dropped = write_left_out = write_ungraded = _ignore
    begin_evaluation = write_evaluation = _ignore


class _NoRows(JsonlWriter):
    """A writer of metrics that drops all."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, values: object) -> None:
        """Drop the row."""


_TOKEN = np.zeros((), np.int32)
_LOGPROB = np.zeros((), np.float32)


def make_rollout(
    lease_id: int, index: int, spans: list[VersionSpan], *, prompt_tokens: int, is_cut: bool,
    turns: list[ConversationTurn],
) -> Rollout:  # fmt: skip
    """A rollout whose arrays take no memory; its text is its index in the group."""
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
        conversation=turns,
    )
