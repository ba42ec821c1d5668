"""The sections `[reward]` and `[verifier]` of the configuration tree."""

import re
from typing import Any, Literal, NamedTuple, Self

from pydantic import (
    Field,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from megatron_rl.config.section import Section

START_AND_END_S = 5.0
"""Time for grading a program in addition to compilation and tests."""
WALL_FACTOR = 2.0
"""Maximum elapsed time of a program, without waits for a core, over its CPU time."""
ANSWERS, LANGUAGE, CODE, CUSTOM = "answers", "language", "code", "custom"
WORKER_POOLS = (ANSWERS, LANGUAGE, CODE, CUSTOM)
FormatCheckName = Literal["auto", "think_box", "think_code", "box", "code", "none"]
UnevaluatedRule = Literal["refuse_copied", "refuse", "accept"]
StepKind = Literal["judge", "language", "extras", "pair"]


class Step(NamedTuple):
    """A part of grading that needs a killable process."""

    kind: StepKind
    """judge: whether the answer is right; extras: all extra rewards of the task; pair: whether two
    answers are the same, apart from any score."""
    pool: str
    """Worker pool that runs it."""


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", value):
        raise ValueError(
            f"{value!r} is no package.module:function; expected such as 'my_agents:guess' for the "
            "function guess of my_agents.py, whose folder is in PYTHONPATH"
        )
    return value


class TaskConfig(Section):
    """How completions of a task are judged; prompts name the task."""

    format_check: FormatCheckName = "auto"
    """Form that a response must have to earn anything. think_*: thoughts between the tags of
    render.thinking first; box: an answer in \\boxed{}; code: a fenced block with a language tag;
    none: any text. auto: code where programs are compared, else box, and think_* for models that
    think (render.thinking)."""
    compare: str = ""
    """Whether the answer is right: math, exact, reasoning_gym, code, or package.module:function
    as `f(answer: str, request: ScoreRequest) -> bool`. Tasks with the first four names have it."""
    environment: str = ""
    """package.module:name of an environment, which holds a conversation with the policy:
    docs/agents.md. Without compare it decides the reward alone; with it the verifier grades the
    text that the environment returns."""

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, value: str) -> str:
        return value and _check_name(value)

    @property
    def is_decided_by_environment(self) -> bool:
        """Whether its environment decides the whole reward, and no verifier grades."""
        return bool(self.environment) and not self.compare

    def decided(self, *, thinks: bool) -> Self:
        """The task with its format check decided, for a model that thinks or does not."""
        if self.is_decided_by_environment:
            return self.model_copy(update={"format_check": "none"})
        if self.format_check != "auto":
            return self
        form = "code" if self.compare == CODE else "box"
        return self.model_copy(update={"format_check": f"think_{form}" if thinks else form})


_DEFAULT_TASKS = {
    name: TaskConfig(compare=name) for name in ("math", "exact", "reasoning_gym", CODE)
}


class ExtraReward(Section):
    """A user's reward in addition to correctness."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of this reward in records and metrics."""
    function: str
    """package.module:function as `f(answer: str, request: ScoreRequest) -> float`."""
    weight: FiniteFloat = 1.0
    """Factor applied to the function's result."""
    tasks: list[str] = []
    """Tasks that this reward applies to; empty: all."""

    @field_validator("function")
    @classmethod
    def _check_function(cls, value: str) -> str:
        return _check_name(value)


class RewardConfig(Section):
    """Parts of the reward of a completion that passes its format check. Any other completion earns
    0.

    Defaults are the paper's, but for the parts that a run has to ask for.
    """

    correct: float = Field(default=0.9, ge=0)
    """Reward for a right answer."""
    format: float = Field(default=0.1, ge=0)
    """Reward for passing the format check."""
    length: float = Field(default=0.1, ge=0)
    """Maximum length penalty; see length_margin_tokens."""
    length_margin_tokens: int = Field(default=0, ge=0)
    """Number of tokens before the length limit over which the length penalty grows (the paper's
    l_cache); 0: no penalty."""
    language: float = Field(default=0.0, ge=0)
    """Reward for problem, thoughts and answer in one language (paper: 0.1); 0: language is not
    checked."""
    language_confidence: float = Field(default=0.6, gt=0, le=1)
    """Minimum confidence of language detection. A text below it counts as unknown, never as a
    mismatch."""
    accept_missing_unit: bool = True
    """Accept an answer where it or the reference lacks the other's unit; % only above 1."""
    unevaluated: UnevaluatedRule = "refuse_copied"
    """Verdict on right answers with an operation that the reference lacks, such as \\cos 60^\\circ
    for 1/2. refuse_copied: wrong where the problem contains the answer; refuse: wrong where the
    operation can be carried out; accept: right."""
    tests_per_problem: PositiveInt = 20
    """Number of tests drawn for each group of a code problem."""
    code_credit: Literal["all", "proportional"] = "all"
    """Share of `correct` that a program earns. all: everything for passing all tests;
    proportional: the share of tests that it passes, for which all tests run."""
    test_s: PositiveFloat = 4.0
    """CPU seconds of one test of a program, unless the problem has its own limit."""
    test_memory_bytes: PositiveInt = 300 << 20
    """Memory limit of one test of a program, in bytes, unless the problem has its own
    limit."""
    compile_s: PositiveFloat = 10.0
    """CPU seconds of a compilation."""
    host_patience: float = Field(default=10.0, ge=1)
    """Elapsed time allowed for a test or compilation on a busy node: a multiple of the time on an
    idle one, which is twice the CPU limit. A completion beyond it is not graded."""
    isolation: Literal["auto", "bubblewrap", "landlock", "rlimits"] = "auto"
    """Confinement of programs. auto: bubblewrap, else Landlock with a warning, else refuse;
    rlimits alone let a program read files and use the network."""
    tasks: dict[str, TaskConfig] = {}
    """Tasks besides math, exact, reasoning_gym and code, or other definitions of these four."""
    extra: list[ExtraReward] = []
    """Rewards of the user's own."""

    @property
    def all_tasks(self) -> dict[str, TaskConfig]:
        """Tasks that prompts may name. Undecided format checks are those of a model that thinks."""
        tasks = _DEFAULT_TASKS | self.tasks
        return {name: task.decided(thinks=True) for name, task in tasks.items()}

    @property
    def own_tasks(self) -> list[str]:
        """Names of the user's tasks."""
        return [name for name in self.tasks if name not in _DEFAULT_TASKS]

    def decided(self, *, thinks: bool) -> Self:
        """The section with all format checks decided, for a model that thinks or does not."""
        tasks = _DEFAULT_TASKS | self.tasks
        decided = {name: task.decided(thinks=thinks) for name, task in tasks.items()}
        return self.model_copy(update={"tasks": decided})

    @property
    def is_decided(self) -> bool:
        """Whether all format checks are decided."""
        tasks = _DEFAULT_TASKS | self.tasks
        return all(task.format_check != "auto" for task in tasks.values())

    def extras_of(self, task: str) -> list[ExtraReward]:
        """Extra rewards of a task."""
        return [extra for extra in self.extra if not extra.tasks or task in extra.tasks]

    def steps_of(self, task: str) -> tuple[Step, ...]:
        """Steps that may follow the format check of a completion of a task, in order.

        Only this function decides the worker pools; a task whose environment decides has none. The
        queue keeps room in the pools of all steps; the verifier skips the first step if comparing
        texts decides.
        """
        if self.all_tasks[task].is_decided_by_environment:
            return ()
        compare = self.all_tasks[task].compare
        pool = CUSTOM if ":" in compare else CODE if compare == "code" else ANSWERS
        steps = [Step("judge", pool)]
        if self.language > 0:
            steps.append(Step("language", LANGUAGE))
        if self.extras_of(task):
            steps.append(Step("extras", CUSTOM))
        return tuple(steps)

    def class_step(self, task: str) -> Step:
        """The step that compares two answers of a task if their texts differ."""
        return Step("pair", CUSTOM if ":" in self.all_tasks[task].compare else ANSWERS)

    @property
    def environments(self) -> dict[str, str]:
        """The environment of each task that has one."""
        return {name: task.environment for name, task in self.tasks.items() if task.environment}

    @property
    def demands_thoughts(self) -> bool:
        """Whether a format check that is given demands thoughts."""
        return any(task.format_check.startswith("think") for task in self.tasks.values())

    @property
    def longest_program_s(self) -> float:
        """Maximum seconds for grading a program, without waits for a core."""
        # To count passed tests, calls run together first, then one by one.
        tests = self.tests_per_problem + (self.code_credit == "proportional")
        return longest_program_s(self.compile_s, tests * self.test_s)

    @property
    def format_checks(self) -> dict[str, FormatCheckName]:
        """The format check of each task."""
        return {name: task.format_check for name, task in self.all_tasks.items()}

    @model_validator(mode="before")
    @classmethod
    def _keep_comparisons(cls, given: Any) -> Any:
        """Let a task of ours be given without its comparison."""
        tasks = given.get("tasks") if isinstance(given, dict) else None
        if not isinstance(tasks, dict):
            return given
        known = {
            name: {"compare": name} | task
            for name, task in tasks.items()
            if name in _DEFAULT_TASKS and isinstance(task, dict)
        }
        return {**given, "tasks": {**tasks, **known}}

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        for name, task in self.tasks.items():
            if task.is_decided_by_environment and task.format_check not in ("auto", "none"):
                raise ValueError(
                    f"reward.tasks.{name}: format_check={task.format_check!r} with an environment "
                    "that decides the reward: leave it out, or give compare, by which the verifier "
                    "then grades the text that the environment returns"
                )
        return self

    @model_validator(mode="after")
    def _check_extra(self) -> Self:
        taken = {"correct", "format", "length", "language"}
        for extra in self.extra:
            if extra.name in taken:
                raise ValueError(f"reward.extra: the name {extra.name!r} is taken: choose another")
            taken.add(extra.name)
            unknown = sorted(set(extra.tasks) - set(self.all_tasks))
            if unknown:
                raise ValueError(
                    f"reward.extra {extra.name!r} names unknown tasks {unknown}; known are "
                    f"{sorted(self.all_tasks)}"
                )
            for name in extra.tasks:
                if self.all_tasks[name].is_decided_by_environment:
                    raise ValueError(
                        f"reward.extra {extra.name!r} names the task {name!r}, whose environment "
                        "decides the whole reward: leave the task out, or set "
                        f"reward.tasks.{name}.compare"
                    )
        return self


def longest_program_s(compile_s: float, tests_s: float, factor: float = WALL_FACTOR) -> float:
    """Maximum seconds for grading a program with these CPU limits, without waits for a core."""
    return START_AND_END_S + factor * (compile_s + tests_s)


class WorkerPoolConfig(Section):
    """Processes for one kind of grading, so that slow kinds do not delay fast ones."""

    workers: PositiveInt | Literal["auto"] = "auto"
    """Number of processes. auto: half of the node's cores for code; a quarter, at most 8, for the
    others. In the custom pool: of processes that compute."""
    timeout_s: PositiveFloat = 3.0
    """Time limit per grading step. CPU seconds; for the code and custom pools, which wait for
    other processes, elapsed seconds without time spent waiting for a core."""
    max_elapsed_s: PositiveFloat = 120.0
    """Elapsed seconds of one attempt, without pauses. Beyond this limit the node is too busy to
    judge: one more attempt follows when it is quieter, then the completion is not graded."""
    running_slow: int = Field(default=0, ge=0)
    """Number of slow items that compute at once, at low priority; 0: one per core."""
    held_slow: PositiveInt = 32
    """Number of slow items that keep their process, running or paused. Together they may use
    twice memory_bytes. In the custom pool: number of functions that wait, such as for a judge,
    besides `workers` that compute."""
    memory_bytes: PositiveInt = 2 << 30
    """Address space of one process, in bytes. For code it limits the compiler; tests have their
    own limit."""
    max_pending: PositiveInt = 1024
    """Number of requests accepted at once. A request counts in every worker pool that a step of
    its task needs."""

    def with_workers(self, pool: str, cores: int) -> Self:
        """The settings with `workers` decided, for a verifier with this number of cores."""
        if self.workers != "auto":
            return self
        share = cores // 2 if pool == CODE else min(8, cores // 4)
        return self.model_copy(update={"workers": max(1, share)})


_LANGUAGE_POOL: dict[str, Any] = {"timeout_s": 1.0}
_CODE_POOL: dict[str, Any] = {
    "timeout_s": 200.0, "max_elapsed_s": 400.0, "memory_bytes": 4 << 30, "max_pending": 256,
}  # fmt: skip
_CUSTOM_POOL: dict[str, Any] = {"timeout_s": 10.0}


class EnvironmentsConfig(Section):
    """Processes of environments, which each generator starts."""

    python: str = ""
    """Interpreter of environments, from Python 3.9. It needs none of our packages. "": that of the
    run."""
    start_timeout_s: PositiveFloat = 60.0
    """Seconds for the interpreter to start and to import the environment's module."""
    turn_timeout_s: PositiveFloat = 60.0
    """Seconds that an environment may take between two of its requests. Beyond it the environment
    hangs: the conversation is retried elsewhere."""
    episode_timeout_s: PositiveFloat = 600.0
    """Seconds that an environment may take in one conversation. The time of the policy's replies
    does not count."""
    memory_bytes: PositiveInt = 4 << 30
    """Address space of each process of a conversation, in bytes."""
    max_episodes: PositiveInt = 64
    """Number of conversations that a generator holds at once. A conversation that waits for its
    environment takes no slot of the engine, so more than expert.generator.max_running can help."""
    max_message_bytes: PositiveInt = 8 << 20
    """Maximum length of a message between an environment and its generator, in bytes."""
    variables: list[str] = []
    """Names of environment variables that environments see, besides a few such as PATH."""


class VerifierConfig(Section):
    """Grading processes by worker pool. A worker pool that no task needs starts no process."""

    answer_within_s: PositiveFloat = 600.0
    """Seconds after which an open request is answered as not graded. Must be below
    expert.queue.score_timeout_s."""
    max_restarts: int = Field(default=10, ge=0)
    """Restarts of a verifier within expert.verifier.restart_window_s. A dead verifier starts
    again after 1, 2, 4 ... at most 60 s. When no restart is left, the run continues with the
    verifiers of other nodes; without any it ends."""
    restart_window_s: PositiveFloat = 3600.0
    """Seconds over which restarts of a verifier are counted."""
    answers: WorkerPoolConfig = WorkerPoolConfig()
    """Math, exact, reasoning_gym."""
    language: WorkerPoolConfig = WorkerPoolConfig(**_LANGUAGE_POOL)
    """Language consistency, once the answer is judged."""
    code: WorkerPoolConfig = WorkerPoolConfig(**_CODE_POOL)
    """Compiling and testing programs."""
    custom: WorkerPoolConfig = WorkerPoolConfig(**_CUSTOM_POOL)
    """Comparisons and extra rewards of the user's own."""

    def pool(self, name: str) -> WorkerPoolConfig:
        """The worker pool of that name."""
        pool: WorkerPoolConfig = getattr(self, name)
        return pool

    @model_validator(mode="before")
    @classmethod
    def _keep_other_defaults(cls, given: Any) -> Any:
        """Keep a pool's defaults for keys that are not given."""
        if not isinstance(given, dict):
            return given
        own = {"language": _LANGUAGE_POOL, "code": _CODE_POOL, "custom": _CUSTOM_POOL}
        return given | {
            name: defaults | given[name]
            for name, defaults in own.items()
            if isinstance(given.get(name), dict)
        }

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        for name in WORKER_POOLS:
            pool = self.pool(name)
            if not pool.timeout_s <= pool.max_elapsed_s <= self.answer_within_s:
                raise ValueError(
                    f"verifier.{name}: timeout_s={pool.timeout_s:g}, max_elapsed_s="
                    f"{pool.max_elapsed_s:g} and expert.verifier.answer_within_s="
                    f"{self.answer_within_s:g} must not fall in this order: raise the later ones"
                )
        return self
