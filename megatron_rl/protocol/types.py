"""Messages and records that flow between the processes.

Imported by every process. One frozen struct per stage: Prompt -> Rollout -> ScoredRollout ->
TrainSequence -> RankBatch. Arrays travel as raw buffers (see `frames.py`).
"""

import itertools
from typing import Annotated

import msgspec
import numpy as np

from megatron_rl.protocol.generator_messages import (
    Cancel,
    GeneratorReady,
    Hold,
    RolloutFailed,
    RolloutsTaken,
)
from megatron_rl.protocol.limits import (
    Count,
    Finite,
    Id,
    Name,
    SignedId,
    Size,
    Version,
    find_bad_floats,
    find_bad_ids,
)
from megatron_rl.protocol.metrics import Reduce
from megatron_rl.protocol.node_messages import NodeState, RunPhase
from megatron_rl.protocol.prompt import ChatMessage as ChatMessage
from megatron_rl.protocol.prompt import LengthRule, Prompt
from megatron_rl.protocol.queue_state import QueueState
from megatron_rl.protocol.rollout import ROUNDING_NATS as ROUNDING_NATS
from megatron_rl.protocol.rollout import GoldAnswer as GoldAnswer
from megatron_rl.protocol.rollout import Rollout as Rollout
from megatron_rl.protocol.rollout import Sampling as Sampling
from megatron_rl.protocol.rollout import Score as Score
from megatron_rl.protocol.rollout import ScoredRollout as ScoredRollout
from megatron_rl.protocol.rollout import VersionSpan as VersionSpan
from megatron_rl.protocol.rollout import no_choices
from megatron_rl.protocol.scorer_messages import (
    Judged,
    JudgeRefused,
    JudgeRequest,
    LogprobRequest,
    LogprobsDone,
    LogprobsFailed,
)
from megatron_rl.protocol.weight_messages import (
    Ack,
    Failed,
    Fence,
    Hello,
    LeaveGroup,
    MayStart,
    Pause,
    Ping,
    Receive,
    Reclaim,
    Release,
    Resume,
    StartRequest,
)


class TrainSequence(msgspec.Struct, frozen=True):
    """One rollout or SFT example for the trainer."""

    token_ids: np.ndarray
    """[prompt + completion tokens] int32."""
    prompt_length: Count
    generator_logprobs: np.ndarray
    """[target tokens] float32; zeros for SFT examples."""
    version_runs: list[tuple[Version, Count]]
    """Policy version that sampled each target token: (version, number of tokens), in order."""
    advantage: float
    """Finite, which the queue checks (`algorithms/minibatch.py`)."""
    weight: float
    """Loss weight of every target token."""
    reward: float = 0.0
    group: int = 0
    """Number of its group in the minibatch; -1: padding."""
    member: int = 0
    """Place in its group."""
    gold_tokens: Count = 0
    """Number of tokens at the end that are a reference answer, which no policy sampled."""
    rollout: tuple[int, int] = (-1, 0)
    """Recorded group and index of its rollout; (-1, 0): this run did not sample it."""
    expert_choices: np.ndarray = msgspec.field(default_factory=no_choices)
    """As in Rollout."""
    given: list[tuple[Count, Count]] = []
    """[start, end) of the completion tokens that are no targets, in order, counted from the prompt:
    tool results and the chat template's text between the turns of a conversation."""
    turn_advantages: np.ndarray = msgspec.field(default_factory=lambda: np.zeros(0, np.float32))
    """[target tokens] float32, in place of `advantage` where replies are rewarded; else empty."""
    row_starts: list[Count] = []
    """Indices in token_ids at which further rows begin: branches of the conversation, whose tokens
    see only their own row. Advantage and weight belong to all rows together."""

    @property
    def token_versions(self) -> np.ndarray:
        """[target tokens] int32: policy version that sampled each token."""
        versions, counts = zip(*self.version_runs, strict=True) if self.version_runs else ((), ())
        return np.repeat(np.array(versions, np.int32), np.array(counts, np.int64))

    @property
    def rows(self) -> list[tuple[int, int]]:
        """[start, end) of each row in token_ids."""
        edges = [0, *self.row_starts, len(self.token_ids)]
        return list(itertools.pairwise(edges))

    @property
    def targets(self) -> np.ndarray:
        """[target tokens] int64: places in token_ids of the tokens that are learnt."""
        is_target = np.ones(len(self.token_ids), np.bool_)
        is_target[: self.prompt_length] = False
        for start, end in self.given:
            is_target[self.prompt_length + start : self.prompt_length + end] = False
        return np.flatnonzero(is_target)

    def find_fault(self) -> str:
        """Why it cannot be trained on; "" if it can."""
        completion = len(self.token_ids) - self.prompt_length
        edges = [0, *(edge for pair in self.given for edge in pair), completion]
        if self.given and not all(a < b for a, b in zip(edges, edges[1:], strict=False)):
            return f"given ranges {self.given!r:.300} of {completion} completion tokens"
        starts = [self.prompt_length, *self.row_starts, len(self.token_ids)]
        if self.row_starts and (
            starts != sorted(set(starts)) or np.isin(self.row_starts, self.targets).any()
        ):
            return f"row starts {self.row_starts!r:.300} that are not given tokens in order"
        targets = completion - sum(end - start for start, end in self.given)
        lengths = len(self.generator_logprobs), sum(count for _, count in self.version_runs)
        if lengths != (targets, targets):
            return f"{lengths} logprobs and versions of {targets} target tokens"
        if len(self.turn_advantages) not in (0, targets):
            return f"{len(self.turn_advantages)} advantages of {targets} target tokens"
        if self.gold_tokens > targets:
            return f"{self.gold_tokens} gold tokens of {targets}"
        return find_bad_ids("token ids", self.token_ids) or find_bad_floats(
            "logprobs", self.generator_logprobs
        )


class MinibatchShare(msgspec.Struct, frozen=True):
    """One data-parallel rank's part of a minibatch: the same number of microbatches on every rank.

    The trainer runs empty microbatches too, because its collectives must match.
    """

    microbatches: list[list[TrainSequence]]
    groups: Count = 0
    """Groups of the whole minibatch, over all ranks."""
    members: Count = 0
    """Size of the largest group."""
    temperature: Finite = 1.0
    """Sampling temperature of the batch: the trained policy is softmax(logits / temperature)."""


class RankBatch(msgspec.Struct, frozen=True, tag="RankBatch"):
    """One data-parallel rank's part of a batch."""

    step: Count
    dp_rank: Count
    minibatches: list[MinibatchShare]
    metrics: dict[str, tuple[float, float, Reduce]]
    """Queue metrics of this batch: name -> (sum, count, reduce); only dp_rank 0 receives them."""

    def find_fault(self) -> str:
        """Why the batch cannot be trained on; "" if it can."""
        sequences = (
            sequence
            for share in self.minibatches
            for microbatch in share.microbatches
            for sequence in microbatch
        )
        return next(filter(None, (sequence.find_fault() for sequence in sequences)), "")


# --- prompts endpoint: queue (ROUTER) <-> generators (DEALER) -----------------------------------


class Lease(msgspec.Struct, frozen=True, tag="Lease"):
    """Generate some or all completions (`indices`) of a group."""

    lease_id: Id
    prompt: Prompt
    """Without its `entry`."""
    indices: list[Count]
    sampling: Sampling

    def find_fault(self) -> str:
        """Why it cannot be served; "" if it can."""
        return "" if len(set(self.indices)) == len(self.indices) else f"indices {self.indices}"


class RolloutDone(msgspec.Struct, frozen=True, tag="RolloutDone"):
    """One completion of a lease, sent as soon as it is finished."""

    rollout: Rollout


# --- verify endpoint: queue (ROUTER) <-> verifiers (DEALER) -------------------------------------


class VerifierReady(msgspec.Struct, frozen=True, tag="VerifierReady"):
    """State of a verifier, sent at start and as heartbeat."""

    capacity: dict[Name, Count]
    """Worker pool -> requests it accepts at once."""
    session: int
    """Differs after a restart: requests of the earlier session are lost."""
    requests: list[Id] | None = None
    """Ids of its unanswered requests; None: not reported."""
    is_leaving: bool = False
    """As in GeneratorReady, with requests in place of leases."""


class ScoreRequest(msgspec.Struct, frozen=True, tag="ScoreRequest"):
    """Grade one completion. Carries only text: verifiers see no token ids."""

    request_id: SignedId
    task: str
    answer: str
    entry: str
    text: str
    completion_tokens: Count
    is_finished: bool
    """False when the completion was cut at the length limit."""
    problem: str = ""
    """The question, for its language and to detect a copied question."""
    language: str = ""
    """The prompt's `language`."""
    seed: int = 0  # as `Sampling.seed`
    prompt_tail: str = ""
    """As in Rollout."""
    length_rule: LengthRule | None = None
    """Rule of the stage; None (evaluations): of the stage with the longest completions."""
    other_answers: list[str] = []
    """Further accepted answers."""


class ScoreDone(msgspec.Struct, frozen=True, tag="ScoreDone"):
    """The verdict on a request."""

    request_id: Id
    score: Score


NO_ANSWER = -1
"""Class of a completion without an answer."""


class ClassRequest(msgspec.Struct, frozen=True, tag="ClassRequest"):
    """Find the completions of one prompt with equal answers; none of the answers is right."""

    request_id: Id
    """From the same counter as the ids of score requests; a ScoreFailed may answer it."""
    task: str
    texts: list[str]
    prompt_tails: list[str]
    """For each text, as in Rollout."""
    problem: str = ""
    """The question."""
    entry: str = ""
    """The prompt's `entry`, only for a user-defined comparison."""

    def find_fault(self) -> str:
        """Why the request contradicts itself; "" if it does not."""
        if len(self.texts) == len(self.prompt_tails):
            return ""
        return f"{len(self.texts)} texts and {len(self.prompt_tails)} prompt tails"


class ClassDone(msgspec.Struct, frozen=True, tag="ClassDone"):
    """The classes of a request."""

    request_id: Id
    classes: list[Version]
    """For each text: 0, 1, ... in order of first appearance, or NO_ANSWER."""


UNGRADABLE = "ungradable"
"""Grading failed by our own fault, or ended without a reliable verdict."""
NOT_GRADED = "not_graded"
"""The node had no time to grade; the completion is not at fault."""
_REASON_CHARS = 2000


def sendable(reason: str) -> str:
    """A reason that can be encoded: it may quote a completion with a lone surrogate."""
    return escaped(reason[:_REASON_CHARS])[:_REASON_CHARS]


def escaped(text: str) -> str:
    r"""The text with lone surrogates, which no message can hold, spelled as \udXXX."""
    return text.encode(errors="backslashreplace").decode()


class ScoreFailed(msgspec.Struct, frozen=True, tag="ScoreFailed"):
    """No verdict, and never a reward of 0; the queue repeats the request."""

    request_id: Id
    reason: str
    """The error, for people."""
    kind: Annotated[str, msgspec.Meta(pattern="^(ungradable|not_graded)$")] = UNGRADABLE
    """UNGRADABLE or NOT_GRADED: the reason to drop the completion after the last attempt."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "reason", sendable(self.reason))


# --- batches endpoint: queue (ROUTER) <-> data-parallel leaders (DEALER) -------------------------


class NextBatch(msgspec.Struct, frozen=True, tag="NextBatch"):
    """A leader asks for its share of the batch of `step`; answered by RankBatch or Stop.

    It repeats this every few seconds until an answer comes, so that a lost message does no harm.
    """

    step: Count
    dp_rank: Count
    dp_size: Size
    held_version: Version = -1
    """The last synced version, in case WeightsSynced was lost; -1: not reported."""
    is_final: bool = False
    """As in WeightsSynced, of held_version."""


class WeightsSynced(msgspec.Struct, frozen=True, tag="WeightsSynced"):
    """All generators hold `version`; `is_final` after the last optimizer step."""

    version: Version
    is_final: bool = False


class SaveState(msgspec.Struct, frozen=True, tag="SaveState"):
    """The trainer saves a checkpoint after `step` batches; answered by QueueState."""

    step: Count


class Stop(msgspec.Struct, frozen=True, tag="Stop"):
    """End in good order."""

    reason: str = ""


FromGenerator = GeneratorReady | RolloutDone | RolloutFailed
ToGenerator = Lease | Cancel | Hold | RolloutsTaken | Stop
FromVerifier = VerifierReady | ScoreDone | ScoreFailed | ClassDone
ToVerifier = ScoreRequest | ClassRequest | Stop
FromLeader = NextBatch | WeightsSynced | SaveState
ToLeader = RankBatch | QueueState | Stop
FromMember = Hello | StartRequest | Ack | Failed
ToMember = Receive | Fence | Ping | MayStart | Pause | Release | Reclaim | Resume | LeaveGroup
FromScored = LogprobRequest | JudgeRequest | Stop
ToScored = LogprobsDone | LogprobsFailed | Judged | JudgeRefused
AnyMessage = (FromGenerator | ToGenerator | FromVerifier | ToVerifier | FromLeader | ToLeader
              | FromMember | ToMember | NodeState | RunPhase | FromScored | ToScored)  # fmt: skip
"""`endpoints.py` says which kinds go over which endpoint."""
