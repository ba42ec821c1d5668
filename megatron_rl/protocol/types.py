"""Messages and records that flow between the processes.

Imported by every process. One frozen struct per stage: Prompt -> Rollout -> ScoredRollout ->
TrainSequence -> RankBatch. Arrays travel as raw buffers (see `frames.py`).
"""

from typing import Annotated

import msgspec
import numpy as np

from megatron_rl.protocol.class_messages import ClassDone, ClassRequest
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
    Share,
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
from megatron_rl.protocol.scorer_messages import LogprobRequest, LogprobsDone, LogprobsFailed
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


class Sampling(msgspec.Struct, frozen=True):
    """How to sample completions."""

    max_new_tokens: Count
    temperature: Finite
    """0 means greedy."""
    top_p: Share = 1.0
    top_k: Count = 0
    """0: all tokens."""
    min_p: Share = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end a completion; all its tokens are kept."""
    seed: int = 0
    """Seed of the group's grading, such as the draw of a program's test cases."""
    draw_seeds: tuple[Id, ...] = ()
    """In a lease under expert.generator.deterministic: seed of each index, to draw its tokens."""


class VersionSpan(msgspec.Struct, frozen=True):
    """Completion tokens [start, end) were sampled from policy `version`."""

    version: Version
    start: Count
    end: Count


def _no_choices() -> np.ndarray:
    return np.zeros(0, np.uint8)


ROUNDING_NATS = 1e-3
"""The logprob of a certain token may exceed 0 by this much, because engines round."""


class GoldAnswer(msgspec.Struct, frozen=True):
    """The reference answer that may replace the answer of a completion."""

    thought_tokens: Count
    """Completion tokens before the answer."""
    token_ids: np.ndarray
    """[answer tokens] int32; empty if the completion has no place for it."""
    fault: str = ""
    """Reason to count, if the completion has no place for it."""


class Rollout(msgspec.Struct, frozen=True, weakref=True):
    """One finished completion of a leased group."""

    lease_id: Id
    index: Count
    """Position inside the group, 0 .. group size - 1."""
    prompt_ids: np.ndarray
    """[prompt tokens] int32."""
    token_ids: np.ndarray
    """[completion tokens] int32; the end-of-sequence token is included when it was sampled."""
    logprobs: np.ndarray
    """[completion tokens] float32 of each sampled token, under the version that sampled it."""
    spans: list[VersionSpan]
    finish_reason: str
    """"stop" (end of sequence) or "length"."""
    text: str
    """Completion decoded without the end-of-sequence token."""
    expert_choices: np.ndarray = msgspec.field(default_factory=_no_choices)
    """[all tokens - 1, layers, experts of a token] uint8 or wider; empty without router_replay."""
    prompt_tail: str = ""
    """The end of the rendered prompt, where some chat templates open the thoughts for the model."""
    first_token_s: Finite = -1.0
    """Seconds between lease and first token, by the generator's clock; -1: unknown."""
    gold: GoldAnswer | None = None
    """Only with algorithm.gold."""

    @property
    def oldest_version(self) -> int:
        """Lowest policy version among the tokens."""
        return min(span.version for span in self.spans)

    @property
    def newest_version(self) -> int:
        """Highest policy version among the tokens."""
        return max(span.version for span in self.spans)


_MOST_PARTS = 100


class Score(msgspec.Struct, frozen=True):
    """The verdict on one completion."""

    reward: Finite
    parts: Annotated[dict[Name, Finite], msgspec.Meta(max_length=_MOST_PARTS)]
    """Parts that sum to the reward: "format", "correct", "length", "language", extra rewards."""
    reason: Name
    """"correct", "wrong_answer", or why grading stopped: "no_think_start", "wrong_output", ..."""
    tests: tuple[Count, Count] = (0, 0)
    """(passed, all) tests of a program, if reward.code_credit counts them."""
    detail: str = ""
    """The first test that a program failed, and its output."""

    @property
    def is_correct(self) -> bool:
        """Whether the answer passed."""
        return self.reason == "correct"

    @property
    def is_well_formed(self) -> bool:
        """Whether the format check passed."""
        return self.parts.get("format", 0.0) > 0.0


class ScoredRollout(msgspec.Struct, frozen=True):
    """A rollout with its score."""

    rollout: Rollout
    score: Score


class TrainSequence(msgspec.Struct, frozen=True):
    """One rollout or SFT example for the trainer."""

    token_ids: np.ndarray
    """[prompt + completion tokens] int32."""
    prompt_length: Count
    generator_logprobs: np.ndarray
    """[completion tokens] float32; zeros for SFT examples."""
    token_versions: np.ndarray
    """[completion tokens] int32: policy version that sampled each token."""
    advantage: float
    """May be NaN or infinite, as a user's estimator makes it: the trainer skips that update."""
    weight: float
    """Loss weight of every completion token."""
    reward: float = 0.0
    group: int = 0
    """Number of its group in the minibatch; -1: padding."""
    member: int = 0
    """Place in its group."""
    gold_tokens: Count = 0
    """Number of tokens at the end that are a reference answer, which no policy sampled."""
    rollout: tuple[int, int] = (-1, 0)
    """Recorded group and index of its rollout; (-1, 0): this run did not sample it."""
    expert_choices: np.ndarray = msgspec.field(default_factory=_no_choices)
    """As in Rollout."""

    def find_fault(self) -> str:
        """Why it cannot be trained on; "" if it can."""
        completion = len(self.token_ids) - self.prompt_length
        lengths = len(self.generator_logprobs), len(self.token_versions)
        if lengths != (completion, completion):
            return f"{lengths} logprobs and versions of {completion} completion tokens"
        if self.gold_tokens > completion:
            return f"{self.gold_tokens} gold tokens of {completion}"
        if self.token_versions.dtype != np.int32:
            return f"token versions are {self.token_versions.dtype}, expected int32"
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


UNGRADABLE = "ungradable"
"""Grading failed by our own fault, or ended without a reliable verdict."""
NOT_GRADED = "not_graded"
"""The node had no time to grade; the completion is not at fault."""
_REASON_CHARS = 2000


def sendable(reason: str) -> str:
    """A reason that can be encoded: it may quote a completion with a lone surrogate."""
    text = reason[:_REASON_CHARS].encode(errors="backslashreplace").decode()
    return text[:_REASON_CHARS]


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
FromScored = LogprobRequest | Stop
ToScored = LogprobsDone | LogprobsFailed
AnyMessage = (FromGenerator | ToGenerator | FromVerifier | ToVerifier | FromLeader | ToLeader
              | FromMember | ToMember | NodeState | RunPhase | FromScored | ToScored)  # fmt: skip
"""`endpoints.py` says which kinds go over which endpoint."""
