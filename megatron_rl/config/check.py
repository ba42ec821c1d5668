"""Table of refused combinations of sections: conditions and texts.

Loading a tree checks all rows. Sections check their own keys, the preflight files and machines.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from megatron_rl.config.determinism import find_inexact

Config = Any
"""The tree, which imports this module."""


class Refusal(NamedTuple):
    """One impossible combination."""

    is_met: Callable[[Config], bool]
    text: str
    """Braces name keys and `_facts`; their values replace them."""


def refusals(config: Config) -> list[str]:
    """The text of each row whose condition holds."""
    values = {name: getattr(config, name) for name in type(config).model_fields} | _facts(config)
    met = [row.text.format(**values) for row in REFUSALS if row.is_met(config)]
    return met + find_inexact(config)


def _facts(config: Config) -> dict[str, Any]:
    """Values for the texts that are not keys."""
    ranks = config.parallel.world_size
    return {
        "ranks": ranks,
        "shared_methods": "folder or ipc" if ranks == 1 else "folder",
        "longest_eval": config.eval.longest(config.sampling.max_new_tokens),
        "lease_s": 1.2 * config.generator.request_timeout_s,
        "score_s": 1.5 * config.verifier.answer_within_s,
        "program_s": config.reward.longest_program_s,
        "buffer_steps": config.replay.steps_in_buffer(config.sampled_groups),
        "least_groups": config.least_groups,
        "sets": ", ".join(one.name for one in config.eval.sets) or "there are none",
        "offloaded": "optimizer" if config.optimizer.offload else "sft.optimizer",
    }


_releases = attrgetter("generator.release_memory")
_pads = attrgetter("train.pad_microbatches")
_overlaps = attrgetter("parallel.overlap_tensor")
_scores, _judge = attrgetter("algorithm.needs_scorer"), attrgetter("scorer.judge")


def _offloads(c: Config) -> bool:
    return c.optimizer.offload or c.sft.optimizer.offload


def _replays(c: Config) -> bool:
    return bool(c.replay.groups_of(c.train.prompts_per_batch))


def _has_gold(c: Config) -> bool:
    return c.algorithm.used_gold is not None


def _chooses(c: Config) -> bool:
    return bool(c.sft.steps and c.sft.export_every_steps)


def _samples_otherwise(c: Config, key: str, off: float) -> bool:
    found = [c.sampling, c.eval, *c.eval.sets]
    return c.generator.engine == "hf" and any(getattr(s, key) not in (off, None) for s in found)


def _hf_refusal(key: str, off: float) -> Refusal:
    text = (
        f"generator.engine='hf' samples with {key} = {off:g} alone: leave sampling.{key}, "
        f"eval.{key} and that of eval.sets at {off:g}, or use 'sglang'"
    )
    return Refusal(lambda c: _samples_otherwise(c, key, off), text)


REFUSALS = (
    # Batches and lengths.
    Refusal(
        lambda c: c.train.minibatches > c.least_groups,
        "train.minibatches={train.minibatches} is more than the {least_groups} groups of the first "
        "batch (train.prompts_per_batch={train.prompts_per_batch}, from an empty replay buffer "
        "none): groups never split across minibatches; lower train.minibatches",
    ),
    Refusal(
        lambda c: c.reward.length_margin_tokens > c.sampling.max_new_tokens,
        "reward.length_margin_tokens={reward.length_margin_tokens} exceeds "
        "sampling.max_new_tokens={sampling.max_new_tokens}: lower it",
    ),
    Refusal(
        lambda c: c.generator.context_tokens <= c.sampling.max_new_tokens,
        "generator.context_tokens={generator.context_tokens} leaves no room for a prompt with "
        "sampling.max_new_tokens={sampling.max_new_tokens}: raise it",
    ),
    Refusal(
        lambda c: (
            c.generator.context_tokens <= c.eval.longest(c.sampling.max_new_tokens)
            and c.generator.context_tokens > c.sampling.max_new_tokens
        ),
        "generator.context_tokens={generator.context_tokens} leaves no room for a prompt with "
        "the max_new_tokens={longest_eval} of eval or of eval.sets: raise it",
    ),
    # Time limits.
    Refusal(
        lambda c: c.generator.request_timeout_s >= c.queue.lease_timeout_s,
        "expert.generator.request_timeout_s={generator.request_timeout_s:g} is not below "
        "expert.queue.lease_timeout_s={queue.lease_timeout_s:g}: a lease would be given to "
        "another generator before its engine has given up; set expert.queue.lease_timeout_s to "
        "{lease_s:g}, or lower expert.generator.request_timeout_s",
    ),
    Refusal(
        lambda c: c.verifier.answer_within_s >= c.queue.score_timeout_s,
        "expert.verifier.answer_within_s={verifier.answer_within_s:g} is not below "
        "expert.queue.score_timeout_s={queue.score_timeout_s:g}: the queue would ask "
        "another verifier before the first has answered; set expert.queue.score_timeout_s to "
        "{score_s:g}",
    ),
    Refusal(
        lambda c: c.verifier.code.timeout_s < c.reward.longest_program_s,
        "expert.verifier.code.timeout_s={verifier.code.timeout_s:g} is less than the "
        "{program_s:g} s that a program may take by expert.reward.compile_s, "
        "reward.tests_per_problem and reward.test_s: raise it, or lower those",
    ),
    Refusal(
        # A run on one node waits for none.
        lambda c: c.ports.host != "127.0.0.1" and c.nodes.wait_s >= c.train.batch_timeout_s,
        "expert.nodes.wait_s={nodes.wait_s:g} is not below expert.train.batch_timeout_s="
        "{train.batch_timeout_s:g}, when the queue ends the run: lower it, or raise the latter",
    ),
    # Engines.
    Refusal(
        lambda c: c.generator.overlap_schedule and c.weights.kv_cache != "recompute",
        "expert.generator.overlap_schedule with weights.kv_cache={weights.kv_cache!r}: the "
        "versions of tokens would be wrong by one; set weights.kv_cache='recompute', or leave it "
        "at false",
    ),
    Refusal(
        lambda c: c.eval.replicas != "auto" and c.eval.replicas >= c.generator.replicas > 1,
        "eval.replicas={eval.replicas} leaves none of generator.replicas={generator.replicas} to "
        "training: lower eval.replicas",
    ),
    Refusal(
        lambda c: bool(c.generator.quantization) and c.generator.engine in ("hf", "vllm"),
        "generator.quantization={generator.quantization!r} needs an engine that quantises: "
        "generator.engine={generator.engine!r} does not; use 'sglang'",
    ),
    Refusal(
        lambda c: c.model.has_wide_head and c.generator.engine != "sglang",
        "model.head_dtype='float32' with generator.engine={generator.engine!r}, which rounds "
        "logits to model.dtype={model.dtype!r}: its logprobs would differ from the trainer's; use "
        "generator.engine='sglang', or model.head_dtype='bfloat16'",
    ),
    Refusal(
        lambda c: c.generator.engine == "vllm" and c.generator.tensor_parallel > 1,
        "generator.tensor_parallel={generator.tensor_parallel}: generator.engine='vllm' has one "
        "rank; set it to 1 and generator.replicas higher, or use 'sglang'",
    ),
    *(_hf_refusal(key, off) for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0))),
    Refusal(
        lambda c: c.generator.engine == "vllm" and bool(c.sampling.stop),
        "generator.engine='vllm' knows no sampling.stop (given: {sampling.stop}): leave it out, or "
        "use 'sglang'",
    ),
    Refusal(
        lambda c: c.train.router_replay and c.generator.engine in ("hf", "vllm"),
        "train.router_replay needs an engine that returns its expert choices: "
        "generator.engine={generator.engine!r} does not; use 'sglang'",
    ),
    # Engines on the trainer's GPUs. An engine sees only its GPUs and cannot open memory of others.
    Refusal(
        lambda c: (
            c.generator.colocate
            and c.weights.method != "folder"
            and not (c.weights.method == "ipc" and c.parallel.world_size == 1)
        ),
        "generator.colocate with {ranks} trainer ranks needs weights.method {shared_methods}, not "
        "{weights.method!r}: two ranks of NCCL do not share a GPU",
    ),
    Refusal(
        lambda c: _releases(c) and c.generator.engine != "sglang",
        "generator.release_memory=true with generator.engine={generator.engine!r}: SGLang alone "
        "gives memory back; set generator.engine='sglang', or leave release_memory at false",
    ),
    Refusal(
        lambda c: _releases(c) and not c.generator.colocate,
        "generator.release_memory=true without generator.colocate: engines on GPUs of their own "
        "are in nobody's way; set colocate=true, or leave release_memory at false",
    ),
    Refusal(
        lambda c: _releases(c) and c.weights.kv_cache != "recompute",
        "generator.release_memory=true with weights.kv_cache={weights.kv_cache!r}: engines release "
        "keys and values too; set weights.kv_cache='recompute'",
    ),
    Refusal(
        lambda c: _releases(c) and c.weights.overlap,
        "generator.release_memory=true and expert.weights.overlap=true exclude each other: the "
        "trainer would compute while engines take weights; leave one of them out",
    ),
    Refusal(
        lambda c: _releases(c) and c.eval.replicas != "auto",
        "generator.release_memory=true and eval.replicas={eval.replicas} exclude each other: no "
        "engine keeps the version that it evaluates; leave the latter out",
    ),
    Refusal(
        lambda c: _releases(c) and c.weights.join_timeout_s < c.generator.start_timeout_s,
        "generator.release_memory=true with expert.weights.join_timeout_s="
        "{weights.join_timeout_s:g} below expert.generator.start_timeout_s="
        "{generator.start_timeout_s:g}: the trainer waits for engines that start; raise the former",
    ),
    Refusal(
        lambda c: _releases(c) and bool(c.generator.quantization),
        "generator.release_memory=true with generator.quantization={generator.quantization!r}: "
        "nobody may restore the tensors that quantisation adds; leave one of them out",
    ),
    Refusal(
        lambda c: c.model.megatron_path is not None and bool(c.sft.steps or not c.train.steps),
        "model.megatron_path={model.megatron_path} is read by reinforcement learning alone, "
        "without sft.steps and with train.steps: make a HF folder of it with `megatron-rl convert` "
        "and give that as model.path",
    ),
    # A pass of a trainer rank.
    Refusal(
        # megatron-core 0.16.1, moe_utils.py:652: the fused router ignores recorded choices.
        lambda c: c.train.router_replay and "moe_router" in c.model.fusions,
        "expert.model.fusions with 'moe_router' and train.router_replay=true exclude each other: "
        "the fused router takes no recorded choices; leave 'moe_router' out",
    ),
    Refusal(
        lambda c: _pads(c) and c.parallel.context > 1,
        "expert.train.pad_microbatches=true with parallel.context={parallel.context}: context "
        "ranks pad every sequence, so that a microbatch may exceed train.microbatch_tokens; set "
        "parallel.context=1, or it to false",
    ),
    Refusal(
        lambda c: (
            _pads(c)
            and c.train.steps > 0
            and c.train.microbatch_tokens < c.generator.context_tokens
        ),
        "expert.train.pad_microbatches=true with train.microbatch_tokens="
        "{train.microbatch_tokens}: a sequence may have generator.context_tokens="
        "{generator.context_tokens}; raise the former to it",
    ),
    # Limits of TransformerEngine 2.12's userbuffers, besides the number of ranks.
    Refusal(
        lambda c: _overlaps(c) and not _pads(c),
        "expert.parallel.overlap_tensor=true needs microbatches of one size, as its buffers have "
        "one: set expert.train.pad_microbatches=true, or it to false",
    ),
    Refusal(
        lambda c: _overlaps(c) and c.model.layers == "local",
        "expert.parallel.overlap_tensor=true needs expert.model.layers='transformer_engine' or "
        "'auto'",
    ),
    Refusal(
        # Its kernels add what they exchange as bfloat16 (userbuffers.cu).
        lambda c: _overlaps(c) and c.model.dtype != "bfloat16",
        "expert.parallel.overlap_tensor=true needs model.dtype='bfloat16'",
    ),
    Refusal(
        # module/base.py:603: "Unsupported quantizer for Userbuffers".
        lambda c: _overlaps(c) and c.model.fp8 == "blockwise",
        "expert.parallel.overlap_tensor=true with model.fp8='blockwise': TransformerEngine's "
        "buffers take no blocks; nearest possible: model.fp8='tensorwise', or "
        "expert.parallel.overlap_tensor=false",
    ),
    Refusal(
        lambda c: c.model.fp8_parameters and not c.parallel.distributed_optimizer,
        "expert.model.fp8_parameters=true needs parallel.distributed_optimizer=true: set it",
    ),
    Refusal(
        lambda c: _offloads(c) and not c.parallel.distributed_optimizer,
        "{offloaded}.offload=true needs parallel.distributed_optimizer=true: set it",
    ),
    Refusal(
        # megatron-core 0.16.1, hybrid_optimizer.py:373: a resume looks for a master of each.
        lambda c: _offloads(c) and c.model.dtype != "bfloat16",
        "{offloaded}.offload=true needs model.dtype='bfloat16', or no run could resume: set it",
    ),
    Refusal(
        lambda c: _offloads(c) and c.model.fp8_parameters,
        "{offloaded}.offload and expert.model.fp8_parameters=true exclude each other: omit one",
    ),
    # The choice among models of the cold start.
    Refusal(
        lambda c: (
            _chooses(c)
            and bool(c.sft.choose_by)
            and c.sft.choose_by not in [one.name for one in c.eval.sets]
        ),
        "sft.choose_by={sft.choose_by!r} is none of eval.sets ({sets}): name one of them, or leave "
        "it out for the held-out prompts",
    ),
    Refusal(
        lambda c: _chooses(c) and not c.sft.choose_by and c.eval.prompts == 0,
        "sft.export_every_steps={sft.export_every_steps} chooses by an evaluation, and "
        "eval.prompts=0: raise it, or name one of eval.sets in sft.choose_by",
    ),
    # The objective.
    Refusal(
        lambda c: (
            c.algorithm.advantage_estimator.name in ("pass_at_k", "majority")
            and c.algorithm.advantage_estimator.k > c.train.group_size
        ),
        "algorithm.advantage_estimator.k={algorithm.advantage_estimator.k} samples are more than "
        "train.group_size={train.group_size}: raise the latter, or lower the former",
    ),
    Refusal(
        lambda c: _has_gold(c) and c.train.router_replay,
        "algorithm.gold.groups={algorithm.gold.groups!r} and train.router_replay=true exclude each "
        "other: no generator chose experts for reference answers; set one to its default",
    ),
    Refusal(
        lambda c: _has_gold(c) and not c.reward.format,
        "algorithm.gold.groups={algorithm.gold.groups!r} needs reward.format above 0, by which "
        "well-formed completions are known; the paper's is 0.1",
    ),
    Refusal(
        lambda c: not _scores(c) and c.algorithm.needs_reference and c.model.fp8_parameters,
        "algorithm.reference.policy swaps weights, and expert.model.fp8_parameters=true keeps them "
        "with scales that cannot be swapped: set expert.model.fp8_parameters=false",
    ),
    # The reference in an engine.
    Refusal(
        lambda c: _scores(c) and c.sampling.temperature != 1.0,
        "sampling.temperature={sampling.temperature:g} with algorithm.reference.source='engine': "
        "SGLang gives logprobs of given tokens at temperature 1 alone, which are not those that "
        "the trainer compares; set it to 1, or algorithm.reference.source='trainer'",
    ),
    Refusal(
        lambda c: bool(_judge(c)) and not c.reward.environments,
        "expert.scorer.judge={scorer.judge}, and no reward.tasks.NAME.environment asks it: omit it",
    ),
    Refusal(
        lambda c: _scores(c) and _judge(c) not in (None, c.algorithm.reference.folder),
        "expert.scorer.judge={scorer.judge}: the scorer has one model, so give the folder of "
        "algorithm.reference.policy={algorithm.reference.policy}, or reference.source='trainer'",
    ),
    Refusal(
        lambda c: _scores(c) and c.scorer.kv_tokens <= c.generator.context_tokens,
        "scorer.kv_tokens={scorer.kv_tokens} does not hold one sequence of "
        "generator.context_tokens={generator.context_tokens}: raise it",
    ),
    Refusal(
        lambda c: bool(_scores(c) or _judge(c)) and not c.scorer.waits_through_starts,
        "expert.scorer.answer_within_s={scorer.answer_within_s:g} is not above "
        "expert.scorer.start_timeout_s={scorer.start_timeout_s:g} and "
        "expert.scorer.request_timeout_s={scorer.request_timeout_s:g}: raise it",
    ),
    Refusal(
        lambda c: _scores(c) and c.reference_is_megatron,
        "algorithm.reference.source='engine' reads Hugging Face folders, and the run starts from "
        "model.megatron_path={model.megatron_path}: make a folder of it with `megatron-rl convert` "
        "and give that as algorithm.reference.policy",
    ),
    Refusal(
        lambda c: bool(c.reward.environments) and _has_gold(c),
        "reward.tasks.*.environment excludes algorithm.gold.groups={algorithm.gold.groups!r}: a "
        "conversation has no place for the reference answer; set it to its default",
    ),
    # Replay.
    Refusal(
        lambda c: _replays(c) and _has_gold(c),
        "replay.share={replay.share:g} and algorithm.gold.groups={algorithm.gold.groups!r} exclude "
        "each other: recorded rollouts hold no reference answers; set one to its default",
    ),
    Refusal(
        lambda c: _replays(c) and c.train.router_replay,
        "replay.share={replay.share:g} and train.router_replay=true exclude each other: choices of "
        "experts are not recorded; set one of them to its default",
    ),
    Refusal(
        lambda c: _replays(c) and bool(c.replay.datasets) and c.algorithm.reads_generator_logprobs,
        "replay.datasets have no generator's logprobs, which algorithm.policy_loss.name="
        "{algorithm.policy_loss.name!r} with old_logprobs={algorithm.policy_loss.old_logprobs!r}, "
        "algorithm.shaping.baseline={algorithm.shaping.baseline!r} and algorithm.correction.name="
        "{algorithm.correction.name!r} read: take a preset without importance ratios, such as "
        "agro, or old_logprobs='recompute' without a correction; with spo, for SFT examples of the "
        "reference, advantage_estimator.name='soft_value', shaping.baseline='none'",
    ),
    Refusal(
        lambda c: c.replay.buffer_groups > 0 and not c.queue.record_tokens,
        "replay.buffer_groups={replay.buffer_groups} is filled from the recorded tokens when a run "
        "resumes: set queue.record_tokens=true",
    ),
    Refusal(
        lambda c: 0 < c.queue.keep_tokens_of_steps < c.replay.steps_in_buffer(c.sampled_groups),
        "replay.buffer_groups={replay.buffer_groups} is filled from the recorded tokens of "
        "{buffer_steps} steps when a run resumes, and queue.keep_tokens_of_steps="
        "{queue.keep_tokens_of_steps} keeps fewer: set that to at least {buffer_steps}, or to 0 "
        "(all), or lower replay.buffer_groups",
    ),
)
