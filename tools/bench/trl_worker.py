"""Trains with TRL's GRPOTrainer and writes one JSON row a step.

Run in the benchmark's own virtual environment by tools.bench.variants:
`python -m tools.bench.trl_worker JOB.json`, from the repository root. It reads the job and its
prompts, and appends {"step", "seconds", "rollouts", "accuracy", "lengths"} rows to the job's `rows`
file. `seconds` is wall clock since training began. It imports nothing of this project but the
format check and the reward of texts, so that both sides grade alike.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tools.bench.open_task import vowel_share
from verification.format import think_box


@dataclasses.dataclass(frozen=True)
class Job:
    """What to train and how, as `peer_job` of variants.py takes it from our run's configuration."""

    model: str
    """HF folder."""
    prompts: str
    """JSONL of {"text", "token_ids", "answer"}."""
    rows: str
    """Where the rows go."""
    threads: int
    rollouts: int
    """Of an optimizer step."""
    correct_reward: float
    format_reward: float
    is_open_task: bool
    """Grade by tools.bench.open_task alone, not as our task "exact"."""
    grpo: dict[str, Any]
    """Arguments of GRPOConfig."""


class Grader:
    """TRL's reward function: graded as our verifier does."""

    def __init__(self, tokenizer: Any, job: Job) -> None:
        self.__name__ = "format_and_exact_answer"  # TRL names its metrics after the function
        self._tokenizer = tokenizer
        self._job = job
        self.accuracy = 0.0
        """Of the last call."""
        self.lengths: list[int] = []
        """Tokens of the last call's completions."""

    def __call__(
        self, completion_ids: list[list[int]], answer: list[str], **_: object
    ) -> list[float]:
        """Rewards of the completions."""
        self.lengths = [len(ids) for ids in completion_ids]
        eos = self._tokenizer.eos_token_id
        if self._job.is_open_task:
            kept = [ids[:-1] if ids and ids[-1] == eos else ids for ids in completion_ids]
            return [vowel_share(self._decode(ids)) for ids in kept]
        rewards = []
        right = 0
        for ids, reference in zip(completion_ids, answer, strict=True):
            check = think_box(self._decode(ids[:-1] if ids and ids[-1] == eos else ids))
            is_correct = not check.refusal and check.answer == reference.strip()
            right += is_correct
            rewards.append(
                self._job.format_reward * (not check.refusal)
                + self._job.correct_reward * is_correct
            )
        self.accuracy = right / len(rewards)
        return rewards

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


class StepRows(TrainerCallback):
    """Writes a row at the end of each optimizer step."""

    def __init__(self, grader: Grader, job: Job, file: TextIO) -> None:
        self._grader = grader
        self._rollouts = job.rollouts
        self._file = file
        self._started_at = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the clock."""
        self._started_at = time.monotonic()

    def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
        """Write the row."""
        row = {
            "step": state.global_step,
            "seconds": round(time.monotonic() - self._started_at, 4),
            "rollouts": self._rollouts,
            "accuracy": self._grader.accuracy,
            "lengths": self._grader.lengths,
        }
        self._file.write(json.dumps(row) + "\n")


def load_prompts(job: Job, tokenizer: Any) -> Dataset:
    """The prompts as TRL's data set; SystemExit when TRL would see other token ids than we do."""
    lines = [json.loads(line) for line in Path(job.prompts).read_text().split("\n") if line]
    for line, ids in zip(
        lines, tokenizer([line["text"] for line in lines])["input_ids"], strict=True
    ):
        if ids != line["token_ids"]:
            sys.exit(f"TRL reads {line['text']!r} as {ids}, we as {line['token_ids']}")
    return Dataset.from_dict(
        {"prompt": [line["text"] for line in lines], "answer": [line["answer"] for line in lines]}
    )


def main() -> None:
    """Command line."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(job.threads)
    torch.set_num_interop_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32, local_files_only=True
    )
    grader = Grader(tokenizer, job)
    with Path(job.rows).open("w", buffering=1) as file:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=grader,
            args=GRPOConfig(**job.grpo),
            train_dataset=load_prompts(job, tokenizer),
            processing_class=tokenizer,
            callbacks=[StepRows(grader, job, file)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
