"""Flags of slime's launch scripts (train.py, train_async.py), without their --."""

import json
from collections.abc import Container
from typing import Any

from megatron_rl.config.foreign.rules import (
    COLOCATED,
    MEMORY,
    NOTHING,
    SCHEDULE,
    SCHEDULES,
    SPEED,
    Convert,
    NoCounterpart,
    Rule,
    Values,
    choice,
    clip,
    each,
    kl_in_loss,
    kl_penalty,
    lengths,
    needs,
    offload,
    only,
    positive,
    product,
    ratio,
    to,
    truncated,
)

_PARALLEL = "tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size"


def _minibatches(_: Any, values: Values) -> dict[str, Any]:
    """Optimizer steps of a rollout; global-batch-size counts completions."""
    if steps := values.get("num-steps-per-rollout"):
        return {"train.minibatches": steps}
    completions = product(values["rollout-batch-size"], values["n-samples-per-prompt"])
    return {"train.minibatches": ratio(completions, values["global-batch-size"], "minibatches")}


def _tokens(value: int, values: Values) -> dict[str, Any]:
    """A microbatch is shared by the context ranks."""
    return {"train.microbatch_tokens": product(value, values.get("context-parallel-size", 1))}


def _length(_: Any, values: Values) -> dict[str, Any]:
    prompt, context = (values.get(f"rollout-max-{name}-len") for name in ("prompt", "context"))
    return lengths(values["rollout-max-response-len"], prompt, context)


def _estimator(value: Any, values: Values) -> dict[str, Any]:
    group = "none" if values.get("disable-grpo-std-normalization") else "group"
    scale = {"grpo": group, "gspo": group, "cispo": group,
             "reinforce_plus_plus_baseline": "minibatch"}  # fmt: skip
    if value not in scale:
        raise NoCounterpart("`megatron-rl algorithms` lists estimators; there is no critic here")
    return {
        "algorithm.preset": "cispo" if value == "cispo" else "grpo",
        "algorithm.normalization.name": scale[value],
        "algorithm.aggregation.name": (
            "batch_tokens" if values.get("calculate-per-token-loss") else "sequence_mean"
        ),
        **({"algorithm.policy_loss.level": "sequence"} if value == "gspo" else {}),
    }


def _kl(_: Any, values: Values) -> dict[str, Any]:
    """A coefficient of 0 measures the KL without using it."""
    in_loss = values["kl-loss-coef"] if values.get("use-kl-loss") else 0
    if in_loss:
        return kl_in_loss("kl-loss-type", values.get("kl-loss-type", "k1"), in_loss)
    coefficient = values["kl-coef"]
    return kl_penalty("reward" if coefficient else "none", coefficient)


def _gpus(_: Any, values: Values) -> dict[str, Any]:
    trained = product(values["actor-num-nodes"], values["actor-num-gpus-per-node"])
    ranks = product(*(values.get(name, 1) for name in _PARALLEL.split()))
    found = {"parallel.data": ratio(trained, ranks, "parallel.data")}
    inferred = values.get("rollout-num-gpus") or (trained if values.get("colocate") else None)
    if inferred is None:
        raise NoCounterpart("needs rollout-num-gpus, or colocate")
    engine = values["rollout-num-gpus-per-engine"]
    found["generator.replicas"] = ratio(inferred, engine, "generator.replicas")
    return found | (COLOCATED if values.get("colocate") else {})


def _sets(value: Any, _: Values) -> dict[str, Any]:
    names = value if isinstance(value, list) else ["aime", value]
    pairs = zip(names[::2], names[1::2], strict=True)
    return {"eval.sets": [{"name": str(name), "prompts": {"path": path}} for name, path in pairs]}


def _prompts(value: Any, values: Values) -> dict[str, Any]:
    # The prompts of eval-prompt-data are held out instead.
    share = {"prompts.0.held_out_share": 0.0} if values.get("eval-prompt-data") else {}
    return {"prompts.0.path": value, **share}


def _column(ours: str) -> Convert:
    def rule(value: str, values: Values) -> dict[str, Any]:
        return {f"prompts.0.columns.{ours}": value} if values.get("prompt-data") else NOTHING

    return rule


def _schedule(value: str, values: Values) -> dict[str, Any]:
    if value not in SCHEDULES:
        raise NoCounterpart(SCHEDULE)
    least = values["min-lr"] / values["lr"]
    fall = {} if value == "constant" else {"optimizer.min_lr_ratio": least}
    return {"optimizer.lr_schedule": value, **fall}


def _wandb(key: str) -> Rule:
    def rule(value: Any, values: Values) -> dict[str, Any]:
        mode = str(values.get("wandb-mode", "online")).replace("disabled", "off")
        return {"metrics.wandb": mode, **({key: value} if key else {})}

    return needs("use-wandb", rule)


_REWARD = "a reward there; here [reward.tasks] and [[reward.extra]], see docs/extending.md"
_WEIGHTS = "the model's folder has the weights; `megatron-rl convert` reads Megatron checkpoints"
_QUEUE = "the queue asks for further groups by itself, and keeps unfinished ones"

RULES: dict[str, Rule] = {
    "train.py": lambda value, _: {"queue.max_staleness": 0},
    "train_async.py": lambda value, _: {"queue.max_staleness": 1},
    "hf-checkpoint": to("model.path"),
    **each("", "ref-load load ref-ckpt-step megatron-to-hf-mode", _WEIGHTS),
    "save": to("run.dir"),
    "save-interval": to("checkpoint.every_steps"),
    "max-actor-ckpt-to-keep": to("checkpoint.keep_last"),
    "save-hf": "checkpoint.export_every_steps exports models",
    "prompt-data": _prompts,
    "input-key": _column("question"),
    "label-key": _column("answer"),
    "apply-chat-template": only(True, "the tokenizer's template is always used here"),
    "apply-chat-template-kwargs": lambda value, _: {
        "render.chat_template_kwargs": json.loads(value)
    },
    "rollout-shuffle": only(True, "prompts are always shuffled here"),
    "rollout-seed": to("run.seed"),
    "seed": "run.seed seeds everything here",
    "num-rollout": to("train.steps"),
    "num-epoch": lambda value, values: (
        NOTHING if values.get("num-rollout") else {"train.epochs": value}
    ),
    "rollout-batch-size": to("train.prompts_per_batch"),
    "n-samples-per-prompt": to("train.group_size"),
    "global-batch-size": _minibatches,
    "num-steps-per-rollout": _minibatches,
    "use-dynamic-batch-size": only(True, "microbatches are always packed by tokens here"),
    "max-tokens-per-gpu": needs("use-dynamic-batch-size", _tokens),
    "balance-by-flops": choice("train.packing", {True: "flops"}, "train.packing is flops"),
    **dict.fromkeys(
        (f"rollout-max-{name}-len" for name in ("response", "prompt", "context")), _length
    ),
    "rollout-temperature": to("sampling.temperature"),
    "rollout-top-p": to("sampling.top_p"),
    "rollout-top-k": to("sampling.top_k", positive),
    "rollout-stop": to("sampling.stop", lambda value: [value] if isinstance(value, str) else value),
    **each("", "over-sampling-batch-size partial-rollout buffer-* mask-offpolicy*", _QUEUE),
    "dynamic-sampling-filter-path": to(
        "algorithm.zero_variance_groups",
        lambda value: "drop" if "check_reward_nonzero_std" in value else "keep",
    ),
    "eval-interval": to("eval.every_steps"),
    "eval-prompt-data": _sets,
    "n-samples-per-eval-prompt": to("eval.samples"),
    "eval-max-response-len": to("eval.max_new_tokens"),
    "eval-temperature": lambda value, values: {
        "eval.temperature": values["rollout-temperature"] if value is None else value
    },
    "eval-top-p": to("eval.top_p"),
    "eval-top-k": to("eval.top_k", positive),
    "skip-eval-before-train": only(False, "a run evaluates before it trains"),
    "advantage-estimator": _estimator,
    **dict.fromkeys(
        ("disable-grpo-std-normalization", "calculate-per-token-loss"),
        lambda value, values: _estimator(values["advantage-estimator"], values),
    ),
    "normalize-advantages": lambda value, values: (
        _estimator(values["advantage-estimator"].replace("grpo", ""), values)
    ),
    **dict.fromkeys(("use-kl-loss", "kl-loss-coef", "kl-loss-type", "kl-coef"), _kl),
    "entropy-coef": to("algorithm.entropy.coefficient"),
    **dict.fromkeys(
        ("eps-clip", "eps-clip-high"),
        lambda _, values: clip(values["eps-clip"], values.get("eps-clip-high")),
    ),
    "eps-clip-c": to("algorithm.policy_loss.dual_clip"),
    **dict.fromkeys(
        ("use-tis", "tis-clip"),
        needs("use-tis", lambda _, values: truncated(values.get("tis-clip", 2.0))),
    ),
    "tis-clip-low": only(0, "algorithm.correction has an upper bound"),
    "use-rollout-logprobs": choice("algorithm.policy_loss.old_logprobs", {True: "generator"}, ""),
    "use-rollout-routing-replay": to("train.router_replay"),
    "gamma": only(1.0, "tokens are not discounted here"),
    "optimizer": only("adam", "AdamW trains here"),
    "lr": to("optimizer.lr"),
    "lr-decay-style": _schedule,
    "min-lr": lambda value, values: _schedule(values["lr-decay-style"], values),
    "lr-warmup-iters": to("optimizer.warmup_steps"),
    "weight-decay": to("optimizer.weight_decay"),
    "adam-beta1": to("optimizer.beta1"),
    "adam-beta2": to("optimizer.beta2"),
    "clip-grad": to("optimizer.clip_grad_norm"),
    "optimizer-cpu-offload": offload,
    "tensor-model-parallel-size": to("parallel.tensor"),
    "pipeline-model-parallel-size": to("parallel.pipeline"),
    "context-parallel-size": to("parallel.context"),
    "expert-model-parallel-size": to("parallel.expert"),
    "expert-tensor-parallel-size": to("parallel.expert_tensor"),
    "sequence-parallel": lambda value, values: (
        {"parallel.sequence": value} if values.get("tensor-model-parallel-size", 1) > 1 else NOTHING
    ),
    "recompute-granularity": to("model.recompute"),
    **dict.fromkeys(
        ("actor-num-nodes", "actor-num-gpus-per-node", "rollout-num-gpus", "colocate"), _gpus
    ),
    "rollout-num-gpus-per-engine": to("generator.tensor_parallel"),
    "num-gpus-per-node": "parallel.data and generator.replicas say how many GPUs there are",
    "sglang-mem-fraction-static": MEMORY,
    "sglang-max-running-requests": to("generator.max_running"),
    "sglang-*": "generator.extra_args takes options of SGLang, without sglang-",
    "use-wandb": _wandb(""),
    "wandb-mode": _wandb(""),
    "wandb-project": _wandb("metrics.wandb_project"),
    "wandb-group": _wandb("metrics.wandb_group"),
    "wandb-team": _wandb("metrics.wandb_entity"),
    "use-tensorboard": to("metrics.tensorboard"),
    **each("", "wandb-* tb-*", "metrics.wandb* and metrics.tensorboard"),
    **each("", "rm-* custom-rm-path reward-key eval-reward-key group-rm", _REWARD),
    **dict.fromkeys(("attention-dropout", "hidden-dropout"), only(0.0, "there is no dropout here")),
    "${*": "the shape of the model, which its config.json tells here",
    **each("", "balance-data recompute-* micro-batch-size attention-* accumulate-* moe-* offload* "
        "no-* log-probs-* use-precision-aware-optimizer overlap-* use-distributed-optimizer "
        "update-weight-* train-backend deterministic-mode use-fault-tolerance rollout-health-* "
        "distributed-* use-slime-router router-* train-memory-margin-bytes make-vocab-*", SPEED),
}  # fmt: skip
DEFAULTS: dict[str, Any] = {
    "n-samples-per-prompt": 1,
    "actor-num-nodes": 1,
    "actor-num-gpus-per-node": 8,
    "rollout-num-gpus-per-engine": 1,
    "rollout-temperature": 1.0,
    "n-samples-per-eval-prompt": 1,
    "eval-temperature": None,
    "advantage-estimator": "grpo",
    "eps-clip": 0.2,
    "kl-coef": 0.0,
    "kl-loss-coef": 0.0,
    "lr": 1e-6,
    "lr-decay-style": "linear",
    "min-lr": 0.0,
    "lr-warmup-iters": 0,
    "weight-decay": 0.01,
    "adam-beta2": 0.999,
    "dynamic-sampling-filter-path": "",
    "input-key": "input",
}


def checks(values: Values, given: Container[str]) -> list[str]:
    """What a reader of our file must decide. given: our keys that it gives."""
    found = ["reward.tasks: slime chooses a reward by rm-type; `megatron-rl data show` tells ours"]
    if "algorithm.policy_loss.old_logprobs" not in given:
        found.append(
            "algorithm.policy_loss.old_logprobs: slime recomputes them; the default takes the "
            "engine's"
        )
    return found
