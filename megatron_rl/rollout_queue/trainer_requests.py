"""Answers the trainer's NextBatch requests: who waits for which step, and the latest batch.

Used by the rollout queue. Every data-parallel leader asks for its own share, in any order; a share
may be asked for again until the next step's batch is formed.
"""

import dataclasses

from megatron_rl.protocol.types import NextBatch, RankBatch, Stop
from megatron_rl.protocol.wire import WireError


@dataclasses.dataclass(frozen=True)
class _Request:
    peer: str
    step: int
    dp_size: int


class BatchDesk:
    """Open requests by data-parallel rank, and the cached batch."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._first_step = 0
        self.formed_steps = 0
        """Steps up to the batch formed last, that one included, also while it is dealt to ranks."""
        self._requests: dict[int, _Request] = {}
        self._batch: list[RankBatch] = []
        self._stopped: set[int] = set()
        self._dp_size = 0
        self._answered: dict[int, int] = {}
        """Rank -> step of the request that was answered last."""
        self._repeated: set[int] = set()
        """Ranks whose last request was an old one."""

    def resume_at(self, step: int) -> None:
        """Count the batches before `step` as formed; call before any request."""
        self._first_step = self.formed_steps = step

    def ask(self, peer: str, request: NextBatch) -> None:
        """Note a request. Raises WireError for one that can never be answered."""
        if self._dp_size not in (0, request.dp_size) or request.dp_rank >= request.dp_size:
            raise WireError(
                f"{peer} asks as data-parallel rank {request.dp_rank} of {request.dp_size}, others "
                f"as ranks of {self._dp_size}"
            )
        if self._is_repeated(request):
            return
        has_formed = self.formed_steps > self._first_step
        if request.step < self.formed_steps - has_formed:
            raise WireError(
                f"{peer} asks for the batch of step {request.step}, but that of step "
                f"{self.formed_steps - 1} is formed: the trainer went back without the queue. "
                "Start both again, with the same checkpoint.resume"
            )
        self._dp_size = request.dp_size
        self._requests[request.dp_rank] = _Request(peer, request.step, request.dp_size)

    def _is_repeated(self, request: NextBatch) -> bool:
        """Whether an answer crossed this request, which was late: it was asked twice.

        A trainer that went back asks again and again.
        """
        rank, step = request.dp_rank, request.step
        if step >= self._answered.get(rank, -1):
            self._repeated.discard(rank)
            return False
        if rank in self._repeated:
            return False
        self._repeated.add(rank)
        return True

    def next_to_form(self) -> tuple[int, int] | None:
        """(step, dp_size) of the batch that somebody waits for and that is not formed yet."""
        for request in self._requests.values():
            if self.formed_steps <= request.step < self._steps:
                return request.step, request.dp_size
        return None

    def begin(self, step: int) -> None:
        """The batch of a step is formed, and dealt to ranks; the one before is forgotten."""
        self.formed_steps, self._batch = step + 1, []

    def put(self, batch: list[RankBatch]) -> None:
        """Keep the dealt batch for all ranks' requests."""
        self.begin(batch[0].step)
        self._batch = batch

    def answers(self) -> list[tuple[str, RankBatch | Stop]]:
        """What can be answered now: (peer, share), or Stop beyond the last step."""
        answers: list[tuple[str, RankBatch | Stop]] = []
        for rank, request in list(self._requests.items()):
            if request.step >= self._steps:
                answers.append((request.peer, Stop(f"all {self._steps} steps are done")))
                self._stopped.add(rank)
            elif self._batch and request.step == self.formed_steps - 1:
                answers.append((request.peer, self._batch[rank]))
            else:
                continue
            self._answered[rank] = request.step
            del self._requests[rank]
        return answers

    @property
    def waiting_ranks(self) -> list[int]:
        """Data-parallel ranks without an answer."""
        return sorted(self._requests)

    @property
    def is_dismissed(self) -> bool:
        """Whether every data-parallel rank was told to stop."""
        return self._dp_size > 0 and len(self._stopped) == self._dp_size
