"""The whole recipe in miniature, with commands of `megatron-rl`; examples/miniature.sh runs it.

`python -m tools.miniature OUT_DIR [--seeds N]`. The task is to sort five digits. The raw data have
planted errors: wrong labels (the descending order, a frequent answer of the base model), unsolvable
problems and copies. A separate file records these errors, to count the ones that curation finds.
The steps, commands listed in OUT_DIR/commands.txt:

    dedupe -> grade by the base model -> difficulty -> RL -> grade all problems by its result ->
    difficulty, relabel -> RL on the filtered data, and on the raw data -> SFT examples of the
    former -> cold start of the base model -> RL

Prints the paper's table in miniature; the last line is one JSON object. Repeating the command
resumes it.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_rl.data.example_tasks import write_lines
from megatron_rl.protocol.metrics import read_jsonl
from megatron_rl.sweep.results import estimate

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "examples/miniature.toml"
COMMAND_S = 1200.0
TRAIN, HELD_OUT, SFT_EXAMPLES = 600, 400, 500
DESCENDING, UNSOLVABLE, COPIES = 150, 60, 30
"""Planted errors: wrong labels and unsolvable problems among TRAIN, and additional copies."""
SAMPLES = 16
COLD_START_STEPS = 140


class Miniature:
    """The output folder of the recipe."""

    def __init__(self, out: Path) -> None:
        self.out = out.resolve()
        (self.out / "data").mkdir(parents=True, exist_ok=True)

    def data(self, name: str) -> Path:
        """A file of prompts or SFT examples."""
        return self.out / "data" / f"{name}.jsonl"

    def run(self, name: str) -> Path:
        """Folder of a run or an evaluation."""
        return self.out / "runs" / name

    def call(self, done: Path, *words: str | Path) -> None:
        """Run `python -m WORDS`, unless `done`, its last output, exists."""
        if done.exists():
            return
        command = [sys.executable, "-m", *map(str, words)]
        started = time.monotonic()
        with (self.out / "commands.txt").open("a") as listed:
            print(f"cd {shlex.quote(str(ROOT))} && {shlex.join(command)}", file=listed)
        log = self.out / "log.txt"
        with log.open("a") as output:
            ended = subprocess.run(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, timeout=COMMAND_S
            )
        if ended.returncode:
            raise SystemExit(f"miniature: {' '.join(command[1:])} failed; see {log}")
        print(f"{time.monotonic() - started:5.0f} s  {' '.join(map(str, words[1:4]))}", flush=True)

    def cli(self, done: Path, *words: str | Path) -> None:
        """Run `megatron-rl WORDS`, unless `done` exists."""
        self.call(done, "megatron_rl.cli.main", *words)

    def train(self, name: str, prompts: str, model: Path, *overrides: str) -> Path:
        """Train on the prompts of a file, evaluate on the held-out ones; returns the run folder."""
        run = self.run(name)
        lines = [row | {"split": "train"} for row in read_jsonl(self.data(prompts))]
        path = self.data(f"{prompts}.run")
        write_lines(path, lines + read_jsonl(self.data("held_out")))
        self.cli(
            run / "summary.json",
            *("run", "--config", CONFIG, "--run-dir", run),
            *(f"model.path={model}", f"prompts.0.path={path}", *overrides),
        )
        return run

    def grade(self, name: str, prompts: str, model: Path) -> Path:
        """Evaluate SAMPLES completions per problem of a file; returns the evaluation's folder."""
        run = self.run(name)
        settings = {"name": "graded", "samples": SAMPLES, "temperature": 1.0}
        source = {"path": str(self.data(prompts)), "task": "exact"}
        sets = _toml([settings | {"prompts": source}])
        self.cli(
            run / "eval.json",
            *("eval", model, "--config", CONFIG, "--run-dir", run, "eval.prompts=0"),
            *(f"prompts.0.path={self.data(prompts)}", f"eval.sets={sets}"),
        )
        return run


def plant(small: Miniature, seed: int) -> None:
    """Write the raw data, their planted errors, and the held-out problems."""
    if small.data("planted").exists():
        return
    rows = read_jsonl(small.out / "tasks" / "prompts.jsonl")
    held_out = [row for row in rows if row["split"] == "held_out"]
    train = [row for row in rows if row["split"] == "train"][:TRAIN]
    rng = random.Random(f"{seed}/planted")
    chosen = rng.sample(range(TRAIN), DESCENDING + UNSOLVABLE)
    kinds = dict.fromkeys(chosen[:DESCENDING], "descending")
    kinds |= dict.fromkeys(chosen[DESCENDING:], "unsolvable")
    raw, planted = [], []
    for number, row in enumerate(train):
        question, answer = row["messages"][-1]["content"], row["answer"]
        kind = kinds.get(number, "")
        label = answer[::-1] if kind == "descending" else answer
        if kind == "unsolvable":
            # "mix" defines no order, so no model can know the label.
            question = question.replace("sort", "mix")
            label = "".join(rng.sample(answer, len(answer)))
        raw.append({"id": f"raw/{number}", "question": question, "answer": label, "task": "exact"})
        planted.append({"id": f"raw/{number}", "kind": kind, "answer": answer})
    copied = rng.sample(raw, COPIES)
    raw += [row | {"id": f"copy/{number}"} for number, row in enumerate(copied)]
    write_lines(small.data("raw"), raw)
    write_lines(small.data("held_out"), held_out)
    write_lines(small.data("planted"), planted)


def curate(small: Miniature, base: Path) -> dict[str, float]:
    """Filter the raw data by the paper's two stages; returns `found_labels`."""
    small.cli(
        small.data("distinct"),
        *("data", "dedupe", small.data("raw"), "--out", small.data("distinct")),
    )
    graded = small.grade("grade_base", "distinct", base)
    small.cli(
        small.data("stage1"),
        *("data", "difficulty", small.data("distinct"), "--samples", graded),
        *("--out", small.data("stage1"), "--task", "exact"),
    )
    first = small.train("first", "stage1", base)
    graded = small.grade("grade_first", "distinct", first / "hf" / "final")
    # Here the model has become good: problems that it solves each time are kept.
    small.cli(
        small.data("filtered"),
        *("data", "difficulty", small.data("distinct"), "--samples", graded),
        *("--out", small.data("filtered"), "--task", "exact", "--up-to", "1"),
        *("--labels", "relabel"),
    )
    return found_labels(small)


def found_labels(small: Miniature) -> dict[str, float]:
    """Shares of the wrong labels that curation found, and of right labels that it doubted."""
    report = json.loads(Path(f"{small.data('filtered')}.report.json").read_text())
    reasons = ("label_disagrees", "too_easy_when_relabelled")
    doubted = {drop["id"] for drop in report["drops"] if drop["reason"] in reasons}
    kept = read_jsonl(small.data("filtered"))
    doubted |= {row["id"] for row in kept if "original_answer" in row}
    present = {row["id"] for row in read_jsonl(small.data("distinct"))}
    kinds = {row["id"]: row["kind"] for row in read_jsonl(small.data("planted"))}
    wrong = {name for name in present if kinds.get(name) == "descending"}
    right = {name for name in present if kinds.get(name) == ""}
    unsolvable = {name for name in present if kinds.get(name) == "unsolvable"}
    return {
        "labels_found": len(doubted & wrong) / len(wrong),
        "labels_false": len(doubted & right) / len(right),
        "unsolvable_left": len(unsolvable & {row["id"] for row in kept} - doubted),
        "problems_raw": len(present) + COPIES,
        "problems_filtered": len(kept),
    }


def study(small: Miniature, base: Path, seed: int) -> dict[str, float]:
    """Held-out accuracy of each way of training the base model."""
    own = f"run.seed={seed}"
    raw = small.train(f"raw_{seed}", "distinct", base, own)
    rl_only = small.train(f"rl_only_{seed}", "filtered", base, own)
    examples = small.data(f"examples_{seed}")
    small.cli(
        examples,
        *("data", "sft", rl_only, "--out", examples, "--first-step", "8"),
        # There are no instruction data of five digits to mix in.
        *("--per-problem", "8", "--batch-size", "32", "--instruction-share", "0"),
    )
    report = json.loads(Path(f"{examples}.report.json").read_text())
    # sft_steps: four epochs over the SFT examples, as in the paper.
    steps = min(COLD_START_STEPS, report["figures"]["sft_steps"])
    both = small.train(
        f"sft_rl_{seed}", "filtered", base, *(own, f"sft.dataset={examples}", f"sft.steps={steps}")
    )
    return {
        "base": accuracy(rl_only, "before"),
        "raw_accuracy": accuracy(raw, "after"),
        "rl_only": accuracy(rl_only, "after"),
        "sft_only": accuracy(both, "before"),
        "sft_rl": accuracy(both, "after"),
    }


def accuracy(run: Path, label: str) -> float:
    """Held-out accuracy of a run's evaluation."""
    rows = read_jsonl(run / "metrics.jsonl")
    return next(float(row["eval/accuracy"]) for row in rows if row.get("label") == label)


def summarize(found: dict[str, float], studies: list[dict[str, float]]) -> dict[str, Any]:
    """The JSON object of the last line."""
    result: dict[str, Any] = dict(found)
    for key in studies[0]:
        found_mean = estimate([study[key] for study in studies])
        assert found_mean is not None
        result[key], result[f"{key}_se"] = found_mean.mean, found_mean.standard_error
    result["filtered_accuracy"] = result["rl_only"]
    result["filtered_accuracy_se"] = result["rl_only_se"]
    return result | {"seeds": len(studies)}


def print_table(result: dict[str, Any]) -> None:
    """Print the paper's comparison in miniature."""
    rows = [
        ("base model", "base"),
        ("RL only, raw data", "raw_accuracy"),
        ("RL only, filtered data", "rl_only"),
        ("SFT on its SFT examples only", "sft_only"),
        ("SFT, then RL", "sft_rl"),
    ]
    print(f"\n{'held-out accuracy':28}mean    standard error over {result['seeds']} seeds")
    for text, key in rows:
        error = result[f"{key}_se"]
        print(f"{text:28}{result[key]:.3f}   {'-' if error is None else f'{error:.3f}'}")
    print(
        f"\nWrong labels found: {result['labels_found']:.1%}; right labels doubted: "
        f"{result['labels_false']:.1%}; {result['problems_filtered']:.0f} of "
        f"{result['problems_raw']:.0f} problems are left"
    )


def _toml(value: object) -> str:
    """The value as inline TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def main() -> int:
    """Run the missing steps, print the table and the last line."""
    parser = argparse.ArgumentParser(description="the whole recipe in small")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    started = time.monotonic()
    small = Miniature(options.out)
    start, base = small.out / "start_model", small.run("base") / "hf" / "cold_start"
    small.call(start / "model.safetensors", "tools.make_tiny_model", start)
    counts = ("--train", TRAIN, "--held-out", HELD_OUT, "--sft-examples", SFT_EXAMPLES)
    tasks = small.out / "tasks"
    small.call(
        tasks / "sft.jsonl",
        *("tools.make_tasks", "sort", tasks, "--wrong-share", "0.6", *map(str, counts)),
    )
    plant(small, seed=0)
    teach = [f"sft.dataset={tasks}/sft.jsonl", f"sft.steps={COLD_START_STEPS}", "train.steps=0"]
    small.train("base", "raw", start, *teach, "eval.prompts=0")
    found = curate(small, base)
    studies = [study(small, base, seed) for seed in range(options.seeds)]
    plots = small.out / "analysis"
    small.cli(
        plots / "analysis.json", *("analyse", "weights", small.run("rl_only_0"), "--out", plots)
    )
    result = summarize(found, studies)
    print_table(result)
    print(f"Directions of the run rl_only_0: {plots}/analysis.md and its plots")
    print(json.dumps(result | {"wall_s": round(time.monotonic() - started, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
