"""Converts values of verl to ours. Used by the table in `verl.py`."""

from typing import Any

from megatron_rl.config.foreign.rules import (
    COLOCATED,
    NOTHING,
    NoCounterpart,
    Rule,
    Values,
    check_kl_in_loss,
    kl_penalty,
    lengths,
    needs,
    product,
    ratio,
    set_name,
    to,
    truncated,
)

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
CORRECTION = "algorithm.rollout_correction"
_TEMPLATE = "data.apply_chat_template_kwargs."


def context(_: Any, values: Values) -> dict[str, Any]:
    return lengths(values["data.max_response_length"], values["data.max_prompt_length"])


def prompt(value: Any, values: Values) -> dict[str, Any]:
    return {"generator.context_tokens": value + values["data.max_response_length"]}


def sources(value: Any, values: Values) -> dict[str, Any]:
    paths = value if isinstance(value, list) else [value]
    # The prompts of val_files are held out instead.
    share = {"held_out_share": 0.0} if values.get("data.val_files") else {}
    return {"prompts": [{"path": str(path), **share} for path in paths]}


def template_kwargs(_: Any, values: Values) -> dict[str, Any]:
    """All of them, whichever of them is asked for."""
    given = {k.removeprefix(_TEMPLATE): v for k, v in values.items() if k.startswith(_TEMPLATE)}
    return {"render.chat_template_kwargs": given}


def prompt_key(value: Any, values: Values) -> dict[str, Any]:
    if value == "prompt":
        return NOTHING
    files = values["data.train_files"]
    count = len(files) if isinstance(files, list) else 1
    return {"prompts": [{"columns": {"question": value}}] * count}


def sets(value: Any, _: Values) -> dict[str, Any]:
    paths = [str(path) for path in (value if isinstance(value, list) else [value])]
    return {"eval.sets": [{"name": set_name(p), "prompts": {"path": p}} for p in paths]}


def estimator(value: Any, values: Values) -> dict[str, Any]:
    advantages = {"grpo": "group_mean", "rloo": "leave_one_out",
                  "reinforce_plus_plus_baseline": "group_mean"}  # fmt: skip
    value = str(value).removesuffix("_vectorized")
    if value not in advantages:
        raise NoCounterpart("`megatron-rl algorithms` lists estimators; there is no critic here")
    scale = {"grpo": "group" if values["algorithm.norm_adv_by_std_in_grpo"] else "none",
             "rloo": "none", "reinforce_plus_plus_baseline": "minibatch"}  # fmt: skip
    return {
        "algorithm.preset": "grpo",
        "algorithm.advantage_estimator.name": advantages[value],
        "algorithm.normalization.name": scale[value],
    }


def kl(_: Any, values: Values) -> dict[str, Any]:
    if values[f"{ACTOR}.use_kl_loss"]:
        check_kl_in_loss(values[f"{ACTOR}.kl_loss_type"])
        return kl_penalty("loss", values[f"{ACTOR}.kl_loss_coef"])
    placement = "reward" if values["algorithm.use_kl_in_reward"] else "none"
    return kl_penalty(placement, values["algorithm.kl_ctrl.kl_coef"])


def reward_kl(value: Any, values: Values) -> dict[str, Any]:
    if values["algorithm.use_kl_in_reward"] and values[f"{ACTOR}.use_kl_loss"]:
        raise NoCounterpart("the loss has a KL too: algorithm.kl has one placement")
    return kl(value, values)


def clip(value: Any, values: Values) -> dict[str, Any]:
    low, high = (values.get(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    if low is not None and high is not None:
        raise NoCounterpart("no effect with clip_ratio_low and clip_ratio_high")
    sides = {"eps_low": low, "eps_high": high}
    return {f"algorithm.policy_loss.{k}": value for k, given in sides.items() if given is None}


def minibatches(value: int, values: Values) -> dict[str, Any]:
    batch = values["data.train_batch_size"]
    # verl cuts a minibatch that exceeds the batch.
    return {"train.minibatches": ratio(batch, min(value, batch), "train.minibatches")}


def micro(value: int, values: Values) -> dict[str, Any]:
    if values.get(f"{ACTOR}.use_dynamic_bsz"):
        raise NoCounterpart("no effect with use_dynamic_bsz: ppo_max_token_len_per_gpu counts")
    longest = values["data.max_prompt_length"] + values["data.max_response_length"]
    return {"train.microbatch_tokens": product(value, longest)}


def tokens(value: int, values: Values) -> dict[str, Any]:
    # A microbatch is shared by the context ranks.
    keys = (f"{ACTOR}.ulysses_sequence_parallel_size", f"{MEGATRON}.context_parallel_size")
    return {"train.microbatch_tokens": product(value, *(values.get(key) or 1 for key in keys))}


def warmup_steps(value: int, values: Values) -> dict[str, Any]:
    if value <= 0 and values.get(f"{ACTOR}.optim.lr_warmup_steps_ratio"):
        return NOTHING
    return {"optimizer.warmup_steps": max(0, value)}


def warmup(value: float, values: Values) -> dict[str, Any]:
    if not value:
        return NOTHING
    steps = values.get("trainer.total_training_steps")
    if not steps or values[f"{ACTOR}.optim.lr_warmup_steps"] > 0:
        raise NoCounterpart("a share of total_training_steps: set optimizer.warmup_steps")
    batch = values["data.train_batch_size"]
    updates = steps * ratio(
        batch, min(values[f"{ACTOR}.ppo_mini_batch_size"], batch), "minibatches"
    )
    return {"optimizer.warmup_steps": int(value * updates)}


def least_lr(value: float, values: Values) -> dict[str, Any]:
    """The last learning rate, which is a share of the peak here."""
    return {"optimizer.min_lr_ratio": value / values[f"{ACTOR}.optim.lr"]}


def correction(_: Any, values: Values) -> dict[str, Any]:
    level = values.get(f"{CORRECTION}.rollout_is")
    if level is None:
        return NOTHING
    if level != "token":
        raise NoCounterpart("the product of a sequence's ratios; algorithm.correction has a mean")
    if values.get(f"{CORRECTION}.bypass_mode"):
        raise NoCounterpart("with bypass_mode the importance ratio itself is that to the engine")
    return truncated(values.get(f"{CORRECTION}.rollout_is_threshold", 2.0))


def overlong(prefix: str) -> dict[str, Rule]:
    """The penalty of long completions, whose keys have moved from release to release."""
    enable, length = f"{prefix}.enable", f"{prefix}.len"
    margin = needs(enable, lambda _, values: {"reward.length_margin_tokens": values[length]})
    return {
        length: margin,
        enable: lambda value, values: margin(value, values) if value else NOTHING,
        f"{prefix}.penalty_factor": needs(enable, to("reward.length")),
        f"{prefix}.*": "RUN/metrics.jsonl has the penalty",
    }


def gpus(_: Any, values: Values) -> dict[str, Any]:
    """verl's engines run on the trainer's GPUs, unless they generate while it trains."""
    gpus = product(values["trainer.n_gpus_per_node"], values["trainer.nnodes"])
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    keys = [f"{ACTOR}.ulysses_sequence_parallel_size", *(f"{MEGATRON}.{size}" for size in sizes)]
    ranks = product(*(values.get(key) or 1 for key in keys))
    engine = values[f"{ROLLOUT}.tensor_model_parallel_size"]
    data = ratio(gpus, ranks, "parallel.data")
    if apart := values.get("rollout.n_gpus_per_node"):
        # In fully_async scripts the engines have separate GPUs.
        apart = product(apart, values.get("rollout.nnodes", 1))
        replicas = ratio(apart, engine, "generator.replicas")
        return {"parallel.data": data, "generator.replicas": replicas}
    replicas = ratio(gpus, engine, "generator.replicas")
    return {"parallel.data": data, "generator.replicas": replicas, **COLOCATED}


def epochs(value: int, values: Values) -> dict[str, Any]:
    if values.get("trainer.total_training_steps"):
        raise NoCounterpart("no effect with total_training_steps")
    return {"train.epochs": value}


def greedy(value: Any, values: Values) -> dict[str, Any]:
    return {"eval.temperature": values[f"{ROLLOUT}.val_kwargs.temperature"] if value else 0.0}
