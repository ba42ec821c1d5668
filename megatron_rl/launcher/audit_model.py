"""Checks the exported model against the run's report, in transformers instead of an engine.

Used by `megatron-rl audit --model`. Loads RUN_DIR/hf/final and
- compares its logits with the trainer's on one rank, in the training dtype; both are measured
  against transformers in float32;
- answers the held-out prompts as the run did, grades them by the verifier's rules, and compares the
  accuracy with the reported one.
"""

import itertools
import math
import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from megatron_rl.config.errors import InputError
from megatron_rl.config.files import load_config, override
from megatron_rl.config.staging import longest_stage
from megatron_rl.config.tree import Config, ParallelConfig
from megatron_rl.data.dropped_prompts import read_dropped
from megatron_rl.data.prompts import prompts_of_run
from megatron_rl.launcher.ports import find_free
from megatron_rl.launcher.reward_trial import sample_of
from megatron_rl.observe.facts import read_summary
from megatron_rl.protocol.render import Renderer, open_renderer
from megatron_rl.protocol.types import Prompt, Score
from megatron_rl.rollout_queue.evaluation import select_held_out
from megatron_rl.weights.layout.families import FAMILIES
from megatron_rl.weights.layout.shape import read_shape
from verification.library import Grading, Sample

PROBE_PROMPTS = 32
BATCH = 64
ROUNDING_FACTOR = 2.0
STANDARD_ERRORS = 3.0
SAMPLING_SEED = 0


def audit_model(run_dir: Path) -> dict[str, object]:
    """Measured figures, and verdicts under names that begin with is_. Raises InputError.

    run_dir: of a run that has ended.
    """
    folder = run_dir / "hf" / "final"
    cfg = load_config(run_dir / "config.toml", [override("model.path", str(folder))])
    cfg = cfg.model_copy(update={"parallel": ParallelConfig()})
    renderer = open_renderer(cfg)
    sets = prompts_of_run(cfg, read_dropped(run_dir))
    prompts = select_held_out(sets.held_out, cfg.eval)
    summary = read_summary(run_dir)
    findings = compare_accuracy(cfg, renderer, prompts, summary)
    # Last: the trainer's backend patches torch, and transformers then loads models wrongly.
    others = itertools.chain(*sets.eval_sets.values(), *sets.train)
    probes = prompts or list(itertools.islice(others, PROBE_PROMPTS))
    return findings | compare_logits(cfg, renderer, probes[:PROBE_PROMPTS])


def compare_logits(cfg: Config, renderer: Renderer, prompts: list[Prompt]) -> dict[str, object]:
    """Distance of the trainer's and of transformers' logits from float32 logits."""
    sequences = [
        renderer.render(
            p.messages,
            longest_stage(cfg).sampling.max_new_tokens,
            task=p.task,
            is_program=p.is_program,
        )
        + renderer.render_response(cfg.render.tags.around("") + f"\\boxed{{{p.answer}}}")
        for p in prompts
    ]
    reference = hf_logits(cfg.model.path, sequences, "float32")
    own = hf_logits(cfg.model.path, sequences, cfg.model.dtype)
    trainer = trainer_logits(cfg, sequences)
    trainer_error = float((trainer - reference).abs().mean())
    own_error = float((own - reference).abs().mean())
    floor = 1e-5 * float(reference.abs().mean())
    return {
        "logit_error_trainer": trainer_error,
        "logit_error_transformers": own_error,
        "logit_max_difference": float((trainer - own).abs().max()),
        "is_logits_within_rounding": trainer_error <= ROUNDING_FACTOR * own_error + floor,
    }


def load_model(folder: Path, dtype: str) -> torch.nn.Module:
    """The folder's model as transformers loads it, a text model with its wrapper."""
    is_wrapped = FAMILIES[read_shape(folder).architecture].wrapper is not None
    kind = AutoModelForImageTextToText if is_wrapped else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


@torch.no_grad()
def hf_logits(folder: Path, sequences: list[list[int]], dtype: str) -> torch.Tensor:
    """[tokens of all sequences, vocabulary] float32."""
    model = load_model(folder, dtype)
    return torch.cat([model(torch.tensor([ids])).logits[0].float() for ids in sequences])


def trainer_logits(cfg: Config, sequences: list[list[int]]) -> torch.Tensor:
    """[tokens, vocabulary] float32, by the trainer's model on one rank, packed."""
    # Imported here, as the backend patches torch for the whole process.
    from megatron_rl.trainer.model.build import packed
    from megatron_rl.trainer.model.policy import open_policy

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free("127.0.0.1"))}
    tokens = torch.tensor([[token for ids in sequences for token in ids]])
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])[None]
    with open_policy(cfg) as policy:
        device = policy.device
        lengths = packed([len(ids) for ids in sequences], device)
        chunk = policy.chunks[0].eval()
        with torch.no_grad():
            logits = chunk(tokens.to(device), positions.to(device), None, packed_seq_params=lengths)
        return logits[0, :, : policy.shape.vocab].float().cpu()


def compare_accuracy(
    cfg: Config, renderer: Renderer, prompts: list[Prompt], summary: dict
) -> dict[str, object]:
    """Compare transformers' accuracy with the reported one."""
    reported = summary.get("accuracy_after")
    if reported is None:
        return {"accuracy_not_compared": "the run measured none on held-out prompts after training"}
    if any(prompt.task in cfg.reward.environments for prompt in prompts):
        return {"accuracy_not_compared": "environments answer the held-out prompts"}
    accuracy = share_correct(cfg, hf_completions(cfg, renderer, prompts))
    return {
        "accuracy_transformers": accuracy,
        "accuracy_reported": reported,
        "is_accuracy_confirmed": abs(accuracy - reported)
        <= tolerance(accuracy, len(prompts), is_sampled=cfg.eval.temperature > 0),
    }


def tolerance(accuracy: float, prompts: int, *, is_sampled: bool) -> float:
    """Largest accepted difference of two accuracies of one model on the same prompts.

    Greedy answers differ only by rounding. Two sampled accuracies each have a standard error.
    """
    error = math.sqrt(max(accuracy * (1 - accuracy), 1e-4) / prompts)
    return STANDARD_ERRORS * math.sqrt(2) * error if is_sampled else 2 * error


@torch.no_grad()
def hf_completions(cfg: Config, renderer: Renderer, prompts: list[Prompt]) -> list[Sample]:
    """A completion of each prompt, sampled as evaluations do."""
    model = load_model(cfg.model.path, cfg.model.dtype)
    how: dict[str, object] = {"do_sample": False}
    if cfg.eval.temperature > 0:
        torch.manual_seed(SAMPLING_SEED)
        how = {"do_sample": True, "temperature": cfg.eval.temperature}
        how |= {name: getattr(cfg.eval, name) for name in ("top_p", "top_k", "min_p")}
    limit = cfg.eval.max_new_tokens or longest_stage(cfg).sampling.max_new_tokens
    samples = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        ids = [
            renderer.render(p.messages, limit, task=p.task, is_program=p.is_program) for p in batch
        ]
        width = max(map(len, ids))
        pad = renderer.stop_ids[0]
        tokens = torch.tensor([[pad] * (width - len(i)) + i for i in ids])
        mask = torch.tensor([[0] * (width - len(i)) + [1] * len(i) for i in ids])
        output = model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=limit,
            **how,
            pad_token_id=pad,
            eos_token_id=list(renderer.stop_ids),
        )
        for prompt, own, row in zip(batch, ids, output[:, width:].tolist(), strict=True):
            ends = [i for i, token in enumerate(row) if token in renderer.stop_ids]
            text = renderer.decode(row[: ends[0]] if ends else row)
            samples.append(sample_of(prompt, text, renderer.tail(own)))
    return samples


def share_correct(cfg: Config, samples: list[Sample]) -> float:
    """Share of right completions of those that could be graded, by the verifier's rules."""
    with Grading.of(cfg) as grading:
        graded = [found for found in grading.score(samples) if isinstance(found, Score)]
    if not graded:
        raise InputError("no completion of the held-out prompts could be graded: see the log")
    return sum(found.reason == "correct" for found in graded) / len(graded)
