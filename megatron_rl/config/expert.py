"""Keys of `[expert]`, which few runs need.

Used where a configuration is loaded, saved and explained. In the checked tree they are in their
sections: `expert.queue.max_attempts` is `config.queue.max_attempts`.
"""

import difflib
import fnmatch
from collections.abc import Iterator
from typing import Any

from megatron_rl.config.errors import ConfigError

EXPERT = "expert"
_WAITS = (
    "checkpoint.queue_timeout_s",
    "checkpoint.stop_timeout_s",
    "checkpoint.write_timeout_s",
    "eval.timeout_s",
    "generator.request_timeout_s",
    "generator.start_timeout_s",
    "nodes.end_timeout_s",
    "nodes.silence_timeout_s",
    "nodes.start_timeout_s",
    "queue.heartbeat_timeout_s",
    "queue.lease_timeout_s",
    "queue.score_patience_s",
    "queue.score_timeout_s",
    "scorer.answer_within_s",
    "scorer.request_timeout_s",
    "scorer.start_timeout_s",
    "train.batch_timeout_s",
    "train.collective_timeout_s",
    "verifier.answer_within_s",
    "weights.deadline_s",
    "weights.grace_s",
    "weights.join_timeout_s",
)
"""Deadlines; their defaults are multiplied by `run.patience`."""
_OTHERS = (
    "environments.*",
    "algorithm.advantage_estimator.temperature",
    "algorithm.gold.closing",
    "algorithm.gold.opening",
    "algorithm.policy_loss.max_log_ratio",
    "algorithm.shaping.bound",
    "algorithm.shaping.support",
    "algorithm.shaping.temperature",
    "algorithm.shaping.top_reward",
    "algorithm.shaping.value_lr",
    "curriculum.window_visits",
    "generator.deterministic",
    "generator.max_restarts",
    "generator.nice",
    "generator.overlap_schedule",
    "generator.restart_window_s",
    "generator.wait_for_weight_sync",
    "metrics.poll_s",
    "metrics.prometheus_host",
    "model.fp8_bf16_edge_layers",
    "model.fp8_parameters",
    "model.fusions",
    "model.layers",
    "nodes.leave_timeout_s",
    "nodes.spare",
    "nodes.wait_s",
    "optimizer.eps",
    "optimizer.skip_grad_norm",
    "parallel.context_exchange",
    "parallel.expert_exchange",
    "parallel.first_stage_layers",
    "parallel.last_stage_layers",
    "parallel.overlap_parameters",
    "parallel.overlap_tensor",
    "ports.batches",
    "ports.engine",
    "ports.label",
    "ports.nodes",
    "ports.prompts",
    "ports.scorer",
    "ports.sft",
    "ports.torchrun",
    "ports.verify",
    "ports.weights",
    "queue.breaker_*",
    "queue.ledger",
    "queue.max_attempts",
    "queue.max_failed_groups",
    "queue.max_lost_attempts",
    "queue.max_replacements",
    "queue.max_restarts",
    "queue.min_group_share",
    "queue.restart_window_s",
    "replay.max_age",
    "render.form_known",
    "render.history",
    "reward.accept_missing_unit",
    "reward.compile_s",
    "reward.host_patience",
    "reward.language_confidence",
    "reward.test_memory_bytes",
    "reward.unevaluated",
    "scorer.dtype",
    "scorer.judge",
    "scorer.max_restarts",
    "scorer.max_running",
    "scorer.nice",
    "scorer.restart_window_s",
    "sft.optimizer.eps",
    "sft.optimizer.skip_grad_norm",
    "sft.remark",
    "train.expandable_segments",
    "train.logprob_chunk_tokens",
    "train.max_mismatch",
    "train.max_restarts",
    "train.max_skipped_updates",
    "train.pad_microbatches",
    "train.record_tokens",
    "train.restart_window_s",
    "verifier.*.held_slow",
    "verifier.*.max_elapsed_s",
    "verifier.*.max_pending",
    "verifier.*.memory_bytes",
    "verifier.*.running_slow",
    "verifier.*.timeout_s",
    "verifier.max_restarts",
    "verifier.restart_window_s",
    "weights.bucket_bytes",
    "weights.folder",
    "weights.groups",
    "weights.overlap",
)


def is_expert(key: str) -> bool:
    """Whether a key of the checked tree is under `[expert]`."""
    return key in _WAITS or any(fnmatch.fnmatchcase(key, pattern) for pattern in _OTHERS)


def public_key(key: str) -> str:
    """The user's name of a key of the checked tree."""
    return f"{EXPERT}.{key}" if is_expert(key) else key


def own_key(key: str) -> str:
    """The key of the checked tree for a user's name.

    Raises ConfigError for an expert key without `expert.`, and for another key with it.
    """
    plain = key.removeprefix(f"{EXPERT}.")
    if key == plain and is_expert(plain):
        raise ConfigError(
            f"{key!r} is named {public_key(plain)!r}: rename it, or run `megatron-rl config "
            "migrate FILE`"
        )
    if plain.startswith(f"{EXPERT}.") and is_expert(inner := plain.removeprefix(f"{EXPERT}.")):
        raise ConfigError(f"{key!r} says '{EXPERT}' twice: name it {public_key(inner)!r}")
    if key != plain and not is_expert(plain):
        near = difflib.get_close_matches(plain, [*_WAITS, *_OTHERS], n=1)
        hint = f"; did you mean {public_key(near[0])!r}?" if near else ""
        raise ConfigError(f"[{EXPERT}] has no key {plain!r}{hint}")
    return plain


def without_expert(given: dict[str, Any]) -> dict[str, Any]:
    """A file's tree with the keys of `[expert]` in their sections.

    Raises ConfigError as `own_key` does, and if `expert` is no table.
    """
    found: dict[str, Any] = {}
    for path, value in _leaves(given):
        if path == (EXPERT,) and value != {}:
            raise ConfigError(f"{EXPERT} is a table, such as [expert.queue]; given: {value!r:.80}")
        if path[0] == EXPERT and value == {}:
            continue
        own_key(".".join(path))
        _place(found, path[1:] if path[0] == EXPERT else path, value)
    return found


def with_expert(tree: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `without_expert`, without empty tables."""
    found: dict[str, Any] = {}
    for path, value in _leaves(tree):
        if value != {}:
            _place(found, (EXPERT, *path) if is_expert(".".join(path)) else path, value)
    return found


def scaled_waits(patience: float, defaults: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """(key, seconds) of every deadline, from the defaults of the checked tree."""
    for path, value in _leaves(defaults):
        if (key := ".".join(path)) in _WAITS:
            yield key, patience * value


def _leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """(path, value) of a tree; lists and empty tables are values."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _place(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = value
