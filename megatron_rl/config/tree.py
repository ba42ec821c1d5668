"""The configuration tree of a run. Imported by every process.

`files.py` loads it from TOML and `section.key=value` overrides. Processes read the resolved tree
from config.toml in the run folder.
"""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.check import refusals
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.generator import (
    GeneratorConfig,
    SamplingConfig,
    ScorerConfig,
    WeightsConfig,
)
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.prompts import CurriculumConfig, PromptSource, RenderConfig
from megatron_rl.config.replay import ReplayConfig
from megatron_rl.config.reward import EnvironmentsConfig, RewardConfig, VerifierConfig
from megatron_rl.config.section import Section
from megatron_rl.config.stages import StageConfig
from megatron_rl.config.trainer import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    SftConfig,
    TrainConfig,
)


class RunConfig(Section):
    """The run as a whole."""

    dir: Path = Path("runs/default")
    """Folder for everything that the run writes. A relative path is relative to the current
    folder, also in a file."""
    seed: int = 0
    """Seed of prompts, sampling and initial weights."""
    patience: float = Field(default=1.0, gt=0, le=100)
    """Factor of every deadline that [expert] does not give: 2 for slow file systems, busy nodes or
    long generations. Deadlines are the keys of [expert] whose names end in timeout_s, deadline_s,
    patience_s, within_s or grace_s."""


class QueueConfig(Section):
    """The rollout queue: admission of groups, leases, grading."""

    max_staleness: int = Field(default=2, ge=0)
    """Number of policy versions that a typical rollout may lag when it is trained on; 0:
    synchronous."""
    strict_staleness: bool = False
    """Wait for a slow group before it would exceed max_staleness; false: never wait."""
    heartbeat_timeout_s: PositiveFloat = 30.0
    """Seconds of silence after which a generator or verifier counts as dead and its work is
    issued again. The launcher kills a role, of any kind, with a process that SIGSTOP has stopped
    for as long."""
    lease_timeout_s: PositiveFloat = 360.0
    """Seconds without a result after which a lease is cancelled and issued again; auto: 1.2 times
    expert.generator.request_timeout_s. Must exceed that, so that a live engine reports the failure
    itself."""
    score_timeout_s: PositiveFloat = 900.0
    """Seconds after which an unanswered score request is issued again. Must exceed
    expert.verifier.answer_within_s. Heartbeats reveal dead verifiers earlier."""
    max_attempts: PositiveInt = 3
    """Number of tries of a completion, of a score, and of a group's answer classes. After the last
    try the queue drops and counts the group; for a score, the completion."""
    max_lost_attempts: PositiveInt = 30
    """Number of times that a generator or verifier may lose a completion: by a restart, silence
    or a failing engine. Then the queue gives the completion up, as by max_attempts."""
    score_patience_s: PositiveFloat = 300.0
    """Seconds after which a completion that cannot be graded is neither tried again nor
    replaced. Keep it well below expert.train.batch_timeout_s, so that no completion delays a batch
    until the trainer gives up."""
    max_replacements: int = Field(default=1, ge=0)
    """Number of times that a completion which cannot be graded is generated again, to keep its
    group complete. Not in evaluations, which count what they could grade."""
    min_group_share: float = Field(default=0.25, ge=0, le=1)
    """Minimum share of train.group_size completions, and at least two, that must be graded.
    Groups with fewer graded completions are dropped and counted; other groups continue without
    the missing ones."""
    max_failed_groups: PositiveInt = 16
    """End the run when failed groups exceed completed groups by this number. A group fails when
    generators fail it, or when verifiers cannot compare its answers."""
    breaker_window_groups: PositiveInt = 32
    """Number of latest groups, per task and per set of worker pools, by which the queue judges
    whether grading works at all."""
    breaker_share: float = Field(default=0.8, gt=0, le=1)
    """End the run when this mean share of these groups cannot be graded. Completions that the
    node had no time for (not_graded) do not count."""
    breaker_min_prompts: PositiveInt = 16
    """Minimum number of distinct prompts with failed completions before failing grades may end
    the run."""
    ledger: bool | Literal["auto"] = "auto"
    """Write all that reaches the queue into RUN/ledger, so that a killed queue continues, and the
    batches since a checkpoint into RUN/batches, so that a killed trainer does; auto: yes without
    train.router_replay, which adds many bytes per token. Without it a kill ends the run."""
    max_restarts: int = Field(default=10, ge=0)
    """Restarts of the rollout queue within expert.queue.restart_window_s, if a signal killed it. It
    continues from its ledger, after 1, 2, 4 ... at most 60 s. When no restart is left, or when the
    queue itself fails, the run ends."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds over which restarts of the queue are counted."""
    record_tokens: bool = True
    """Write token ids and logprobs of every rollout to rollouts/, 8 bytes per token. A replay
    needs these files."""
    keep_tokens_of_steps: int = Field(default=0, ge=0)
    """Number of latest trained steps whose token files (.int32, trained_*.npz) stay in rollouts/;
    0: all. The queue removes older files with each batch, unless replay.buffer_groups needs a file
    to resume at a checkpoint in the run folder. Records (.jsonl) and all files of evaluations
    stay."""

    @model_validator(mode="after")
    def _check_breaker(self) -> Self:
        if self.breaker_window_groups < self.breaker_min_prompts:
            raise ValueError(
                f"expert.queue.breaker_window_groups={self.breaker_window_groups} is below "
                f"expert.queue.breaker_min_prompts={self.breaker_min_prompts}, so the window never "
                "has enough prompts: raise breaker_window_groups or lower breaker_min_prompts"
            )
        return self


class PortsConfig(Section):
    """Addresses and ports of a run's sockets. Port 0: the launcher picks a free one."""

    host: str = "127.0.0.1"
    """Address of the node that runs the queue and trainer rank 0, where both listen. An address
    that other nodes can reach needs keys, which `megatron-rl prepare` makes."""
    keys_dir: Path | None = None
    """Folder with the run's CURVE keys, on a file system that all nodes share."""
    label: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$", max_length=200)
    """Label of this start of the run. Sockets reject processes with another label. "": the
    launcher draws one."""
    prompts: int = Field(default=0, ge=0, le=65535)
    """Port of the queue for generators."""
    verify: int = Field(default=0, ge=0, le=65535)
    """Port of the queue for verifiers."""
    batches: int = Field(default=0, ge=0, le=65535)
    """Port of the queue for trainer ranks."""
    weights: int = Field(default=0, ge=0, le=65535)
    """Port of trainer rank 0 for generators."""
    torchrun: int = Field(default=0, ge=0, le=65535)
    """Port of the trainer ranks' rendezvous."""
    sft: int = Field(default=0, ge=0, le=65535)
    """Port of the cold start's rendezvous on several nodes: a node may begin RL while another
    one ends the cold start."""
    nodes: int = Field(default=0, ge=0, le=65535)
    """Port of the first node's launcher for the other launchers."""
    engine: int = Field(default=0, ge=0, le=65535)
    """HTTP port of the first engine. The next port is where its ranks meet, if it spans nodes.
    Each further replica takes the next two."""
    scorer: int = Field(default=0, ge=0, le=65535)
    """Port of the scorer for its peers. Its engine takes the next two."""

    @field_validator("host")
    @classmethod
    def _is_no_ipv6(cls, host: str) -> str:
        if ":" in host:
            raise ValueError(
                f"IPv6 addresses are not supported: ports.host={host!r}; give the IPv4 address of "
                "the first node, or a name that has one"
            )
        return host

    def scorer_at(self, node: str) -> str:
        """Where the scorer listens. node: its address; "": the first node's."""
        return f"{node or self.host}:{self.scorer}"


class NodesConfig(Section):
    """When a run on several nodes gives up a node, and ends."""

    start_timeout_s: PositiveFloat = 600.0
    """Seconds to wait for all nodes to start."""
    silence_timeout_s: PositiveFloat = 60.0
    """A node is lost when its launcher was silent for this many seconds."""
    end_timeout_s: PositiveFloat = 300.0
    """Seconds in which the other nodes must end their processes of a phase, after the first node
    has ended its own."""
    leave_timeout_s: PositiveFloat = 20.0
    """Seconds in which the generators and the verifier of a node that leaves (SIGTERM) finish what
    they hold; others get the rest. Slurm kills a job 30 s after SIGTERM (KillWait)."""
    wait_s: PositiveFloat = 600.0
    """Seconds in which a lost node of a trainer on several nodes may come back; then the run ends,
    and can be resumed. Default: half of expert.train.batch_timeout_s. It must stay below that key,
    after which the queue ends the run."""
    spare: int = Field(default=0, ge=0)
    """Number of the last nodes of a run on several nodes that start no role. Each waits to take the
    place of a lost trainer node."""

    def patience_s(self, *, is_there: bool) -> float:
        """Seconds without a word of the first node, once it is there or before."""
        return self.silence_timeout_s if is_there else self.start_timeout_s


class MetricsConfig(Section):
    """Exports of metrics to other programs. `RUN/metrics.jsonl` is always written."""

    tensorboard: bool = False
    """Write TensorBoard event files to RUN/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases; offline: in RUN/wandb, for `wandb sync`. Needs the package wandb:
    `pip install wandb`, or the extra of that name."""
    wandb_project: str = Field(default="megatron-rl", min_length=1)
    """Project at Weights & Biases."""
    wandb_entity: str = ""
    """User or team at Weights & Biases; "": the account's default."""
    wandb_name: str = ""
    """Name of the run at Weights & Biases; "": that of the run folder."""
    wandb_group: str = ""
    """Group of runs at Weights & Biases, such as the seeds of one experiment; "": none."""
    wandb_tags: list[str] = []
    """Tags of the run at Weights & Biases."""
    prometheus_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Prometheus endpoint http://HOST:PORT/metrics; 0: none."""
    prometheus_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint. It has no access control: anybody who reaches it can
    read the metrics."""
    poll_s: PositiveFloat = 2.0
    """Seconds between two reads of metrics.jsonl."""

    @property
    def is_on(self) -> bool:
        """Whether any export is set."""
        return self.tensorboard or self.wandb != "off" or self.prometheus_port > 0


class Config(Section):
    """Everything about a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    train: TrainConfig = TrainConfig()
    sft: SftConfig = SftConfig()
    stages: list[StageConfig] = []
    curriculum: CurriculumConfig = CurriculumConfig()
    prompts: list[PromptSource] = []
    render: RenderConfig = RenderConfig()
    sampling: SamplingConfig = SamplingConfig()
    queue: QueueConfig = QueueConfig()
    replay: ReplayConfig = ReplayConfig()
    generator: GeneratorConfig = GeneratorConfig()
    scorer: ScorerConfig = ScorerConfig()
    reward: RewardConfig = RewardConfig()
    verifier: VerifierConfig = VerifierConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    ports: PortsConfig = PortsConfig()
    nodes: NodesConfig = NodesConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if found := refusals(self):
            raise ValueError("\n  ".join(found))
        return self

    @property
    def has_expandable_segments(self) -> bool:
        """Whether trainer ranks use expandable segments, which "ipc" cannot share."""
        return self.train.expandable_segments and self.weights.method != "ipc"

    @property
    def weights_folder(self) -> str:
        """Path or URL of the files of weights.method "folder"; "" with another method."""
        if self.weights.method != "folder":
            return ""
        return self.weights.folder or str(self.run.dir.absolute() / "weights")

    @property
    def has_scorer(self) -> bool:
        """Whether the run starts a scorer; without training nothing needs a reference."""
        is_reference = self.train.steps > 0 and self.algorithm.needs_scorer
        return is_reference or self.judge_folder is not None

    @property
    def judge_folder(self) -> Path | None:
        """Folder of the model that environments ask; None: they ask none."""
        return self.scorer.judge

    @property
    def reference_is_megatron(self) -> bool:
        """Whether the reference is the initial model, and that a Megatron checkpoint."""
        return self.algorithm.reference.policy == "start" and self.model.megatron_path is not None

    @property
    def scored_folder(self) -> Path:
        """Folder of the scorer's model."""
        return self.judge_folder or self.algorithm.reference.folder or self.model.path

    @property
    def keeps_ledger(self) -> bool:
        """Whether the queue writes a ledger during training (expert.queue.ledger)."""
        wanted = self.queue.ledger
        return not self.train.router_replay if wanted == "auto" else wanted

    @property
    def keeps_batches(self) -> bool:
        """Whether the queue stores the batches since a checkpoint in RUN/batches."""
        return self.keeps_ledger and self.checkpoint.every_steps > 0

    @property
    def sampled_groups(self) -> int:
        """Number of groups per batch that are not replayed."""
        return self.train.prompts_per_batch - self.replay.groups_of(self.train.prompts_per_batch)

    @property
    def least_groups(self) -> int:
        """Minimum number of groups per batch: a replay buffer is empty at first."""
        return self.sampled_groups if self.replay.buffer_groups else self.train.prompts_per_batch

    @property
    def start_and_join_s(self) -> float:
        """Maximum seconds from the start of engines to their first weights."""
        return self.generator.start_timeout_s + self.weights.join_timeout_s

    @property
    def longest_step_s(self) -> float:
        """Maximum seconds between two weight syncs: transfers in turn, a checkpoint, a batch."""
        sync_s = self.weights.deadline_s * self.generator.replicas
        wait_s = self.weights.join_timeout_s + self.train.batch_timeout_s
        return sync_s + wait_s + self.checkpoint.write_timeout_s

    @property
    def evaluators(self) -> int:
        """Number of generators that evaluate during training; 0: all, and training waits."""
        replicas = self.generator.replicas
        if replicas == 1 or self.generator.release_memory:
            return 0
        return max(1, replicas // 4) if self.eval.replicas == "auto" else self.eval.replicas

    @property
    def eval_delay_s(self) -> float:
        """Maximum seconds that evaluations delay a batch or the end of training."""
        # While evaluators work, training reaches the next version that is due for evaluation.
        versions = 2 if self.evaluators else 1
        return versions * self.eval.all_timeout_s

    @property
    def eval_after_start_s(self) -> float:
        """As `eval_delay_s`, with the start of the engines."""
        return self.generator.start_timeout_s + self.eval_delay_s
