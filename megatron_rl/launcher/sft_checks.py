"""Checks of the SFT examples before a start, and what a start says of them.

Used by `preflight.py` and by sweeps. The examples are rendered in a child process.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.config.errors import InputError
from megatron_rl.config.tree import Config, SftConfig
from megatron_rl.protocol.render import Renderer, describe_system_prompts, names_cpp
from megatron_rl.protocol.render_probe import TaughtAnswer
from megatron_rl.trainer.sft_dataset import SftExample, keep_sft_dataset, line_of
from megatron_rl.trainer.sft_rendering import trial_of

_TAUGHT_EXAMPLES = 16
"""SFT examples whose rendering is compared with the chat template's."""


def check_sft_dataset(config: Config) -> None:
    """Raise InputError for a line of sft.dataset that is no SFT example, or has an unknown task."""
    sft = config.sft
    if sft.trains and sft.dataset is None:
        key = "sft.steps" if sft.steps else "sft.baseline"
        raise InputError(f"{key} needs sft.dataset: name a JSONL file of {{messages, response}}")
    known = config.reward.format_checks
    for number, example in enumerate(_examples(sft)):
        if example.task not in known:
            assert sft.dataset is not None
            raise InputError(
                f"{sft.dataset}:{line_of(sft.dataset, number)}: unknown task {example.task!r}: "
                f"known are {sorted(known)}, others are defined in [reward.tasks.NAME]"
            )


def first_taught(sft: SftConfig) -> list[TaughtAnswer]:
    """Answers of the first SFT examples."""
    return [
        TaughtAnswer(one.conversation, one.answer)
        for one in _examples(sft)[:_TAUGHT_EXAMPLES]
        if not one.messages[-1].tool_calls
    ]


def sft_trials(sft: SftConfig) -> list[Callable[[Renderer], object]]:
    """Trials that render SFT examples; each raises InputError."""
    path = _dataset(sft)
    return [] if path is None else [trial_of(path)]


def describe_sft_openings(config: Config) -> list[str]:
    """Lines about the system prompt that the run adds to SFT examples without a system message.

    A warning if the examples are not used.
    """
    if config.sft.dataset is not None and _dataset(config.sft) is None:
        return ["warning: sft.dataset is not used, because sft.steps = 0: no cold start"]
    examples = _examples(config.sft)
    plain = [
        one for one in examples if all(said.role != "system" for said in one.conversation.messages)
    ]
    kinds = {(one.task, one.is_program, names_cpp(one.conversation.messages)) for one in plain}
    return [
        f"SFT examples without a system message ({len(plain)} of {len(examples)}) begin with the "
        f"run's {line}"
        for line in describe_system_prompts(config, sorted(kinds))
    ]


def _dataset(sft: SftConfig) -> Path | None:
    return sft.dataset if sft.trains else None


def _examples(sft: SftConfig) -> Sequence[SftExample]:
    path = _dataset(sft)
    return [] if path is None else keep_sft_dataset(path)
