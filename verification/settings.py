"""Whether completions of a run could be graded faithfully: checked before anything starts.

Used by the verifier's entry and by the launcher.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import find_function, nearest
from megatron_rl.config.reward import CODE, RewardConfig
from megatron_rl.config.tree import PromptSource
from megatron_rl.protocol.types import Prompt
from verification.code.problem import parse_tests
from verification.code.setup import prepare, with_own_limits
from verification.comparisons import COMPARISONS, code_limits, find_reward
from verification.gym_answer import REFUSED_DATASETS
from verification.verdict import GradingError

UNKNOWN_TASK = "unknown_task"


def check_sources(sources: Iterable[PromptSource]) -> None:
    """Raise InputError for prompt sources whose completions could not be graded faithfully."""
    for source in sources:
        if source.kind == "reasoning_gym" and source.name in REFUSED_DATASETS:
            raise InputError(
                f"reasoning_gym dataset {source.name!r} is refused: "
                f"{REFUSED_DATASETS[source.name]}. Choose another dataset for prompts"
            )


def check_functions(reward: RewardConfig) -> None:
    """Raise InputError for a comparison or an extra reward that cannot be loaded or called."""
    for name, task in reward.tasks.items():
        if task.is_decided_by_environment:
            continue
        key = f"reward.tasks.{name}.compare"
        find_function({known: c.judge for known, c in COMPARISONS.items()}, task.compare, key=key)
        if task.compare not in COMPARISONS:
            find_reward(task.compare, key=key)
    for extra in reward.extra:
        find_reward(extra.function, key=f"reward.extra {extra.name!r}: function")


class PromptFault(NamedTuple):
    """Why no completion of a prompt could be graded."""

    reason: str
    """One word, for counts."""
    text: str


def find_fault(prompt: Prompt, reward: RewardConfig) -> PromptFault | None:
    """The fault of a prompt: its task is unknown, or it lacks usable tests, or an answer."""
    tasks = reward.all_tasks
    if prompt.task not in tasks:
        return PromptFault(
            UNKNOWN_TASK,
            f"{_name(prompt)} has the unknown task {prompt.task!r}: known are "
            f"{sorted(tasks)}, others are defined in [reward.tasks.NAME]"
            f"{nearest(prompt.task, tasks)}",
        )
    compare = tasks[prompt.task].compare
    if compare in ("math", "exact") and not any(map(str.strip, prompt.answers)):
        return PromptFault("no_answer", f"{_name(prompt)}: the answer is empty")
    if compare == CODE:
        try:
            with_own_limits(code_limits(reward), parse_tests(prompt.entry))
        except GradingError as error:
            return PromptFault("bad_tests", f"{_name(prompt)}: {error}")
    return None


def check_prompts(prompts: Iterable[Prompt], reward: RewardConfig) -> None:
    """Raise InputError, with counts, for prompts whose completions could not be graded."""
    faults = [fault for prompt in prompts if (fault := find_fault(prompt, reward)) is not None]
    if not faults:
        return
    counts = Counter(fault.reason for fault in faults).most_common()
    named = ", ".join(f"{count:,} {reason}" for reason, count in counts)
    more = f"; {len(faults):,} prompts cannot be graded ({named})" if len(faults) > 1 else ""
    raise InputError(
        f"{faults[0].text}{more}. Correct them, or leave them out by faulty = 'drop' of their "
        "source, as in prompts.0.faulty=drop"
    )


def _name(prompt: Prompt) -> str:
    return f"{prompt.place}: prompt {prompt.id!r}" if prompt.place else f"prompt {prompt.id!r}"


def check_sandbox(reward: RewardConfig) -> None:
    """Raise InputError where programs could not be compiled or confined; precompiles headers."""
    try:
        prepare(code_limits(reward))
    except GradingError as error:
        raise InputError(str(error)) from error
