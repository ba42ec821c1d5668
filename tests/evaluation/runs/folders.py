"""Folders of results, written as the queue and the launcher write them."""

from pathlib import Path

from megatron_rl.config.tree import Config
from megatron_rl.evaluation.runs.results import make_report, write_report
from megatron_rl.protocol.types import Sampling, ScoredRollout
from megatron_rl.rollout_queue.evaluation import EvaluationSet
from megatron_rl.rollout_queue.groups import Group, Origin
from megatron_rl.rollout_queue.record import Recorder
from tests.rollout_queue.makers import make_prompt, make_rollout, make_score

Verdicts = dict[str, list[int]]
"""By prompt: 1 for a right completion."""


def make_set(name: str, verdicts: Verdicts, samples: int, temperature: float) -> EvaluationSet:
    prompts = [make_prompt(prompt, split="held_out") for prompt in verdicts]
    return EvaluationSet(name, prompts, samples, Sampling(16, temperature))


def write_results(
    folder: Path,
    sets: dict[str, Verdicts],
    *,
    label: str = "model",
    samples: int = 2,
    temperature: float = 1.0,
    missing: tuple[str, ...] = (),
) -> dict:
    """Results of sets by name (empty: held out); `missing` prompts were asked for in vain."""
    recorder = Recorder(folder)
    wanted = []
    for name, verdicts in sets.items():
        one = make_set(name, verdicts, samples, temperature)
        wanted.append(one)
        groups = []
        for number, prompt in enumerate(one.prompts):
            if prompt.id in missing:
                continue
            evaluation = one.label(label)
            group = Group(number, prompt, one.sampling, samples, 0, evaluation=evaluation)
            for index, verdict in enumerate(verdicts[prompt.id]):
                group.origins[index] = Origin("g", 1.0, 2.0)
                score = make_score(float(verdict))
                group.add(ScoredRollout(make_rollout(index), score), 3.0)
            group.classes = {
                i: 0 if verdict else 1 for i, verdict in enumerate(verdicts[prompt.id])
            }
            groups.append(group)
        recorder.write_evaluation(one.label(label), groups)
    config = Config.model_validate({"run": {"dir": folder}, "model": {"path": folder / "m"}})
    report = make_report(config, label, wanted)
    write_report(folder, report)
    return report
