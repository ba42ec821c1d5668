"""Decides which of the keys given to a replay have an effect, and refuses the others.

Used by `megatron-rl replay`. Only the trainer runs, on recorded batches. A batch has completions,
advantages, loss weights and minibatches.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.errors import ConfigError, InputError
from megatron_rl.config.expert import own_key, public_key
from megatron_rl.config.files import load_config
from megatron_rl.config.layers import changed_keys
from megatron_rl.config.tree import Config

_READ = (
    "algorithm", "model", "optimizer", "parallel", "train", "checkpoint.write_timeout_s",
    "run.patience", "run.seed", "weights.method",
)  # fmt: skip
_IN_THE_BATCH = (
    "algorithm.advantage_estimator", "algorithm.aggregation", "algorithm.gold",
    "algorithm.normalization", "algorithm.zero_variance_groups", "train.group_size",
    "train.prompts_per_batch",
)  # fmt: skip
_NOT_OF_A_STEP = ("train.batch_timeout_s", "train.max_restarts", "train.restart_window_s")
_WITHOUT_FIGURES = (
    "algorithm.preset", "checkpoint.write_timeout_s", "model.path", "model.revision",
    "run.patience", "train.collective_timeout_s", "train.expandable_segments", "train.max_mismatch",
    "train.profile_steps", "train.record_tokens", "weights.method",
)  # fmt: skip
"""Read by the trainer, and without effect on the figures of a step."""
_OF_THE_SCHEDULE = ("stages", "train.epochs", "train.minibatches", "train.steps")
"""Read only to count the optimizer steps over which the learning rate decays."""
_PRESET = "algorithm.preset"


def check_keys(source: Path, overrides: Sequence[str]) -> list[str]:
    """Notes about given keys, such as the effect of a preset.

    source: file of the configuration under which the run trained the steps.
    Raises InputError for a key without effect, ConfigError.
    """
    config = load_config(source, overrides)
    read, unread = list[str](), list[str]()
    for text in overrides:
        (read if _is_read(_key_of(text), config) else unread).append(text)
    notes = []
    if unread:
        named = ", ".join(public_key(_key_of(text)) for text in unread)
        if _is_possible(source, read):
            raise InputError(_refusal(named, one=len(unread) == 1))
        notes.append(f"note: {named}: no effect on a replay, but the other keys need it")
    presets = [text for text in overrides if _key_of(text) == _PRESET]
    return notes + ([_effect_of_preset(source, presets)] if presets else [])


def find_changes(before: Config, now: Config) -> list[str]:
    """Keys, by public names, whose values differ and can change the figures of a repeated step."""
    return [
        public_key(key)
        for key in changed_keys(before, now)
        if _is_read(key, now) and not _is_in(key, _WITHOUT_FIGURES)
    ]


def _key_of(override: str) -> str:
    return own_key(override.partition("=")[0].strip())


def _is_read(key: str, config: Config) -> bool:
    if _is_in(key, _OF_THE_SCHEDULE):
        return config.optimizer.lr_schedule != "constant"
    return _is_in(key, _READ) and not _is_in(key, (*_IN_THE_BATCH, *_NOT_OF_A_STEP))


def _is_in(key: str, sections: Sequence[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in sections)


def _is_possible(source: Path, overrides: Sequence[str]) -> bool:
    try:
        load_config(source, overrides)
    except ConfigError:
        return False
    return True


def _refusal(named: str, *, one: bool) -> str:
    return (
        f"{named} {'has' if one else 'have'} no effect on a replay: only the trainer runs, on the "
        "recorded batch, which has its completions, rewards, advantages, loss weights and "
        "minibatches. Keys with an effect are those of [model], [optimizer], [parallel], [train] "
        "about one step, and of [algorithm] about the loss. To try another value start a new run "
        "with `megatron-rl run`; `megatron-rl analyse lengths` reads the recorded rewards. For "
        "another folder give --out"
    )


def _effect_of_preset(source: Path, presets: Sequence[str]) -> str:
    """Which keys that a preset changes take effect. Raises InputError for none."""
    now = load_config(source, presets)
    changed = [
        key
        for key in changed_keys(load_config(source), now)
        if key.startswith("algorithm.") and key != _PRESET
    ]
    read = [public_key(key) for key in changed if _is_read(key, now)]
    unread = [public_key(key) for key in changed if public_key(key) not in read]
    given = presets[-1]
    if unread and not read:
        raise InputError(f"{given} changes only {', '.join(unread)}. {_refusal(given, one=True)}")
    text = f"note: {given} takes effect by {', '.join(read) or 'no key: the run has its values'}"
    if unread:
        text += f"; the recorded batch keeps its values of {', '.join(unread)}"
    return text
