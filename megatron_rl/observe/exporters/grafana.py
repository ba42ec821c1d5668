"""A Grafana dashboard and Prometheus alert rules for the exporter's metrics.

Used by `megatron-rl metrics dashboard` and `megatron-rl metrics alerts`.
"""

import json
from typing import Any, NamedTuple

from megatron_rl.observe.exporters.prometheus import LAST_ROW, PREFIX, SETTING

_WIDTH, _HEIGHT = 8, 7
_SOURCE = {"type": "prometheus", "uid": "${source}"}


class Panel(NamedTuple):
    """One plot; queries: expression by legend."""

    title: str
    unit: str
    queries: dict[str, str]


def _gauge(name: str, where: str = "") -> str:
    return f"{PREFIX}{name}{where}"


def _rate(name: str) -> str:
    return f"sum(rate({PREFIX}{name}_total[5m]))"


_TRAINER = '{source="trainer"}'
_STALENESS = f'{SETTING}{{key="queue.max_staleness"}}'
_BUSY, _IDLE = _rate("generator_busy_s"), _rate("generator_idle_s")
_ZERO_VARIANCE = f'increase({PREFIX}queue_groups_dropped_total{{what="zero_variance"}}[30m])'
_LEFT_OUT = f"{PREFIX}activity_completions_dropped_total"
_TRAINED = f"increase({PREFIX}queue_groups_trained_total[30m])"

PANELS = (
    Panel("Reward", "none", {"reward": _gauge("rollout_reward"), "{{what}}": _gauge("reward")}),
    Panel("Right and well-formed", "percentunit",
          {"right": _gauge("rollout_correct"), "well-formed": _gauge("rollout_format"),
           "cut": _gauge("rollout_truncated")}),
    Panel("Accuracy of evaluations", "percentunit", {"{{label}}": _gauge("eval_accuracy")}),
    Panel("Length of completions", "none", {"tokens": _gauge("rollout_length_tokens")}),
    Panel("Entropy of tokens, nats", "none", {"entropy": _gauge("train_entropy_nats", _TRAINER)}),
    Panel("Logprob gap, nats", "none",
          {"mean": _gauge("train_logprob_gap"), "p99": _gauge("train_mismatch_p99")}),
    Panel("Clipped tokens", "percentunit", {"all": _gauge("train_clip_fraction", _TRAINER)}),
    Panel("Gradient norm", "none", {"norm": _gauge("train_grad_norm", _TRAINER)}),
    Panel("Staleness, versions", "none",
          {"mean": _gauge("queue_staleness_versions_mean"),
           "largest": _gauge("queue_staleness_versions_max"), "queue.max_staleness": _STALENESS}),
    Panel("Seconds of a step", "s",
          {"update": _gauge("train_update_s", _TRAINER), "wait for a batch": _gauge("wait_batch_s"),
           "weight sync": _gauge("weight_sync_s")}),
    Panel("Idle share of generators", "percentunit",
          {"all": f"{_IDLE} / ({_IDLE} + {_BUSY})",
           "most idle one": _gauge("generator_idle_share_max")}),
    Panel("Tokens a second", "none",
          {"generated": _rate("activity_tokens"), "trained": _rate("train_padded_tokens")}),
    Panel("Dropped groups an hour", "none",
          {"{{what}}": f"sum by (what) (increase({PREFIX}queue_groups_dropped_total[1h]))"}),
    Panel("Left-out completions an hour", "none",
          {"{{what}}": f"sum by (what) (increase({_LEFT_OUT}[1h]))"}),
    Panel("Seconds since a role's last row", "s", {"{{source}}": f"time() - {LAST_ROW}"}),
)  # fmt: skip


class Alert(NamedTuple):
    """An alert rule; lasts: how long the expression must hold; text: what to do."""

    name: str
    expression: str
    lasts: str
    text: str


ALERTS = (
    Alert("StalenessAboveBound",
          f"{_gauge('queue_staleness_versions_mean')} > scalar({_STALENESS})", "10m",
          "Mean staleness is above queue.max_staleness: more generators, or shorter completions."),
    Alert("RoleStalled",
          f'time() - {LAST_ROW}{{source="trainer"}} > '
          f'scalar({SETTING}{{key="expert.train.batch_timeout_s"}})',
          "1m", "The trainer wrote no row for that long: see logs/ and the live view."),
    Alert("LogprobGapLarge", f"{_gauge('train_logprob_gap')} > 0.05", "10m",
          "Trainer and generators disagree on logprobs: weights, dtypes or sampling differ."),
    Alert("MostGroupsHaveZeroVariance", f"{_ZERO_VARIANCE} > 2 * ignoring(what) {_TRAINED}", "30m",
          "More than two of three groups have zero variance: prompts are too easy or too hard."),
    Alert("GradingFails",
          f"sum(rate({_LEFT_OUT}[10m])) > "
          f"0.1 * sum(rate({PREFIX}activity_rollouts_generated_total[10m]))",
          "10m", "A tenth of the completions gets no grade: see logs/verifier.log."),
    Alert("EffectiveSampleSmall",
          f"{_gauge('train_effective_sample_share', _TRAINER)} < 0.5", "10m",
          "Few tokens carry the steps: fresher data, or wider algorithm.correction bounds."),
    Alert("GeneratorDropped",
          f'{_gauge("weight_sync_generators")} < scalar({SETTING}{{key="generator.replicas"}})',
          "15m", "A generator takes no weight syncs: see logs/generator-*.log."),
    Alert("StepsSkipped", f"increase({PREFIX}train_skipped_steps_total{_TRAINER}[30m]) > 2", "0m",
          "Optimizer steps are skipped: a lower optimizer.lr; RUN holds the minibatches."),
)  # fmt: skip


def dashboard() -> str:
    """JSON that Grafana imports."""
    panels = [
        {
            "id": number,
            "type": "timeseries",
            "title": panel.title,
            "datasource": _SOURCE,
            "gridPos": {
                "x": number % 3 * _WIDTH, "y": number // 3 * _HEIGHT, "w": _WIDTH, "h": _HEIGHT,
            },
            "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend,
                 "datasource": _SOURCE}
                for i, (legend, query) in enumerate(panel.queries.items())
            ],
        }
        for number, panel in enumerate(PANELS)
    ]  # fmt: skip
    choice = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    whole: dict[str, Any] = {
        "title": "megatron-rl",
        "uid": "megatron-rl",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [choice]},
        "panels": panels,
    }
    return json.dumps(whole, indent=1) + "\n"


def alerts() -> str:
    """Rules for Prometheus; JSON is YAML."""
    rules = [
        {
            "alert": f"MegatronRl{alert.name}",
            "expr": alert.expression,
            "for": alert.lasts,
            "labels": {"severity": "warning"},
            "annotations": {"summary": alert.text},
        }
        for alert in ALERTS
    ]
    return json.dumps({"groups": [{"name": "megatron-rl", "rules": rules}]}, indent=1) + "\n"
