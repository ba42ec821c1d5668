"""Trains with TRL's GRPOTrainer, a JSON row per step; defines the open task of both sides.

tools.bench.end_to_end runs it in TRL's environment: `python -m tools.bench.end_to_end_peer
JOB.json`. It reads the job and its prompts, and appends {"step", "seconds", "rollouts", "accuracy",
"lengths", "turns"} rows to the job's `rows` file; `seconds` is wall clock since training began.
Both sides share the format check and the reward of the workload `real`, which our verifiers import
from here (`reward.extra`). So the top imports only the standard library and the format check.
"""

import dataclasses
import json
import pkgutil
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from verification.format import think_box

TEMPLATES = (
    "Give one title for a story about {}.",
    "Describe {} in five words.",
    "Ask me one short question about {}.",
    "Write one sentence about {}.",
    "Name three things that belong to {}.",
    "Explain {} to a child.",
    "Write a long story about {}.",
    "Describe the history of {} in detail.",
)
SUBJECTS = (
    "rivers", "bread", "a lighthouse", "bees", "the moon", "old trains", "mountains", "a market",
    "violins", "winter", "maps", "a small village", "clouds", "bicycles", "the sea", "gardens",
)  # fmt: skip
VOWELS = frozenset("aeiou")
LOOKUP_TOOL = "examples.agents.lookup:find"
# TRL appends token ids to a conversation, so it renders a prompt, and a tool's result behind a
# made-up call. It refuses a template that leaves calls out.
LOOKUP_CHAT = (
    "<bos>{% for m in messages %}{{ m['content'] }}{{ m.get('tool_calls', '') }}"
    "{% if m['role'] == 'assistant' %}<eos>{% else %}:{% endif %}{% endfor %}"
)
_TEXT = {"close": "<eos>", "content": "text", "content_args": {"strip": False}}
_CALL = {"name": "find", "arguments": {"key": "{content}"}}
LOOKUP_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": ":",
    "fields": {
        "tool_calls": _TEXT
        | {"open_pattern": r"\A=", "repeats": True}
        | {"transform": {"type": "function", "function": _CALL}},
        "content": _TEXT,
    },
}
"""How transformers reads a reply of the task lookup: "=" and a key is a call of `find`."""


def lines() -> list[str]:
    """JSONL lines of the prompts of the open task; natural answers differ much in length."""
    questions = [template.format(subject) for subject in SUBJECTS for template in TEMPLATES]
    return [
        json.dumps({"question": text, "answer": "none", "task": "open", "split": "train"})
        for text in questions
    ]


def vowel_share(text: str) -> float:
    """Share of vowels among the letters of a text, in [0, 1]; 0 without letters.

    A policy can learn this reward, and different completions seldom share a value.
    """
    letters = [character for character in text.lower() if character.isalpha()]
    if not letters:
        return 0.0
    return sum(letter in VOWELS for letter in letters) / len(letters)


def reward(answer: str, request: Any) -> float:
    """`vowel_share` as our extra reward."""
    return vowel_share(request.text)


@dataclasses.dataclass(frozen=True)
class Job:
    """Training settings, which `peer_job` derives from our run's configuration."""

    model: str
    """HF folder."""
    prompts: str
    """JSONL of {"text", "token_ids", "messages", "answer", "entry"}."""
    rows: str
    """Output file."""
    threads: int
    rollouts: int
    """Rollouts per optimizer step."""
    correct_reward: float
    format_reward: float
    task: str
    """"exact" as ours, "open" with `vowel_share` as reward, or "lookup" with a tool."""
    grpo: dict[str, Any]
    """Arguments of GRPOConfig."""


class Grader:
    """TRL's reward function; grades like our verifier."""

    def __init__(self, tokenizer: Any, job: Job) -> None:
        self.__name__ = "format_and_exact_answer"  # TRL names its metrics after the function
        self._tokenizer = tokenizer
        self._job = job
        self.accuracy = 0.0
        """Accuracy of the last call."""
        self.lengths: list[int] = []
        """Tokens of the last call's completions."""
        self.turns = 1.0
        """Mean replies of the last call's completions."""

    def __call__(
        self, completion_ids: list[list[int]], answer: list[str], **_: object
    ) -> list[float]:
        self.lengths = [len(ids) for ids in completion_ids]
        texts = [self._decode(ids) for ids in completion_ids]
        if self._job.task == "open":
            return [vowel_share(text) for text in texts]
        rewards = []
        right = 0
        for text, reference in zip(texts, answer, strict=True):
            check = think_box(text)
            is_correct = not check.refusal and check.answer == reference.strip()
            right += is_correct
            rewards.append(
                self._job.format_reward * (not check.refusal)
                + self._job.correct_reward * is_correct
            )
        self.accuracy = right / len(rewards)
        return rewards

    def _decode(self, ids: list[int]) -> str:
        if ids and ids[-1] == self._tokenizer.eos_token_id:
            ids = ids[:-1]
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


class Table:
    """TRL's environment of the task lookup. Each public method but `reset` is a tool."""

    def __init__(self, tool: Callable[[dict[str, str], str], str]) -> None:
        """tool: the example's."""
        self._tool = tool

    def reset(self, entry: str, answer: str, **_: object) -> None:
        self._entry, self.answer = json.loads(entry), answer
        self.calls: list[tuple[str, str]] = []

    def find(self, key: str) -> str:
        """The value of a key.

        Args:
            key: A letter.
        """
        self.calls.append((key, self._tool(self._entry, key)))
        return self.calls[-1][1]


class LookupGrader(Grader):
    """TRL's reward function for conversations; the environments hold the answers."""

    def __call__(
        self,
        completions: list[list[dict[str, Any]]],
        completion_ids: list[list[int]],
        environments: list[Table],
        answer: list[str],
        **_: object,
    ) -> list[float]:
        """Rewards: 1 if the last reply is its environment's answer.

        Raises AssertionError if a conversation is not what its environment saw.
        """
        assert [table.answer for table in environments] == answer
        self.lengths = [len(ids) for ids in completion_ids]
        for table, messages, ids in zip(environments, completions, completion_ids, strict=True):
            check_turns(table.calls, messages, self._decode(ids))
        replies = sum(one["role"] == "assistant" for messages in completions for one in messages)
        self.turns = replies / len(completions)
        rewards = [
            float(messages[-1]["content"] == table.answer)
            for messages, table in zip(completions, environments, strict=True)
        ]
        self.accuracy = sum(rewards) / len(rewards)
        return rewards


def check_turns(calls: list[tuple[str, str]], messages: list[dict[str, Any]], text: str) -> None:
    """Assert that the completion holds the call, its result and a second reply; or no call.

    calls: keys and results, as the environment saw them. text: the completion, decoded.
    """
    roles = [message["role"] for message in messages]
    if not calls:
        assert roles == ["assistant"] and not text.startswith("="), (roles, text)
        return
    [(key, result)] = calls
    assert roles == ["assistant", "tool", "assistant"], (roles, text)
    assert messages[1]["content"] == result
    assert re.match(re.escape(f"={key}") + "(<eos>)?" + re.escape(f"{result}:"), text), text


class StepRows:
    """TRL's callback: writes a row at the end of each optimizer step."""

    def __init__(self, grader: Grader, job: Job, file: TextIO) -> None:
        self._grader = grader
        self._rollouts = job.rollouts
        self._file = file
        self._started_at = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._started_at = time.monotonic()

    def on_step_end(self, args: object, state: Any, control: object, **_: object) -> None:
        row = {
            "step": state.global_step,
            "seconds": round(time.monotonic() - self._started_at, 4),
            "rollouts": self._rollouts,
            "accuracy": self._grader.accuracy,
            "lengths": self._grader.lengths,
            "turns": self._grader.turns,
        }
        self._file.write(json.dumps(row) + "\n")


def load_prompts(job: Job, tokenizer: Any) -> Any:
    """The prompts as TRL's data set; exits when TRL tokenizes a prompt differently."""
    from datasets import Dataset

    lines = [json.loads(line) for line in Path(job.prompts).read_text().split("\n") if line]
    if job.task == "lookup":
        prompts = [line["messages"] for line in lines]
        encoded = tokenizer.apply_chat_template(prompts, add_generation_prompt=True)["input_ids"]
    else:
        prompts = [line["text"] for line in lines]
        encoded = tokenizer(prompts)["input_ids"]
    for line, ids in zip(lines, encoded, strict=True):
        if ids != line["token_ids"]:
            sys.exit(f"TRL reads {line['text']!r} as {ids}, we as {line['token_ids']}")
    columns = {name: [line[name] for line in lines] for name in ("answer", "entry")}
    return Dataset.from_dict({"prompt": prompts} | columns)


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Callback(StepRows, TrainerCallback):
        """Adds TRL's other hooks, which do nothing."""

    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(job.threads)
    torch.set_num_interop_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32, local_files_only=True
    )
    is_lookup = job.task == "lookup"
    tool = pkgutil.resolve_name(LOOKUP_TOOL)
    if is_lookup:
        tokenizer.chat_template, tokenizer.response_template = LOOKUP_CHAT, LOOKUP_RESPONSE
    grader = (LookupGrader if is_lookup else Grader)(tokenizer, job)
    with Path(job.rows).open("w", buffering=1) as file:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=grader,
            args=GRPOConfig(**job.grpo),
            train_dataset=load_prompts(job, tokenizer),
            processing_class=tokenizer,
            callbacks=[Callback(grader, job, file)],
            environment_factory=partial(Table, tool) if is_lookup else None,
        )
        trainer.train()


if __name__ == "__main__":
    main()
