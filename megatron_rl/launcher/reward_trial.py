"""Calls a user's comparisons and extra rewards once, before a run starts processes.

A prompt of each task with such functions gets a made-up completion, graded as in a run: by the same
rules, in the same limited processes. Our own functions have tests and are not called.
"""

from collections.abc import Sequence

from megatron_rl.config.errors import InputError
from megatron_rl.config.reward import CODE, RewardConfig
from megatron_rl.config.tree import Config
from megatron_rl.protocol.types import Prompt, Score, ScoreFailed
from verification.canned import form_of_check, make_canned
from verification.library import Grading, Sample
from verification.pool.faults import MODEL_FAULTS

_PROGRAM = "def made_up():\n    return None\n"


def try_rewards(prompts: Sequence[Prompt], config: Config) -> list[str]:
    """Call the user's functions for one prompt of each task; lines about them.

    Raises InputError if one raises, returns a wrong type, or exceeds the limits of its worker pool.
    """
    reward = config.reward
    chosen: dict[str, Prompt] = {}
    for prompt in prompts:
        if functions_of(prompt.task, reward):
            chosen.setdefault(prompt.task, prompt)
    if not chosen:
        return []
    samples = [_sample(prompt, config) for prompt in chosen.values()]
    with Grading.of(config) as grading:
        refuse_faults(list(chosen.values()), grading.score(samples), config)
    return [
        f"{function} was called with a made-up completion of the task {task!r}"
        for task in chosen
        for function in functions_of(task, reward)
    ]


def refuse_faults(
    prompts: Sequence[Prompt], scores: Sequence[Score | ScoreFailed], config: Config
) -> None:
    """Raise InputError if a user's function did not grade a prompt's completion."""
    for prompt, score in zip(prompts, scores, strict=True):
        reason = score.reason
        if isinstance(score, ScoreFailed) or reason in MODEL_FAULTS:
            custom = config.verifier.custom
            limits = (
                f": they exceed expert.verifier.custom.timeout_s={custom.timeout_s:g} or "
                f"memory_bytes={custom.memory_bytes}, or end their process"
            )
            raise InputError(
                f"the functions of the task {prompt.task!r} "
                f"({', '.join(functions_of(prompt.task, config.reward))}) cannot grade a made-up "
                f"completion of {prompt.place or prompt.id!r}: {reason}"
                f"{limits if reason in MODEL_FAULTS else ''}"
            )


def functions_of(task: str, reward: RewardConfig) -> list[str]:
    """The user's functions that grade a task, as package.module:function."""
    compare = reward.all_tasks[task].compare
    extras = [extra.function for extra in reward.extras_of(task)]
    return list(dict.fromkeys([compare, *extras] if ":" in compare else extras))


def _sample(prompt: Prompt, config: Config) -> Sample:
    """A completion that passes the format check of the task."""
    reward, tags = config.reward, config.render.tags
    form = form_of_check(reward.format_checks[prompt.task])
    compare = reward.all_tasks[prompt.task].compare
    canned = None
    if compare == CODE or not form.has_fence:
        canned = make_canned(
            prompt, compare, form, tail="", count=reward.tests_per_problem, tags=tags
        )
    thoughts = tags.around("\nmade up\n") + "\n" if form.has_thoughts else ""
    text = f"{thoughts}```python\n{_PROGRAM}```" if canned is None else canned.right
    return sample_of(prompt, text)


def sample_of(prompt: Prompt, text: str, tail: str = "") -> Sample:
    """A made-up completion of a prompt to grade; tail: end of the prompt, which it continues."""
    return Sample(
        text=text,
        answer=prompt.answer,
        task=prompt.task,
        entry=prompt.entry,
        problem=prompt.question,
        language=prompt.language,
        tokens=1,
        prompt_tail=tail,
        other_answers=prompt.other_answers,
    )
