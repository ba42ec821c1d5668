"""Every metric of a run: meaning, healthy range, and fix.

Used by the exporter (counts and gauges), by warnings, and by `megatron-rl metrics table`, which
prints docs/metrics.md. A `*` in a name stands for any ending, such as a reason.
"""

import re
from typing import Literal, NamedTuple

from megatron_rl.rollout_queue.drop_reasons import GROUP_REASONS

Kind = Literal["gauge", "count"]


class Entry(NamedTuple):
    name: str
    meaning: str
    """Meaning and unit."""
    healthy: str = ""
    fix: str = ""
    """What to do about an unhealthy value."""
    kind: Kind = "gauge"
    """count: a row has the increase since the row before."""
    zero_beside: str = ""
    """Of a count that is left out where it is 0: a metric that all of these rows have. "": a count
    in every row of its source, or in rows of its own."""


_STEP, _BATCH = "rollout/reward", "queue/groups_trained"
ROLLOUTS = (
    Entry("rollout/reward", "mean reward of all rollouts of the step, zero-variance groups too",
          "grows", "look at reason/* and at reward/*: which part does not grow?"),
    Entry("rollout/correct", "share of correct rollouts of the step", "grows"),
    Entry("rollout/format", "share of rollouts that pass the format check",
          "near 1 after some steps",
          "reason/* names the fault; let prompts ask for the form, or teach it by a cold start"),
    Entry("rollout/length_tokens", "mean completion length in tokens",
          "grows slowly where thinking pays", "see rollout/truncated"),
    Entry("rollout/truncated", "share of rollouts cut at the length limit", "below 0.1",
          "raise sampling.max_new_tokens and generator.context_tokens"),
    Entry("reward/*", "mean of a part of the reward: correct, format, length, language, your own"),
    Entry("reason/*", "rollouts of the step by the reason of their score", kind="count",
          zero_beside=_STEP),
    Entry("environment/turns", "mean replies of a conversation with an environment"),
    Entry("environment/given_tokens", "mean tokens of a conversation that its environment or the "
          "chat template gave, without loss"),
    Entry("environment/wait_s", "mean seconds in which a conversation waited for its environment",
          "a small share of the time of its replies",
          "raise expert.environments.max_episodes, or make the environment faster"),
    Entry("environment/cached_share", "share of the tokens before later replies of conversations "
          "that the engine had in its cache", "above 0.8",
          "raise generator.kv_tokens, or lower expert.environments.max_episodes"),
    Entry("task/*", "reward, accuracy, reasons and environment of the rollouts of one task, where "
          "a step has several: task/NAME/rollout/correct"),
)  # fmt: skip

QUEUE = (
    Entry("queue/groups_trained", "groups of the batch", "train.prompts_per_batch", kind="count"),
    Entry("queue/rollouts_trained", "rollouts of the batch", kind="count"),
    Entry("queue/groups_dropped_*", "groups that were not trained on, by reason",
          "zero_variance: below 2 for each trained group; others: 0", "zero_variance: prompts are "
          "too easy or too hard, see [curriculum] and `megatron-rl data difficulty`; others: logs "
          "of generators and verifiers", "count", _BATCH),
    Entry("queue/completions_dropped_*", "completions that were left out, by reason", "0",
          "logs/verifier.log; not_graded: more verifier.*.workers, or less on the node", "count",
          _BATCH),
    Entry("queue/messages_turned_away", "rejected messages of processes of another phase or start "
          "of the run", "0", "end processes of an earlier job; logs/queue.log names them", "count"),
    Entry("queue/messages_refused", "unreadable, unexpected or faulty messages; their sender "
          "loses its leases, and after each 100 of them its process ends", "0",
          "logs/queue.log names the sender, which may run another release", "count"),
    Entry("queue/loop_stalled_s", "seconds in which the queue's loop stalled; they do not count as "
          "silence of other processes", "0",
          "a slow disk under the run folder, or an overloaded node", "count"),
    Entry("queue/token_files_not_removed",
          "token files that could not be removed (queue.keep_tokens_of_steps)", "0",
          "logs/queue.log names them: permissions, or a full disk?", "count"),
    Entry("queue/groups_abandoned", "groups abandoned at the end of training", kind="count"),
    Entry("queue/staleness_versions_mean", "policy versions between the first sampled token of a "
          "completion and training, mean",
          "below queue.max_staleness", "more generators, or a lower queue.max_staleness"),
    Entry("queue/staleness_versions_max", "policy versions between sampling and training, largest",
          "with queue.strict_staleness at most queue.max_staleness",
          "strict_staleness=true, or shorter completions"),
    Entry("queue/rollouts_spanning_versions", "rollouts of the batch that were sampled under "
          "several versions", "most, once completions are long; this is no fault", kind="count"),
    Entry("queue/stage", "number of the stage of [[stages]]"),
    Entry("queue/groups_learning_gold", "groups of the batch that train on the reference answer",
          kind="count", zero_beside=_BATCH),
    Entry("queue/replayed_groups", "replayed groups of the batch", kind="count"),
    Entry("queue/replayed_rollouts", "rollouts of the replayed groups", kind="count"),
    Entry("queue/replayed_reward", "mean reward of replayed rollouts"),
    Entry("queue/replayed_age_versions_mean", "versions between sampling and replay, mean"),
    Entry("queue/replayed_age_versions_max", "largest of these ages", "below expert.replay.max_age",
          "a shorter replay.buffer_groups"),
    Entry("queue/replay_groups", "groups in the replay buffer"),
    Entry("queue/replay_left_out_*", "groups of files excluded from replay, by reason"),
    Entry("curriculum/prompts_active", "prompts that are drawn", "many more than a batch holds",
          "more prompts, or a later curriculum.retire_after"),
    Entry("curriculum/prompts_retired", "retired prompts, which were always solved"),
    Entry("curriculum/prompts_admitted", "prompts of the admitted difficulty bands"),
    Entry("curriculum/prompts_readmitted", "retired prompts admitted again, for lack of others"),
    Entry("curriculum/bands_admitted", "admitted difficulty bands"),
)  # fmt: skip

TRAINER = (
    Entry("train/loss", "loss; its absolute value means little"),
    Entry("train/entropy_nats", "mean entropy of tokens in nats", "stays above 0.1, without a jump",
          "falls: a higher algorithm.policy_loss.eps_high, an entropy bonus"),
    Entry("train/grad_norm", "norm of the gradient before clipping",
          "of the order of optimizer.clip_grad_norm", "jumps: a lower optimizer.lr"),
    Entry("train/lr", "learning rate"),
    Entry("train/advantage_mean", "mean advantage of tokens", "near 0"),
    Entry("train/advantage_std", "standard deviation of the advantages", "near 1; 0: no learning"),
    Entry("train/clip_fraction", "share of tokens without gradient because of clipping",
          "below 0.2", "fewer train.minibatches, a lower queue.max_staleness or optimizer.lr"),
    Entry("train/clip_fraction_low", "share of tokens clipped at the lower bound"),
    Entry("train/clip_fraction_high", "share of tokens clipped at the upper bound"),
    Entry("train/logprob_gap", "mean |trainer - generator logprob| of fresh tokens, in nats",
          "below 0.01 in float32, below 0.05 in bfloat16", "different weights, dtypes or sampling "
          "settings on both sides; expert.train.max_mismatch stops"),
    Entry("train/logprob_gap_tokens", "tokens of train/logprob_gap", kind="count"),
    Entry("train/mismatch_p99", "99th percentile of |trainer - generator logprob|, from a "
          "histogram whose bins are 2.3 % wide; a step has the largest of its minibatches",
          "below 0.5"),
    Entry("train/mismatch_k1", "estimate of KL(generator, trainer), k1", "near 0"),
    Entry("train/mismatch_k2", "estimate of KL(generator, trainer), k2", "near 0"),
    Entry("train/mismatch_k3", "estimate of KL(generator, trainer), k3", "below 0.001"),
    Entry("train/mismatch_outside_clip", "share of fresh tokens outside the clip range at the "
          "start", "below 0.01", "as for train/logprob_gap"),
    Entry("train/correction_changed", "share of tokens with a truncated or masked ratio",
          "below 0.05", "fresher data, or wider algorithm.correction bounds"),
    Entry("train/behaviour_ratio_mean", "mean ratio of algorithm.correction", "near 1"),
    Entry("train/effective_sample_share", "(sum r)^2 / (n sum r^2) of the correction's ratios r",
          "above 0.5", "few tokens carry the step: fresher data"),
    Entry("train/reference_k1", "estimate of KL(policy, reference) a token, k1"),
    Entry("train/reference_k3", "the same, k3"),
    Entry("train/reference_kl", "KL(policy, reference) over the whole vocabulary, in nats"),
    Entry("train/gold_logprob", "mean logprob of tokens of reference answers", "grows"),
    Entry("train/gold_tokens", "tokens of reference answers", kind="count"),
    Entry("train/value_mean", "mean value of prompts, learned or soft", "near the mean reward",
          "learned: raise expert.algorithm.shaping.value_lr"),
    Entry("train/soft_value_effective_share",
          "(sum u)^2 / (n sum u^2) of the terms of a group's soft value, mean", "above 0.2",
          "few completions estimate the value: a larger beta or group, or fresher data"),
    Entry("train/skipped_steps", "optimizer steps that were skipped", "0",
          "look for NaN in your own rewards and functions, lower optimizer.lr; after "
          "expert.train.max_skipped_updates in a row RUN/skipped has the last minibatch", "count"),
    Entry("train/exploded_steps", "optimizer steps skipped above expert.optimizer.skip_grad_norm",
          "0", "as for train/skipped_steps", "count"),
    Entry("train/padded_tokens", "positions of all microbatches, padding too: the tokens of each "
          "sequence with its prompt. Where a group's prompt is computed once, it counts for each "
          "member, and the last token of a sequence, which is only predicted, does not count",
          kind="count"),
    Entry("train/filling_share", "share of all computed positions that fill microbatches up "
          "(expert.train.pad_microbatches)", "below 0.05",
          "a larger train.microbatch_tokens; `megatron-rl plan` says what it costs"),
    Entry("train/tokens_per_s", "positions per second of a trainer rank's update"),
    Entry("train/tokens_per_s_per_gpu",
          "positions per second of all data-parallel replicas, divided by trainer ranks"),
    Entry("train/mfu", "FLOPs of the model over the peak of the trainer's GPUs during updates; "
          "only where their peak is known", "above 0.3 for dense models",
          "`megatron-rl plan`; train.profile_steps shows what takes the time"),
    Entry("train/update_s", "seconds of the step's updates"),
    Entry("train/optimizer_s", "seconds of the optimizer within the updates"),
    Entry("wait/batch_s", "seconds that the trainer waited for the batch",
          "far below train/update_s", "more generators; `megatron-rl plan`"),
    Entry("wait/reference_s", "seconds that the trainer waited for the reference's logprobs, where "
          "an engine holds it", "far below train/update_s", "a larger expert.scorer.max_running or "
          "scorer.tensor_parallel"),
    Entry("scorer/requests", "sequences of the step that the trainer's first data-parallel "
          "replica sent to the scorer", kind="count"),
    Entry("scorer/tokens", "tokens of these sequences", kind="count"),
    Entry("scorer/asked_again", "requests repeated after 10 s without an answer", "0",
          "the engine is slow, or was started again: logs/scorer-0.log", "count"),
    Entry("checkpoint/stall_s", "seconds that the trainer waited for a checkpoint",
          "below a second"),
    Entry("checkpoint/write_s", "seconds until the checkpoint was on disk",
          "below the seconds between checkpoints", "a faster disk, or a larger every_steps"),
    Entry("checkpoint/bytes", "size of the checkpoint in bytes"),
    Entry("model/parameters", "parameters of the policy"),
    Entry("trainer/*", "number of trainer ranks and their parallel sizes"),
)  # fmt: skip

WEIGHT_SYNC = (
    Entry("weight_sync/s", "seconds that the trainer waited for a weight sync",
          "far below train/update_s", "compare with weight_sync/transfer_s; docs/weights.md"),
    Entry("weight_sync/pause_s", "longest pause of a generator, in seconds",
          "near weight_sync/transfer_s", "the engine answers slowly: its log"),
    Entry("weight_sync/release_s",
          "seconds until all engines had released their memory (generator.release_memory)",
          "far below train/update_s", "an engine answers slowly: its log; docs/nodes.md"),
    Entry("weight_sync/reclaim_s", "seconds until engines had reclaimed memory before a weight "
          "sync", "far below train/update_s", "an engine answers slowly: its log"),
    Entry("weight_sync/transfer_s", "longest transfer, in seconds"),
    Entry("weight_sync/wire_mb", "payload in megabytes; of files with weights.method folder"),
    Entry("weight_sync/peak_extra_mb", "buffers of an engine rank in megabytes"),
    Entry("weight_sync/generators", "generators that have the version", "generator.replicas",
          "logs/generator-*.log"),
    Entry("weight_sync/dropped_generators", "generators dropped since the start", "0",
          "logs/generator-*.log"),
    Entry("weight_sync/damaged_parcels", "parcels with a wrong digest", "0",
          "memory or network is faulty"),
    Entry("generator/busy_s", "seconds in which engines had work, summed over generators",
          kind="count"),
    Entry("generator/idle_s", "seconds in which engines had no work, summed",
          "a tenth of busy_s at most",
          "the trainer is the limit: fewer generators, or a larger queue.max_staleness", "count"),
    Entry("generator/tokens", "tokens of finished completions by the latest heartbeats of "
          "generators, so the sum of a run lacks its end; activity/tokens is exact", kind="count"),
    Entry("generator/running", "completions in flight by the latest heartbeats of all generators"),
    Entry("generator/running_max", "completions in flight of the fullest generator"),
    Entry("generator/reporting", "generators counted in the row", "peers/generators"),
    Entry("generator/turns", "replies in conversations with environments", kind="count",
          zero_beside="generator/busy_s"),
    Entry("generator/conversations", "open conversations with environments"),
    Entry("generator/conversations_in_environment", "open conversations that wait for their "
          "environment, or for a place for it; the others wait for the engine",
          "a small share of generator/conversations",
          "raise expert.environments.max_episodes, or make the environment faster"),
    Entry("generator/idle_share_max", "idle share of the most idle generator"),
    Entry("generator/busy_tokens_per_s_min", "finished tokens per busy second of the slowest "
          "generator, which generator/slowest names", "", "that generator's log and node"),
    Entry("generator/unfinished_s_max", "seconds for which a generator, which "
          "generator/longest_unfinished names, has had work and finished nothing",
          "below the time of a long completion", "that generator's log and node"),
    Entry("launch/queue_restarts", "restarts of the rollout queue after a kill", "0",
          "logs/queue.log", "count"),
    Entry("launch/trainer_restarts", "restarts of the trainer after a kill of a rank, or the "
          "loss of its node", "0",
          "logs/trainer*", "count"),
    Entry("launch/scorer_restarts", "restarts of a scorer that died", "0", "logs/scorer-0*.log",
          "count"),
    Entry("launch/generator_restarts", "restarts of a generator that died", "0",
          "logs/generator-*.log", "count"),
    Entry("launch/follower_restarts", "restarts of another node's part of an engine", "0",
          "logs/generator-*-node-*.log", "count"),
    Entry("launch/verifier_restarts", "restarts of a verifier that died", "0", "logs/verifier*.log",
          "count"),
    Entry("launch/nodes", "nodes of the run with joined ones, at a resume and after each change",
          "", "logs/launch-node-*.log"),
    Entry("peers/generators", "generators that the queue hears", "peers/generators_wanted",
          "peers/missing names the others: their logs"),
    Entry("peers/generators_wanted", "generators of the run"),
    Entry("peers/verifiers", "verifiers that the queue hears", "peers/verifiers_wanted",
          "peers/missing names the others: their logs"),
    Entry("peers/verifiers_wanted", "most verifiers that the queue has heard at once"),
    Entry("peers/missing", "names of processes that the queue no longer hears"),
    Entry("peers/waits", "what each process does or waits for, behind its name and the seconds "
          "since when", "", "`megatron-rl status` shows it; a long wait: that process's log"),
    Entry("launch/chosen_step", "chosen step of the cold start"),
    Entry("launch/resumed", "the run resumes from a checkpoint", kind="count"),
    Entry("launch/ledger_continued", "the queue continues the ledger of the launcher before it",
          kind="count"),
)  # fmt: skip


def _activity(name: str, meaning: str, healthy: str = "", fix: str = "") -> Entry:
    return Entry(f"activity/{name}", meaning, healthy, fix, "count", "activity/seconds")


ACTIVITY = (
    Entry("activity/seconds", "seconds covered by the row", kind="count"),
    _activity("rollouts_generated", "completions that generators returned"),
    _activity("rollouts_scored", "completions that were scored"),
    _activity("rollouts_for_evaluation", "scored completions of evaluations"),
    _activity("tokens", "tokens of the completions"),
    Entry("activity/completions_in_flight", "completions that generators hold"),
    _activity("groups_complete", "groups that were completed"),
    _activity("reason/*", "well-formed completions by the reason of their score"),
    _activity("format_failures/*", "completions that fail the format check, by reason"),
    _activity("attempts_failed/*", "failed attempts at completions, by what failed: engine; "
              "crash, hang, flood, start, exception, bad_outcome, judge: the environment", "0",
              "logs/generator-*.log; logs/environments-*.log"),
    _activity("groups_dropped/*", "groups that were dropped, by reason"),
    _activity("completions_dropped/*", "completions left out, by reason", "0",
              "as for queue/completions_dropped_*"),
)  # fmt: skip

EVALUATION = (
    Entry("eval/accuracy", "mean over problems of the share of right completions (avg@n)", "grows"),
    Entry("eval/accuracy_se", "standard error of the accuracy, over problems; absent for one "
          "problem"),
    Entry("eval/pass_at_*", "pass@k, and its standard error (_se), absent for one problem"),
    Entry("eval/maj_at_*", "maj@k, and its standard error (_se), absent for one problem"),
    Entry("eval/completions_done",
          "completions of the current evaluation that are done: scored, or cannot be scored"),
    Entry("eval/completions_wanted", "completions of the current evaluation, all its sets"),
    Entry("eval/running", "label of the current evaluation; a text, so no gauge"),
    Entry("eval/n", "evaluated problems with a verdict"),
    Entry("eval/lost", "problems without a verdict", "0", "rollouts/dropped_eval_LABEL.jsonl"),
    Entry("eval/not_graded", "completions that could not be graded", "0", "logs/verifier.log"),
    Entry("eval/without_classes", "problems without countable votes", "0"),
    Entry("eval/format", "share of well-formed completions"),
    Entry("eval/length_tokens", "mean completion length in tokens"),
    Entry("eval/reward", "mean reward"),
    Entry("eval/seconds", "duration in seconds"),
    Entry("eval/oldest_version", "oldest policy version that sampled a completion", "the step"),
    Entry("eval/newest_version", "newest policy version that sampled a completion", "the step"),
)  # fmt: skip

AREAS: dict[str, tuple[Entry, ...]] = {
    "Rollouts of a step": ROLLOUTS,
    "Rollout queue": QUEUE,
    "Trainer": TRAINER,
    "Syncing and generators": WEIGHT_SYNC,
    "Activity, every few seconds": ACTIVITY,
    "Evaluations": EVALUATION,
}
_PAGE = """\
# Metrics

Every row of `RUN/metrics.jsonl` is a JSON object with `time` (seconds since 1970), `source` (the
role that wrote it) and `step`: the step for `trainer` and `sft`, else the newest policy version.
Evaluations also have a `label`. `megatron-rl metrics table` prints this page.
A row leaves out a count of the kind "count, 0 if absent" where it is 0.

Other programs get the same rows by `[metrics]` while a run is running, or by
`megatron-rl metrics export RUN` afterwards (with `--out FOLDER`, to that folder in place of RUN):

- `metrics.tensorboard = true`: event files in `RUN/tensorboard`, a TensorBoard run for each role;
  `tensorboard --logdir RUN/tensorboard`.
- `metrics.wandb = "offline"` or `"online"`: Weights & Biases (`pip install wandb`); offline in
  `RUN/wandb`, for `wandb sync`. `wandb_project`, `wandb_entity`, `wandb_name`, `wandb_group` and
  `wandb_tags` name the W&B run. Metrics have the names below, for the cold start with their source
  in front (`sft/loss`). A resumed run continues its W&B run, which keeps both values of a step that
  it repeats.
- `metrics.prometheus_port = 9400`: `http://127.0.0.1:9400/metrics`;
  `expert.metrics.prometheus_host` sets another address. Every host that reaches it can read them.

On several nodes the exporter runs on node 0. Its failure does not end the run (`logs/metrics.log`).

A Prometheus name is `megatron_rl_` and the metric's name, with `_` in place of other signs.
Metrics of kind count become counters (`_total`). The text for `*` becomes the label `what`. Every
sample has the label `source`; samples of evaluations also have `label`.
`megatron_rl_last_row_time_seconds` is when a role last wrote, `megatron_rl_setting` what alerts
compare with. `megatron-rl metrics dashboard` prints a dashboard for Grafana, and
`megatron-rl metrics alerts` rules for Prometheus.
"""


def markdown() -> str:
    """The page docs/metrics.md."""
    parts = [_PAGE]
    for area, metrics in AREAS.items():
        rows = [
            f"| `{m.name}` | {m.meaning} | {m.kind}{', 0 if absent' if m.zero_beside else ''} | "
            f"{m.healthy} | {m.fix} |"
            for m in metrics
        ]
        head = "| metric | meaning | kind | healthy | what to do |\n|---|---|---|---|---|"
        parts.append(f"## {area}\n\n{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


_PLAIN = {entry.name: entry for area in AREAS.values() for entry in area if "*" not in entry.name}
_PATTERNS = [
    (re.compile(re.escape(entry.name).replace(r"\*", "(.+)")), entry)
    for area in AREAS.values()
    for entry in area
    if "*" in entry.name
]


def find(name: str) -> tuple[Entry, str] | None:
    """The documented metric of a name, and the text for its `*`; None if unknown."""
    if name in _PLAIN:
        return _PLAIN[name], ""
    for pattern, entry in _PATTERNS:
        if match := pattern.fullmatch(name):
            return entry, match[1]
    return None


def zero_beside(name: str) -> str:
    """A metric whose rows leave out the count `name` where it is 0; "" for another metric."""
    of_task = re.fullmatch(r"(task/.+/)(\w+/[^/]+)", name)
    prefix, own = of_task.groups() if of_task else ("", name)
    found = find(own)
    return prefix + found[0].zero_beside if found and found[0].zero_beside else ""


def is_known(name: str) -> bool:
    """Whether a run may write the metric: False where the text for its `*` may be misspelt."""
    found = find(name)
    return found is not None and (not found[1] or found[1] in GROUP_REASONS)
