"""The text of a run's summary, at its end and in `megatron-rl report --text`."""

from collections import Counter
from typing import Any

from megatron_rl.observe.activity_text import ActivityTotals, groups_text, rollouts_text
from megatron_rl.observe.choice import (
    accuracy_text,
    choice_lines,
    difference_of,
    difference_text,
    prompts_text,
)
from megatron_rl.observe.summary import REWARD_STEPS, RunFacts
from megatron_rl.rollout_queue.diagnosis import reasons_text

_BEFORE, _AFTER, _BASELINE = "before", "after", "sft_baseline"
_TITLES = {_BEFORE: "before RL", _AFTER: "after RL", _BASELINE: "SFT baseline"}
_GRADED = "reason/graded"
"""Completions that a judge graded, in the summary's activity."""
_NOT_MEASURED = (None, None)


def render_text(summary: dict[str, Any], facts: RunFacts) -> str:
    """The text at the end of a run: numbers with standard errors, and paths."""
    lines = [*_accuracy_lines(summary, facts), "", *choice_lines(summary.get("cold_start"))]
    lines += [*_training_lines(summary, facts), ""]
    if restarts := summary.get("generator_restarts"):
        lines.append(f"Generators          died and were restarted {restarts} times")
    wall = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in summary["wall_s"].items())
    if wall:
        resumes = summary.get("resumes", 0)
        since = f" (since the latest of {resumes + 1} starts)" if resumes else ""
        lines.append(f"Time                {wall}{since}")
    lines.append(f"Trained model       {summary['hf_export'] or 'none was exported'}")
    if facts.files:
        lines.append(f"Everything else     {facts.run_dir}: {', '.join(facts.files)}")
    return "\n".join(lines)


def _accuracy_lines(summary: dict[str, Any], facts: RunFacts) -> list[str]:
    evaluations = _held_out_evaluations(summary)
    if not evaluations:
        return _set_lines(summary) or ["No evaluation was made."]
    how = "greedy" if facts.eval_temperature == 0 else f"sampled, T={facts.eval_temperature:g}"
    what = prompts_text(summary["eval_n"], is_held_out=True)
    lines = [f"Accuracy on {what} ({how}), with its standard error"]
    if ungraded := summary.get("eval_not_graded"):
        lines[0] += f"; {ungraded} completions could not be graded and count neither way"
    before = evaluations.get(_BEFORE, _NOT_MEASURED)
    for label, found in evaluations.items():
        change = "" if label == _BEFORE else _change(before, found, _BEFORE)
        measured = f"{accuracy_text(*found)}{_mean_reward(summary, 'evaluations', label)}"
        lines.append(f"  {_TITLES.get(label, label):17s} {measured}{change}")
    if _BASELINE in evaluations:
        lines.append(f"    (SFT baseline: {summary['sft_baseline']})")
        if _AFTER in evaluations:
            change = _change(evaluations[_BASELINE], evaluations[_AFTER], "SFT baseline")
            lines.append(f"  RL vs SFT baseline {change.strip()}")
    lines += _set_lines(summary)
    if facts.dataset_remark:
        lines.append(f"  cold start        {facts.dataset_remark}")
    return lines


def _held_out_evaluations(summary: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(accuracy, standard error) of each evaluation on held-out prompts, in order."""
    # Summaries of earlier releases lack this key.
    if (listed := summary.get("evaluations")) is not None:
        return {label: (found["accuracy"], found["se"]) for label, found in listed.items()}
    found = {
        _BEFORE: (summary["accuracy_before"], summary["accuracy_se_before"]),
        _AFTER: (summary["accuracy_after"], summary["accuracy_se_after"]),
        _BASELINE: (summary.get("sft_baseline_accuracy"), summary.get("sft_baseline_se")),
    }
    return {label: pair for label, pair in found.items() if pair[0] is not None}


def _mean_reward(summary: dict[str, Any], kind: str, label: str) -> str:
    """An evaluation's mean reward, where the accuracies may say little; else ""."""
    # Summaries of earlier releases lack these keys.
    listed = summary.get(kind, {})
    if (reward := listed.get(label, {}).get("reward")) is None:
        return ""
    is_flat = all(found["accuracy"] in (0, 1) for found in listed.values())
    is_graded = summary.get("turns_mean") is not None or _GRADED in summary.get("activity", {})
    return f", mean reward {reward:.3f}" if is_flat or is_graded else ""


def _set_lines(summary: dict[str, Any]) -> list[str]:
    sets = summary.get("evaluation_sets", {})
    lines = [
        f"  {label:17s} {accuracy_text(found['accuracy'], found['se'])} on "
        f"{prompts_text(found['n'])}{_mean_reward(summary, 'evaluation_sets', label)}"
        for label, found in sets.items()
    ]
    for name in ("pass", "maj"):
        for label, found in summary.get(f"{name}_at", {}).items():
            ks = [k for k in found if not k.endswith("_se")]
            texts = [f"{name}@{k} {accuracy_text(found[k], found.get(f'{k}_se'))}" for k in ks]
            lines.append(f"  {label:17s} {', '.join(texts)}")
    return lines


def _training_lines(summary: dict[str, Any], facts: RunFacts) -> list[str]:
    if not summary["steps"]:
        return _stepless_lines(summary)
    dropped = reasons_text(Counter(summary["groups_dropped"]))
    bound = "" if facts.strict_staleness else " for a typical rollout; a slow group may exceed it"
    return [
        f"RL steps            {summary['steps']}, {summary['rollouts_trained']} rollouts trained; "
        f"groups dropped: {dropped or 'none'}{_ungraded_text(summary)}",
        f"Mean reward         {_reward_text(summary)}",
        "Sampled accuracy    of all rollouts, zero-variance groups too: first fifth of the steps "
        f"{_number(summary.get('sampled_accuracy_first'))}, last fifth "
        f"{_number(summary.get('sampled_accuracy_last'))}",
        f"Staleness           mean {_number(summary['staleness_mean'], 2)}, "
        f"max {_number(summary['staleness_max'], 0)} (bound {summary['max_staleness']}{bound}); "
        f"{summary['rollouts_spanning_versions']} rollouts span two or more versions",
        f"Logprob gap         {_number(summary['logprob_gap_mean'], 5)} mean |trainer - generator|",
        *_conversation_lines(summary),
        f"Weight sync         {_number(summary['weight_sync_s_median'], 2)} s median",
        f"Idle                trainer {_percent(summary['trainer_idle_fraction'])}, "
        f"generators {_percent(summary['generator_idle_fraction'])}",
        f"Ran on              {summary['engine']} {summary['engine_version']}, megatron-core "
        f"{summary['megatron_core_version']}, {_ranks(summary['trainer_world_size'])} "
        f"(TP {summary['tp']}, PP {summary['pp']}, DP {summary['dp']}), "
        f"{_number(summary['model_parameters'], 0)} parameters",
    ]


def _reward_text(summary: dict[str, Any]) -> str:
    steps, first = summary["steps"], _number(summary["reward_first10"])
    if steps <= REWARD_STEPS:
        return f"{'the only step' if steps == 1 else f'all {steps} steps'} {first}"
    last = _number(summary["reward_last10"])
    return f"first {REWARD_STEPS} steps {first}, last {REWARD_STEPS} steps {last}"


def _conversation_lines(summary: dict[str, Any]) -> list[str]:
    # Summaries of earlier releases lack these keys.
    if summary.get("turns_mean") is None:
        return []
    return [
        f"Conversations       on average {summary['turns_mean']:.2f} replies, "
        f"{summary['given_tokens_mean']:.1f} given tokens, {summary['wait_s_mean']:.2f} s of "
        "waiting for the environment"
    ]


def _ranks(count: int) -> str:
    return "1 trainer rank" if count == 1 else f"{count} trainer ranks"


def _stepless_lines(summary: dict[str, Any]) -> list[str]:
    lines = ["No step of reinforcement learning was taken."]
    activity = ActivityTotals.of_counts(summary.get("activity", {}))
    if activity.count("rollouts_generated"):
        lines.append(f"Rollouts            {rollouts_text(activity)}")
    if activity.count("groups_complete") or summary.get("groups_dropped"):
        lines.append(f"Groups              {groups_text(activity)}")
    if summary.get("diagnosis"):
        lines.append(f"Likely fault        {summary['diagnosis']}")
    return lines


def _ungraded_text(summary: dict[str, Any]) -> str:
    # Summaries of earlier releases lack this key.
    ungraded = summary.get("completions_dropped")
    return f"; completions not graded: {reasons_text(Counter(ungraded))}" if ungraded else ""


def _change(start: tuple[Any, Any], end: tuple[Any, Any], name: str) -> str:
    difference, sigmas = difference_of(start, end)
    return "" if difference is None else f"   {difference_text(difference, sigmas, name)}"


def _number(value: float | None, digits: int = 3) -> str:
    return "not measured" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.0%}"
