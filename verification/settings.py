"""Whether completions of a run could be graded faithfully: checked before anything starts.

Used by the verifier's entry and by the launcher.
"""

import difflib
from collections.abc import Iterable

from megatron_rl.config.errors import InputError
from megatron_rl.config.lookup import find_function
from megatron_rl.config.reward import CODE, RewardConfig
from megatron_rl.config.tree import PromptSource
from megatron_rl.protocol.types import Prompt
from verification.code.grading import parse_tests
from verification.code.setup import prepare, with_own_limits
from verification.comparisons import COMPARISONS, code_limits
from verification.gym_answer import REFUSED_DATASETS
from verification.verdict import GradingError


def check_sources(sources: Iterable[PromptSource]) -> None:
    """Raise InputError for prompt sources whose completions could not be graded faithfully."""
    for source in sources:
        if source.kind == "reasoning_gym" and source.name in REFUSED_DATASETS:
            raise InputError(
                f"reasoning_gym dataset {source.name!r} is refused: "
                f"{REFUSED_DATASETS[source.name]}. Choose another dataset for prompts"
            )


def check_functions(reward: RewardConfig) -> None:
    """Raise InputError for a comparison or an extra reward that cannot be loaded."""
    for name, task in reward.tasks.items():
        find_function(
            {known: c.judge for known, c in COMPARISONS.items()},
            task.compare,
            key=f"reward.tasks.{name}.compare",
        )
    for extra in reward.extra:
        find_function({}, extra.function, key=f"reward.extra {extra.name!r}: function")


def check_prompts(prompts: Iterable[Prompt], reward: RewardConfig) -> None:
    """Raise InputError for a prompt of an unknown task, or of code without usable tests."""
    tasks = reward.all_tasks
    for prompt in prompts:
        if prompt.task not in tasks:
            matches = difflib.get_close_matches(prompt.task, tasks, n=1)
            hint = f"; did you mean {matches[0]!r}?" if matches else ""
            raise InputError(
                f"{_name(prompt)} has the unknown task {prompt.task!r}: known are "
                f"{sorted(tasks)}, others are defined in [reward.tasks.NAME]{hint}"
            )
        if tasks[prompt.task].compare == CODE:
            try:
                with_own_limits(code_limits(reward), parse_tests(prompt.entry))
            except GradingError as error:
                raise InputError(f"{_name(prompt)}: {error}") from error


def _name(prompt: Prompt) -> str:
    return f"{prompt.place}: prompt {prompt.id!r}" if prompt.place else f"prompt {prompt.id!r}"


def check_sandbox(reward: RewardConfig) -> None:
    """Raise InputError where programs could not be compiled or confined; precompiles headers."""
    try:
        prepare(code_limits(reward))
    except GradingError as error:
        raise InputError(str(error)) from error
