"""Runs all roles of a run on this host, in order, and ends them all.

Used by `megatron-rl run`, and in part by `megatron-rl eval`. One process, one thread.

| phase            | runs                                               | ends when                |
|------------------|----------------------------------------------------|--------------------------|
| cold start       | sft ranks; beside them the serving roles load      | the sft ranks exit 0     |
| its choice       | the serving roles, on each model to choose from    | the last queue exits 0   |
| RL               | trainer ranks                                      | the trainer ranks exit 0 |
| SFT baseline     | sft ranks; beside them the queue's last evaluation | both exit 0              |
| its accuracy     | the serving roles, on the SFT baseline's weights   | the queue exits 0        |

Serving roles: queue, generators, verifier. Beside the trainer ranks runs the scorer, where
`[algorithm.reference]` asks for one. All processes read RUN_DIR/config.toml, but those that
evaluate a model without training, which read RUN_DIR/config.LABEL.toml. A generator, verifier or
scorer that dies is started again (`restarts.py` says when); the death of any other role ends the
run.
"""

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_rl.config.files import dump_toml, override
from megatron_rl.config.tree import Config
from megatron_rl.data.dropped_prompts import write_dropped
from megatron_rl.launcher import preflight
from megatron_rl.launcher.cold_start import (
    begin_with,
    cold_start_folder,
    first_model,
    is_due,
    is_evaluated,
    is_trained,
    left_behind_text,
    steps_left_behind,
)
from megatron_rl.launcher.cpu_host import notes_of_host
from megatron_rl.launcher.placement import ONE_NODE
from megatron_rl.launcher.ports import draw_label, ports_text, resolve_ports
from megatron_rl.launcher.prompt_record import pin_revisions, record_prompts
from megatron_rl.launcher.restarts import generator_rule, scorer_rule, verifier_rule
from megatron_rl.launcher.run_folder import (
    CONFIG,
    SUMMARY,
    Beginning,
    FolderLock,
    check_run_folder,
    locked,
    set_aside,
    step_of,
    write_config,
    write_evaluation_config,
)
from megatron_rl.launcher.session import Session
from megatron_rl.observe.choice import choose
from megatron_rl.observe.deaths import SAME_COMMAND
from megatron_rl.observe.facts import find_export, run_facts
from megatron_rl.observe.summary import RunFacts, render_text, summarize
from megatron_rl.protocol.checkpoint_folder import find_resume
from megatron_rl.protocol.exports import COLD_START, FINAL, SFT_BASELINE, candidate_name
from megatron_rl.protocol.metrics import read_jsonl, stream_rows
from megatron_rl.protocol.whole_file import write_whole
from megatron_rl.rollout_queue.replay.datasets import prepare_datasets
from megatron_rl.weights.folders.staging import recover

TRAINER = "trainer"
SCORER = "scorer-0"
# Over expert.eval.timeout_s: the queue itself gives up first and says why.
_EVAL_MARGIN_S = 60.0

log = logging.getLogger(__name__)


def run(config: Config, console: Console) -> None:
    """Cold start, reinforcement learning, SFT baseline, evaluation, summary.

    Raises InputError before anything starts, RoleDied, DeadlineExceeded.
    """
    config = pin_revisions(config)
    prompts = preflight.check(config)
    ONE_NODE.place(config)
    for note in notes_of_host(config):
        console.print(note, style="bold red", highlight=False, soft_wrap=True)
    with locked(config.run.dir) as lock:
        # Once more: another launcher may have had the lock until now.
        beginning = check_run_folder(config)
        config = begin(config, beginning, prompts, console)
        _run_phases(config, console, lock=lock, is_resumed=beginning.checkpoint is not None)


def begin(
    config: Config, beginning: Beginning, prompts: preflight.PromptReport, console: Console
) -> Config:
    """Prepare the run folder, and say where the run begins; returns what `prepare_run_folder` does.

    The caller has the lock of the folder.
    """
    resumed = beginning.checkpoint
    if beginning.is_again and resumed is None:
        console.print(begin_anew(config), highlight=False, soft_wrap=True)
    config = prepare_run_folder(config, resumed, prompts, console)
    if resumed is not None:
        console.print(_resumption_text(config, resumed), highlight=False, soft_wrap=True)
    return config


def begin_anew(config: Config) -> str:
    """Set aside what an attempt left that the run cannot go on from; the text about it."""
    run_dir, steps = config.run.dir, steps_left_behind(config)
    kept = f", {left_behind_text(config, steps)}" if steps else ""
    return (
        f"{run_dir} holds an attempt of this run that ended before its first checkpoint. The run "
        f"begins anew{kept}; what else the attempt left is now in {set_aside(run_dir, steps)}."
    )


def _resumption_text(config: Config, resumed: Path) -> str:
    return (
        f"Resuming {config.run.dir} after step {step_of(resumed)} of {config.train.steps}, from "
        f"{resumed}. What was generated but not trained on is generated again."
    )


def last_words(config: Config) -> str:
    """What becomes of a run that has ended early: where the same command resumes it."""
    run_dir = config.run.dir
    if not (run_dir / CONFIG).exists() or (run_dir / SUMMARY).exists():
        return ""
    checkpoint = find_resume(config.checkpoint, run_dir)
    if checkpoint is not None:
        step = f"step {step_of(checkpoint)} of {config.train.steps}"
        return f"{SAME_COMMAND} resumes the run after {step}, from {checkpoint}."
    every = config.checkpoint.every_steps
    why = f"no checkpoint is complete yet (checkpoint.every_steps={every})"
    if not every:
        why = "no checkpoints are made (checkpoint.every_steps=0)"
    steps = steps_left_behind(config)
    kept = f", {left_behind_text(config, steps)}" if steps else ""
    return f"Nothing is saved: {why}. {SAME_COMMAND} begins the run anew{kept}."


def _run_phases(config: Config, console: Console, *, lock: FolderLock, is_resumed: bool) -> None:
    with Session(config, console, lock=lock, is_resumed=is_resumed) as session:
        session.start_metrics()
        if config.train.steps:
            _train(session)
        else:
            _evaluate_only(session)
        # The SFT baseline spends what reinforcement learning spent: without a step there is none.
        if config.sft.baseline and config.train.steps and config.eval.is_wanted:
            _evaluate_sft_baseline(session)
    conclude(config, session.wall_s, console)


def conclude(config: Config, wall_s: dict[str, float], console: Console) -> None:
    """Write and print the summary of a run that has ended. wall_s: seconds of its phases."""
    run_dir = config.run.dir

    def facts() -> RunFacts:
        return run_facts(config, run_dir, wall_s, find_export(run_dir))

    summary = write_summary(run_dir, facts())
    # Found anew: the summary is one of the files that the text names.
    text = f"{render_text(summary, facts())}\n{_next_commands(run_dir)}"
    console.print("\n" + text, markup=False, highlight=False, soft_wrap=True)


def _next_commands(run_dir: Path) -> str:
    """How to look at the run, with the command as this shell finds it."""
    command = Path(sys.executable).with_name("megatron-rl")
    if not command.exists():
        command = Path("megatron-rl")
    elif command.is_relative_to(Path.cwd()):
        command = command.relative_to(Path.cwd())
    return f"Look at it          {command} report {run_dir} (plots), view {run_dir} (rollouts)"


def log_into(path: Path) -> None:
    """Append what this launcher logs to a file."""
    path.parent.mkdir(exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(
        logging.Formatter("%(asctime)s launch %(levelname)s %(name)s: %(message)s")
    )
    logging.getLogger().addHandler(handler)
    logging.getLogger("megatron_rl").setLevel(logging.INFO)


def write_summary(run_dir: Path, facts: RunFacts) -> dict[str, Any]:
    """Sum up a run that has ended, in RUN/summary.json."""
    summary = summarize(stream_rows(run_dir / "metrics.jsonl"), facts)
    write_whole(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _train(session: Session) -> None:
    """Cold start and reinforcement learning; the generators load while the cold start runs."""
    config = session.config
    if config.sft.candidates:
        # To choose, all of them are evaluated before the queue of the training starts.
        model = _cold_start(session)
        _serve(session)
    else:
        _serve(session)
        model = _cold_start(session)
    with session.phase("rl", "reinforcement learning"):
        arguments = [override("model.path", str(model))]
        session.start_ranks(TRAINER, "megatron_rl.trainer.train", arguments)
        if config.algorithm.needs_scorer:
            _start_scorer(session, arguments)
        session.wait_for(TRAINER)
    # Beside the last evaluation, unless its engines need the memory.
    comes_last = config.generator.release_memory
    if config.sft.baseline and not comes_last:
        _continue_cold_start(session, model)
    with session.phase("last_evaluation", "evaluation after the last step"):
        session.wait_for("queue", "the last evaluation", eval_limit_s(config))
    session.end_serving()
    if config.sft.baseline and comes_last:
        _continue_cold_start(session, model)


def _start_scorer(session: Session, arguments: Sequence[str]) -> None:
    """Beside the trainer, which waits for it and tells it to end."""
    config = session.config
    rule = scorer_rule(config, SCORER, until=TRAINER)
    session.start(
        SCORER, "generation.scorer", session.config_path, arguments,
        outlives=TRAINER, restarts=rule, gpus=session.scorer_gpus(),
    )  # fmt: skip


def _evaluate_only(session: Session) -> None:
    """Cold start if any, then its accuracy: a run without a step of reinforcement learning."""
    model = _cold_start(session)
    if session.config.eval.is_wanted:
        with session.phase("evaluation", "evaluation"):
            queue = serve_evaluation(session, "before", model)
            session.wait_for(queue, "the evaluation", eval_limit_s(session.config))
        session.end_serving()


def _cold_start(session: Session) -> Path:
    """Folder of the model that reinforcement learning starts from."""
    config = session.config
    if is_due(config, is_resumed=session.is_resumed):
        if not is_trained(config):
            with session.phase("cold_start", "supervised cold start"):
                session.start_ranks("sft", "megatron_rl.trainer.sft", [])
                session.wait_for("sft")
        if config.sft.candidates:
            with session.phase("cold_start_choice", "choice among models of the cold start"):
                _choose(session)
    return first_model(config, is_resumed=session.is_resumed)


def _choose(session: Session) -> None:
    """Evaluate the models that the cold start exported, and begin with the most accurate one."""
    config = session.config
    steps, metrics = config.sft.candidates, config.run.dir / "metrics.jsonl"
    for step in steps:
        if not is_evaluated(config, read_jsonl(metrics), step):
            label = candidate_name(step)
            queue = serve_evaluation(session, label, session.hf_folder(label))
            session.wait_for(queue, f"the evaluation of {label}", eval_limit_s(config))
            session.end_serving()
    begin_with(config, choose(read_jsonl(metrics), steps, config.sft.choose_by))


def _continue_cold_start(session: Session, model: Path) -> None:
    with session.phase("sft_baseline", "SFT baseline: supervised training continues"):
        arguments = ["--sft-baseline", override("model.path", str(model))]
        session.start_ranks("sft-baseline", "megatron_rl.trainer.sft", arguments)
        session.wait_for("sft-baseline")


def _evaluate_sft_baseline(session: Session) -> None:
    with session.phase("sft_baseline_evaluation", "evaluation of the SFT baseline"):
        queue = serve_evaluation(session, SFT_BASELINE, session.hf_folder(SFT_BASELINE))
        session.wait_for(queue, "the SFT baseline's evaluation", eval_limit_s(session.config))
    session.end_serving()


def _serve(session: Session) -> None:
    """Start the queue, generators and verifiers for training."""
    comes_first = is_due(session.config, is_resumed=session.is_resumed)
    after = ["--after", str(cold_start_folder(session.config))] if comes_first else []
    _start_serving(session, session.config_path, queue_arguments=after)


def serve_evaluation(
    session: Session, label: str, model: Path, *, queue_arguments: Sequence[str] = ()
) -> str:
    """Start the same to evaluate a model folder once; returns the queue's name."""
    path = write_evaluation_config(session.config, label, model)
    return _start_serving(session, path, label, queue_arguments=queue_arguments)


def _start_serving(
    session: Session, config_path: Path, label: str = "", *, queue_arguments: Sequence[str] = ()
) -> str:
    # It ended with the serving roles before these.
    session.start_metrics()
    suffix = f"-{label}" if label else ""
    queue = f"queue{suffix}"
    only = ["--evaluate-only", label] if label else []
    arguments = [*only, *queue_arguments]
    session.start(queue, "megatron_rl.rollout_queue.server", config_path, arguments)
    gpus = session.engine_gpus()
    for i in range(session.config.generator.replicas):
        name = f"generator-{i}{suffix}"
        # The trainer's publishes are where a new one gets its weights, if not from the folder.
        until = queue if only else TRAINER
        rule = generator_rule(session.config, f"generator-{i}", role=name, until=until)
        session.start(
            name, "generation.worker", config_path, ["--index", str(i)],
            outlives=queue, restarts=rule, gpus=gpus.get(i, range(0)),
        )  # fmt: skip
    name = f"verifier{suffix}"
    rule = verifier_rule(session.config, "verifier", role=name, until=queue)
    session.start(name, "verification.worker", config_path, outlives=queue, restarts=rule)
    return queue


def eval_limit_s(config: Config) -> float:
    """Within which all that is evaluated must be done; the queue itself gives up first."""
    return config.generator.start_timeout_s + config.eval.all_timeout_s + _EVAL_MARGIN_S


def prepare_run_folder(
    config: Config,
    resumed: Path | None,
    prompts: preflight.PromptReport,
    console: Console,
    *,
    replaces_config: bool = False,
) -> Config:
    """Resolve ports and save the tree that all processes read; say what is known of the prompts.

    replaces_config: an evaluation goes on, perhaps on other ports.
    """
    run_config = config.run.model_copy(update={"dir": config.run.dir.resolve()})
    resolved = draw_label(resolve_ports(config.model_copy(update={"run": run_config})))
    (resolved.run.dir / "logs").mkdir(parents=True, exist_ok=True)
    for name in (COLD_START, SFT_BASELINE, FINAL):
        recover(resolved.run.dir / "hf" / name)
    # Before the configuration is replaced: it may refuse to go on.
    record_prompts(resolved, prompts.files, is_resumed=resumed is not None)
    if replaces_config:
        write_whole(resolved.run.dir / CONFIG, dump_toml(resolved))
    else:
        write_config(resolved, resumed)
    write_dropped(resolved.run.dir, prompts.dropped)
    notes = [*prompts.notes, *prepare_datasets(resolved)]
    log_into(resolved.run.dir / "logs" / "launch.log")
    log.info("ports: %s", ports_text(resolved.ports))
    for note in notes:
        log.info("%s", note)
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    return resolved
