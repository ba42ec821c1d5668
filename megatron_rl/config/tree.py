"""The configuration tree of a run.

Imported by every process. `files.py` loads it once from TOML plus `section.key=value`
overrides; the resolved tree is saved in the run folder as `config.toml`, which processes read.
"""

from pathlib import Path
from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.curriculum import CurriculumConfig
from megatron_rl.config.evaluation import EvalConfig
from megatron_rl.config.generator import GeneratorConfig, WeightsConfig
from megatron_rl.config.metrics import MetricsConfig
from megatron_rl.config.nodes import NodesConfig
from megatron_rl.config.parallel import ParallelConfig
from megatron_rl.config.passes import check_passes
from megatron_rl.config.prompts import PromptSource, RenderConfig
from megatron_rl.config.replay import ReplayConfig
from megatron_rl.config.reward import RewardConfig, VerifierConfig
from megatron_rl.config.sampling import SamplingConfig, check_sampling
from megatron_rl.config.scorer import ScorerConfig
from megatron_rl.config.section import Section
from megatron_rl.config.sharing import check_release, check_sharing
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
    """Factor of every deadline that [expert] does not give: 2 for slow file systems, busy hosts or
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
    issued again."""
    lease_timeout_s: PositiveFloat = 360.0
    """Seconds without a result after which a lease is cancelled and issued again; auto: 1.2 times
    expert.generator.request_timeout_s. Must exceed that, so that a live engine reports the failure
    itself."""
    score_timeout_s: PositiveFloat = 900.0
    """Seconds after which an unanswered score request is issued again. Must exceed
    expert.verifier.answer_within_s. Heartbeats reveal dead verifiers earlier."""
    max_attempts: PositiveInt = 3
    """Number of tries of a completion before its group is dropped, of a score before its
    completion is dropped, and of a group's answer classes before the group is dropped. Each drop
    is counted."""
    max_lost_attempts: PositiveInt = 30
    """Number of times that a generator or verifier may lose a completion (by a restart, by
    silence, or by a failing engine) before the completion is given up as by max_attempts."""
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
    host had no time for (not_graded) do not count."""
    breaker_min_prompts: PositiveInt = 16
    """Minimum number of distinct prompts with failed completions before failing grades may end
    the run."""
    record_tokens: bool = True
    """Write token ids and logprobs of every rollout to rollouts/, 8 bytes per token. A replay
    needs them."""

    @model_validator(mode="after")
    def _check_breaker(self) -> Self:
        if self.breaker_window_groups < self.breaker_min_prompts:
            raise ValueError(
                f"expert.queue.breaker_window_groups={self.breaker_window_groups} groups never "
                f"hold expert.queue.breaker_min_prompts={self.breaker_min_prompts} different "
                "prompts: raise the former, or lower the latter"
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
    """HTTP port of the first engine, whose ranks meet at the next port. Each further replica
    takes the next two."""
    scorer: int = Field(default=0, ge=0, le=65535)
    """Port of the scorer for trainer ranks. Its engine takes the next two."""


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
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    metrics: MetricsConfig = MetricsConfig()
    ports: PortsConfig = PortsConfig()
    nodes: NodesConfig = NodesConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.train.minibatches > self.train.prompts_per_batch:
            raise ValueError(
                f"train.minibatches={self.train.minibatches} is more than "
                f"train.prompts_per_batch={self.train.prompts_per_batch}: groups never split "
                "across minibatches; lower the former"
            )
        if self.reward.length_margin_tokens > self.sampling.max_new_tokens:
            raise ValueError(
                f"reward.length_margin_tokens={self.reward.length_margin_tokens} exceeds "
                f"sampling.max_new_tokens={self.sampling.max_new_tokens}"
            )
        if self.generator.context_tokens <= self.sampling.max_new_tokens:
            raise ValueError(
                f"generator.context_tokens={self.generator.context_tokens} leaves no room for a "
                f"prompt beside sampling.max_new_tokens={self.sampling.max_new_tokens}: raise it"
            )
        if self.generator.overlap_schedule and self.weights.kv_cache != "recompute":
            raise ValueError(
                "expert.generator.overlap_schedule with "
                f"weights.kv_cache={self.weights.kv_cache!r}: the "
                "versions of tokens would be wrong by one; set weights.kv_cache='recompute', or "
                "leave it at false"
            )
        longest = self.eval.longest(self.sampling.max_new_tokens)
        if self.generator.context_tokens <= longest:
            raise ValueError(
                f"generator.context_tokens={self.generator.context_tokens} leaves no room for a "
                f"prompt beside the max_new_tokens={longest} of eval or of eval.sets: raise it"
            )
        self._check_serving()
        self._check_algorithm()
        self._check_replay()
        self._check_verifier()
        self._check_engine()
        check_sharing(self.generator, self.weights, ranks=self.parallel.world_size)
        check_release(self.generator, self.weights, self.eval)
        self._check_training()
        if self.sft.steps and self.sft.export_every_steps:
            self._check_choice()
        return self

    def _check_serving(self) -> None:
        if self.generator.request_timeout_s >= self.queue.lease_timeout_s:
            raise ValueError(
                f"expert.generator.request_timeout_s={self.generator.request_timeout_s:g} is not "
                f"below expert.queue.lease_timeout_s={self.queue.lease_timeout_s:g}: a lease would "
                "be given to another generator before its engine has given up; set "
                f"expert.queue.lease_timeout_s to {1.2 * self.generator.request_timeout_s:g}, or "
                "lower the former"
            )
        if self.eval.replicas != "auto" and self.eval.replicas >= self.generator.replicas > 1:
            raise ValueError(
                f"eval.replicas={self.eval.replicas} leaves none of generator.replicas="
                f"{self.generator.replicas} to training: lower the former"
            )

    def _check_training(self) -> None:
        longest = self.generator.context_tokens
        check_passes(self.model, self.parallel, self.train, context_tokens=longest)
        if self.model.fp8_parameters and not self.parallel.distributed_optimizer:
            raise ValueError(
                "expert.model.fp8_parameters=true needs parallel.distributed_optimizer=true: set it"
            )
        for section, optimizer in (("", self.optimizer), ("sft.", self.sft.optimizer)):
            if optimizer.offload:
                self._check_offload(f"{section}optimizer.offload")

    def _check_choice(self) -> None:
        given = f"sft.export_every_steps={self.sft.export_every_steps}"
        names = [one.name for one in self.eval.sets]
        if self.sft.choose_by and self.sft.choose_by not in names:
            raise ValueError(
                f"sft.choose_by={self.sft.choose_by!r} is none of eval.sets "
                f"({', '.join(names) or 'there are none'}): name one of them, or leave it out for "
                "the held-out prompts"
            )
        if not self.sft.choose_by and self.eval.prompts == 0:
            raise ValueError(
                f"{given} chooses by an evaluation, and eval.prompts=0: raise it, or name one of "
                "eval.sets in sft.choose_by"
            )

    def _check_algorithm(self) -> None:
        advantage_estimator, size = self.algorithm.advantage_estimator, self.train.group_size
        if advantage_estimator.name in ("pass_at_k", "majority") and advantage_estimator.k > size:
            raise ValueError(
                f"algorithm.advantage_estimator.k={advantage_estimator.k} samples are more than "
                f"train.group_size={size}: "
                "raise the latter, or lower the former"
            )
        self._check_gold()
        if self.algorithm.needs_scorer:
            self.scorer.check(
                context_tokens=self.generator.context_tokens,
                temperature=self.sampling.temperature,
            )
            self._check_start()
        elif self.algorithm.needs_reference and self.model.fp8_parameters:
            raise ValueError(
                "algorithm.reference.policy swaps weights, and expert.model.fp8_parameters=true "
                "keeps them with scales that cannot be swapped: set "
                "expert.model.fp8_parameters=false"
            )

    def _check_start(self) -> None:
        if self.algorithm.reference.policy == "start" and self.model.megatron_path is not None:
            raise ValueError(
                "algorithm.reference.source='engine' reads Hugging Face folders, and the run "
                f"starts from model.megatron_path={self.model.megatron_path}: make a folder of it "
                "with `megatron-rl convert` and give that as algorithm.reference.policy"
            )

    def _check_gold(self) -> None:
        if self.algorithm.used_gold is None:
            return
        what = f"algorithm.gold.groups={self.algorithm.gold.groups!r}"
        if self.train.router_replay:
            raise ValueError(
                f"{what} and train.router_replay=true exclude each other: no generator chose "
                "experts for reference answers; set one of them to its default"
            )
        if not self.reward.format:
            raise ValueError(
                f"{what} needs reward.format above 0, by which well-formed completions are known; "
                "the paper's is 0.1"
            )

    @property
    def has_expandable_segments(self) -> bool:
        """Of trainer ranks; memory that another process opens must not be of them."""
        return self.train.expandable_segments and self.weights.method != "ipc"

    @property
    def has_scorer(self) -> bool:
        """Whether the run starts one: without training nobody asks for a reference."""
        return self.train.steps > 0 and self.algorithm.needs_scorer

    @property
    def sampled_groups(self) -> int:
        """Groups of a batch that are sampled for it; the others are replayed."""
        return self.train.prompts_per_batch - self.replay.groups_of(self.train.prompts_per_batch)

    @property
    def evaluators(self) -> int:
        """Generators of an evaluation beside training; 0: all evaluate, and training waits."""
        replicas = self.generator.replicas
        if replicas == 1 or self.generator.release_memory:
            return 0
        return max(1, replicas // 4) if self.eval.replicas == "auto" else self.eval.replicas

    def _check_replay(self) -> None:
        replay = self.replay
        if not replay.groups_of(self.train.prompts_per_batch):
            return
        if self.algorithm.used_gold is not None:
            raise ValueError(
                f"replay.share={replay.share:g} and algorithm.gold.groups="
                f"{self.algorithm.gold.groups!r} exclude each other: recorded rollouts have no "
                "place for reference answers; set one of them to its default"
            )
        if self.train.router_replay:
            raise ValueError(
                f"replay.share={replay.share:g} and train.router_replay=true exclude each other: "
                "choices of experts are not recorded; set one of them to its default"
            )
        if replay.datasets and self.algorithm.reads_generator_logprobs:
            raise ValueError(
                "replay.datasets have no generator's logprobs, which algorithm.policy_loss.name="
                f"{self.algorithm.policy_loss.name!r} with old_logprobs="
                f"{self.algorithm.policy_loss.old_logprobs!r}, algorithm.shaping.baseline="
                f"{self.algorithm.shaping.baseline!r} and algorithm.correction.name="
                f"{self.algorithm.correction.name!r} read: take a preset without importance "
                "ratios, such as agro, or old_logprobs='recompute' without a correction; with spo, "
                "for SFT examples of the reference, advantage_estimator.name='soft_value', "
                "shaping.baseline='none'"
            )
        if replay.buffer_groups and not self.queue.record_tokens:
            raise ValueError(
                f"replay.buffer_groups={replay.buffer_groups} is filled again from the recorded "
                "rollouts when a run resumes: set queue.record_tokens=true"
            )

    def _check_engine(self) -> None:
        engine = self.generator.engine
        if self.generator.quantization and engine in ("hf", "vllm"):
            raise ValueError(
                f"generator.quantization={self.generator.quantization!r} needs an engine that "
                f"quantises: generator.engine={engine!r} does not; use 'sglang'"
            )
        self.model.check_engine(engine)
        if engine == "vllm" and self.generator.tensor_parallel > 1:
            raise ValueError(
                f"generator.tensor_parallel={self.generator.tensor_parallel}: generator.engine="
                "'vllm' has one rank; set it to 1 and generator.replicas higher, or use 'sglang'"
            )
        check_sampling(engine, self.sampling, self.eval)
        if self.train.router_replay and engine in ("hf", "vllm"):
            raise ValueError(
                "train.router_replay needs an engine that returns its expert choices: "
                f"generator.engine={engine!r} does not; use 'sglang'"
            )

    def _check_verifier(self) -> None:
        within_s, longest_s = self.verifier.answer_within_s, self.reward.longest_program_s
        if within_s >= self.queue.score_timeout_s:
            raise ValueError(
                f"expert.verifier.answer_within_s={within_s:g} is not below "
                f"expert.queue.score_timeout_s={self.queue.score_timeout_s:g}: the queue would ask "
                "another verifier before the first has answered; set expert.queue.score_timeout_s "
                f"to {1.5 * within_s:g}"
            )
        if self.verifier.code.timeout_s < longest_s:
            raise ValueError(
                f"expert.verifier.code.timeout_s={self.verifier.code.timeout_s:g} is less than the "
                f"{longest_s:g} s that a program may take by expert.reward.compile_s, "
                "reward.tests_per_problem and reward.test_s: raise it, or lower those"
            )

    def _check_offload(self, key: str) -> None:
        if not self.parallel.distributed_optimizer:
            raise ValueError(f"{key}=true needs parallel.distributed_optimizer=true: set it")
        if self.model.fp8_parameters:
            raise ValueError(
                f"{key}=true and expert.model.fp8_parameters=true exclude each other: set one to "
                "false"
            )
