"""A coordinator with its files, fed by hand: no sockets, and a clock that the test moves."""

from collections.abc import Callable
from pathlib import Path

from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets
from megatron_rl.protocol.metrics import JsonlWriter
from megatron_rl.protocol.types import (
    ClassDone,
    ClassRequest,
    GeneratorReady,
    Lease,
    NextBatch,
    RankBatch,
    Rollout,
    RolloutDone,
    Score,
    ScoreDone,
    ScoreFailed,
    ScoreRequest,
    VerifierReady,
    WeightsSynced,
)
from megatron_rl.rollout_queue.batch_thread import BatchMaker
from megatron_rl.rollout_queue.coordinator import BATCHES, PROMPTS, VERIFY, Coordinator
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.makers import make_prompt, make_rollout

TokenScore = Callable[[str, int], Score | str | None]
"""Score of completion `index` of the prompt with this id; or the kind of ScoreFailed; None: no
answer comes."""
Classify = Callable[[ClassRequest], list[int] | str | None]
"""Classes of the texts; or the kind of ScoreFailed; None: no answer comes."""
ROOM = {"answers": 64, "code": 64}
FAILURE = "the pool \x1b[31mbroke\nhere"
"""What a verifier says that fails."""


class PlayedQueue:
    """One generator, one verifier, one trainer; a second passes with each `play`."""

    def __init__(
        self,
        folder: Path,
        judge: TokenScore,
        *,
        train_prompts: int = 400,
        held_out: int = 0,
        tasks: tuple[str, ...] = ("math",),
        classify: Classify = lambda request: None,
        evaluate_only: str = "",
        keeps_evaluated: bool = False,
        eval_sets: dict[str, int] | None = None,
        maker: BatchMaker | None = None,
        **sections: dict,
    ) -> None:
        """tasks: those of the train prompts, in turn. eval_sets: prompts of each set by name."""
        train = {"steps": 4, "prompts_per_batch": 2, "group_size": 4} | sections.pop("train", {})
        eval_ = {"prompts": held_out} | sections.pop("eval", {})
        self.config = Config.model_validate(
            {"run": {"dir": folder}, "train": train, "eval": eval_, **sections}
        )
        self.judge = judge
        self.classify = classify
        self.now = 1000.0
        self.version = 0
        """That of the generator."""
        self.batches: list[RankBatch] = []
        self.leases: list[Lease] = []
        self.open: list[tuple[Lease, int]] = []
        """Completions that the generator has."""
        self.leased: list[tuple[str, int]] = []
        """(prompt, index) of each completion, in the order of their leases."""
        self.requests: list[ScoreRequest] = []
        self.class_requests: list[ClassRequest] = []
        train = [make_prompt(f"p{n}", task=tasks[n % len(tasks)]) for n in range(train_prompts)]
        held = [make_prompt(f"h{n}", split="held_out") for n in range(held_out)]
        sets = {
            name: [make_prompt(f"{name}{n}", split="held_out") for n in range(count)]
            for name, count in (eval_sets or {}).items()
        }
        self.coordinator = Coordinator(
            self.config,
            PromptSets([train], [1.0], held, 0, eval_sets=sets),
            recorder=Recorder(
                folder,
                keeps_tokens=self.config.queue.record_tokens,
                keeps_evaluated=keeps_evaluated,
            ),
            metrics=JsonlWriter(folder / "metrics.jsonl", "queue"),
            evaluate_only=evaluate_only,
            maker=maker,
            now=self.now,
        )

    @property
    def graded(self) -> list[str]:
        """Texts of the score requests."""
        return [request.text for request in self.requests]

    def start(self, version: int = 0) -> None:
        """The first weight sync is out, and the trainer asks for its batch."""
        self.version = version
        self.serve()
        self.sync(version)

    def serve(self) -> None:
        """Generator and verifier tell their state; an evaluation alone needs no trainer."""
        self.coordinator.handle(PROMPTS, "g", GeneratorReady(8, self.version, 1), self.now)
        self.coordinator.handle(VERIFY, "v", VerifierReady(ROOM, 1), self.now)

    def sync(self, version: int) -> None:
        """A later version is out, and the trainer asks for its next batch."""
        self.version = version
        self.coordinator.handle(BATCHES, "t", WeightsSynced(version), self.now)
        self.coordinator.handle(BATCHES, "t", NextBatch(version, 0, 1), self.now)

    def play(self, seconds: int, *, is_slow: bool = False) -> None:
        """Answer all that is asked; is_slow: at most one completion a second."""
        for _ in range(seconds):
            self.now += 1.0
            self._answer(limit=1 if is_slow else 8)
            self.serve()
            self.coordinator.tick(self.now)

    def reach(self, version: int, *, seconds: int = 60) -> None:
        """Play until the batch before a version is there."""
        for _ in range(seconds):
            if len(self.batches) == version:
                return
            self.play(1)
        raise AssertionError(f"no batch before version {version}")

    def _answer(self, limit: int) -> None:
        self._send()
        for _ in range(min(limit, len(self.open))):
            lease, index = self.open.pop(0)
            rollout = self._rollout(lease, index)
            self.coordinator.handle(PROMPTS, "g", RolloutDone(rollout), self.now)
        self._send()

    def _send(self) -> None:
        for _, _, message in list(self.coordinator.outgoing(self.now)):
            match message:
                case Lease():
                    self.leases.append(message)
                    self.open += [(message, index) for index in message.indices]
                    self.leased += [(message.prompt.id, index) for index in message.indices]
                case ScoreRequest():
                    self._grade(message)
                case ClassRequest():
                    self.class_requests.append(message)
                    self.answer_classes(message)
                case RankBatch():
                    self.batches.append(message)

    def _grade(self, request: ScoreRequest) -> None:
        self.requests.append(request)
        prompt, index = request.text.split("/")
        verdict = self.judge(prompt, int(index))
        if verdict is None:
            return
        if isinstance(verdict, str):
            answer = ScoreFailed(request.request_id, FAILURE, verdict)
        else:
            answer = ScoreDone(request.request_id, verdict)
        self.coordinator.handle(VERIFY, "v", answer, self.now)

    def answer_classes(self, request: ClassRequest) -> None:
        """Say what `classify` says, also about what was asked for earlier."""
        found = self.classify(request)
        if isinstance(found, str):
            answer = ScoreFailed(request.request_id, FAILURE, found)
        elif found is not None:
            answer = ClassDone(request.request_id, found)
        else:
            return
        self.coordinator.handle(VERIFY, "v", answer, self.now)

    def _rollout(self, lease: Lease, index: int) -> Rollout:
        text = f"{lease.prompt.id}/{index}"
        versions = (self.version,) if lease.prompt.split == "held_out" else (0,)
        return make_rollout(index, lease_id=lease.lease_id, text=text, versions=versions)
