"""`megatron-rl run --dry-run`: checks a run and grades made-up completions; starts no role.

The dry run makes every check of a run. It renders some prompts of each task and grades a right and
a wrong completion for each, by the run's rules, in grading processes. It calls the user's parts of
the objective with made-up groups and tokens.
"""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megatron_rl.cli.command_line.printing import say, show_table
from megatron_rl.config.errors import InputError, printable
from megatron_rl.config.thinking import ThinkTags, in_tags
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import prompts_of_run
from megatron_rl.launcher import preflight
from megatron_rl.launcher.continuation import changed_lines
from megatron_rl.launcher.dry_run_text import NOTHING, run_lines
from megatron_rl.launcher.objective_trial import try_objective
from megatron_rl.launcher.placement import ONE_NODE, Machines
from megatron_rl.launcher.prompt_record import (
    RECORD,
    check_same_prompts,
    make_record,
    pin_revisions,
)
from megatron_rl.launcher.reward_trial import (
    functions_of,
    refuse_faults,
    sample_of,
    try_rewards,
)
from megatron_rl.launcher.run_folder import check_run_folder, checkpoints_passed_over
from megatron_rl.protocol.render import open_renderer
from megatron_rl.protocol.tokenizer_child import call_in_child
from megatron_rl.protocol.types import Prompt, Score, ScoreFailed
from megatron_rl.rollout_queue.diagnosis import REFUSALS
from megatron_rl.trainer.sft_dataset import keep_sft_dataset
from verification.canned import Canned, Form, find_form, form_of_check, make_canned
from verification.library import Grading, Sample

PROMPTS_PER_TASK = 16
_RENDER_S = 120.0


class Rendered(NamedTuple):
    """A prompt as the model sees it."""

    text: str
    tail: str
    """End of the prompt, which a response may continue."""


class GradedPrompt(NamedTuple):
    """A prompt and the scores of its made-up completions."""

    prompt: Prompt
    form: Form
    right: Score | ScoreFailed | None
    """None if no right answer can be made up."""
    wrong: Score | ScoreFailed | None


class TaskReport(NamedTuple):
    """Findings about one task."""

    task: str
    prompts: int
    earned: float | None
    """Mean reward of right completions; None without any."""
    earned_wrong: float | None
    problems: list[str]
    """Reasons why no completion, or every completion, earns the reward."""
    warnings: list[str]
    """Faults of single prompts."""


def dry_run(config: Config, console: Console, machines: Machines = ONE_NODE) -> int:
    """Check a run without starting it; exit code 1 when it could learn nothing.

    Raises InputError as `run` does.
    """
    config = pin_revisions(config)
    found = preflight.check(config, is_known_folder=True, calls_rewards=False)
    say(console, *_notes_of_start(config, machines, found))
    parts = try_objective(config) if config.train.steps else []
    for note in [*found.notes, *parts]:
        say(console, note)
    dropped = frozenset(prompt.id for prompt in found.dropped)
    sets = prompts_of_run(config, dropped)
    tasks = config.reward.all_tasks
    chosen = choose_prompts(sets.all)
    graded = [one for one in chosen if not tasks[one.task].is_decided_by_environment]
    reports = grade_made_up(graded, config)
    if reports:
        _print(reports, console)
    say(console, *run_lines(config, machines), NOTHING)
    return int(any(report.problems for report in reports))


def _notes_of_start(
    config: Config, machines: Machines, prompts: preflight.PromptReport
) -> list[str]:
    """Warnings and refusals of a run that would start on this host now, as notes.

    They do not end the dry run: the real run may be on another host or in another folder.
    """
    notes: list[str] = []
    try:
        resumed = check_run_folder(config).checkpoint
        notes += [f"warning: {text}" for text in checkpoints_passed_over(config, resumed)]
        if resumed is not None:
            record = make_record(config, prompts.files, prompts.own_files)
            check_same_prompts(config.run.dir / RECORD, record)
            notes.append(f"note: a run would resume from {resumed}; what came before is done")
            notes += changed_lines(config)
    except InputError as error:
        notes.append(f"note: a run would be refused: {error}")
    if machines.gpus_per_node is None:
        try:
            notes += preflight.notes_of_host(config)
        except InputError as error:
            notes.append(f"note: a run on this host would be refused: {error}")
    return notes


def choose_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """At most PROMPTS_PER_TASK of each task, spread evenly over its prompts."""
    by_task: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt)
    chosen = []
    for group in by_task.values():
        step = max(1, -(-len(group) // PROMPTS_PER_TASK))
        chosen += group[::step]
    return chosen


def grade_made_up(prompts: Sequence[Prompt], config: Config) -> list[TaskReport]:
    """Grade a right and a wrong completion of each prompt; one report a task.

    Raises InputError for a bad tokenizer or a failing user function, GradingError for unusable
    tests.
    """
    rendered = call_in_child(
        render_all, config, list(prompts), what="rendering the prompts", limit_s=_RENDER_S
    )
    taught = _taught_forms(config)
    format_checks = config.reward.format_checks
    rows: list[tuple[Prompt, Form, Rendered, Canned | None]] = []
    for prompt, seen in zip(prompts, rendered, strict=True):
        form = taught(prompt.task) or _asked_form(seen.text, config.render.tags)
        if config.render.form_known:
            form = form_of_check(format_checks[prompt.task])
        canned = make_canned(
            prompt,
            config.reward.all_tasks[prompt.task].compare,
            form,
            tail=seen.tail,
            count=config.reward.tests_per_problem,
            tags=config.render.tags,
        )
        rows.append((prompt, form, seen, canned))
    graded = {prompt.task for prompt, _, _, canned in rows if canned}
    try_rewards([prompt for prompt in prompts if prompt.task not in graded], config)
    by_task: dict[str, list[GradedPrompt]] = {}
    for one in _grade(rows, config):
        by_task.setdefault(one.prompt.task, []).append(one)
    return [judge_task(task, group, config) for task, group in by_task.items()]


def render_all(config: Config, prompts: list[Prompt]) -> list[Rendered]:
    """Render prompts; runs in a child process, because it imports transformers."""
    renderer = open_renderer(config)
    found = []
    for prompt in prompts:
        ids = renderer.render(prompt.messages, 1, task=prompt.task, is_program=prompt.is_program)
        found.append(Rendered(renderer.decode(ids), renderer.tail(ids)))
    return found


def _asked_form(text: str, tags: ThinkTags) -> Form:
    """The form that a rendered prompt asks for. No prompt needs to ask for thoughts in channels."""
    form = find_form(text, tags)
    return form._replace(has_thoughts=form.has_thoughts or tags.are_channels)


def _taught_forms(config: Config) -> Callable[[str], Form | None]:
    """f(task): most frequent form of the task's SFT examples, or of all if the task has none."""
    if config.sft.cold_start_dataset is None:
        return lambda task: None
    forms: dict[str, collections.Counter[Form]] = collections.defaultdict(collections.Counter)
    for example in keep_sft_dataset(config.sft.cold_start_dataset):
        response = in_tags(example.answer, config.render.tags)
        forms[example.task][find_form(response, config.render.tags)] += 1
    of_all = sum(forms.values(), collections.Counter[Form]())
    return lambda task: (forms.get(task) or of_all).most_common(1)[0][0]


def _grade(
    rows: Sequence[tuple[Prompt, Form, Rendered, Canned | None]], config: Config
) -> list[GradedPrompt]:
    samples: list[Sample] = []
    first: dict[str, int] = {}
    owners: list[Prompt] = []
    for prompt, _, seen, canned in rows:
        if canned and functions_of(prompt.task, config.reward):
            first.setdefault(prompt.task, len(samples))
        for text in canned or ():
            owners.append(prompt)
            samples.append(sample_of(prompt, text, seen.tail))
    with Grading.of(config) as grading:
        # One completion per task first: a user function that fails is refused early.
        early = list(first.values())
        found = grading.score([samples[place] for place in early])
        refuse_faults([owners[place] for place in early], found, config)
        late = [place for place in range(len(samples)) if place not in early]
        found += grading.score([samples[place] for place in late])
    by_place = dict(zip([*early, *late], found, strict=True))
    scores = iter([by_place[place] for place in range(len(samples))])
    return [
        GradedPrompt(prompt, form, *((next(scores), next(scores)) if canned else (None, None)))
        for prompt, form, _, canned in rows
    ]


def judge_task(task: str, group: Sequence[GradedPrompt], config: Config) -> TaskReport:
    """Problems of the configuration and warnings about prompts, from the scores of a task."""
    right = [r for r in group if isinstance(r.right, Score)]
    wrong = [r for r in group if isinstance(r.wrong, Score)]
    problems, warnings = [], []
    failed = [s for r in group for s in (r.right, r.wrong) if isinstance(s, ScoreFailed)]
    if failed:
        problems.append(f"{len(failed)} completions could not be graded: {failed[0].reason}")
    missed = [r for r in right if r.right.parts["correct"] <= 0]
    passed = {r.form for r in right if r.right.reason not in REFUSALS}
    # If the form passes with other answers, the answer is at fault, not the form.
    refused = [r for r in missed if r.right.reason in REFUSALS and r.form not in passed]
    missed = [r for r in missed if r not in refused]
    if refused:
        problems.append(_refusal(refused, len(right), task, config))
    if missed and config.reward.correct > 0:
        text = _missed(missed, len(right))
        (problems if len(missed) == len(right) else warnings).append(text)
    paid = [r for r in wrong if r.wrong.parts["correct"] > 0]
    if paid:
        problems.append(f"a wrong answer is paid as right for {_where(paid)}")
    if config.reward.correct == 0 and not config.reward.extras_of(task):
        problems.append(
            "reward.correct is 0 and no reward.extra applies to the task: right and wrong answers "
            "earn the same; set reward.correct (the paper's is 0.9)"
        )
    if config.reward.language and right and not any(r.right.parts.get("language") for r in right):
        warnings.append(
            "none of these answers earns reward.language, though each is in the words of its own "
            "question: the questions are too short, or their language is not known"
        )
    if not right and not failed:
        warnings.append("no right answer could be made up: only a program passes unit tests")
    return TaskReport(
        task,
        len(group),
        _mean([r.right.reward for r in right]),
        _mean([r.wrong.reward for r in wrong]),
        problems,
        warnings,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _refusal(refused: Sequence[GradedPrompt], count: int, task: str, config: Config) -> str:
    reason = refused[0].right.reason
    form = refused[0].form.describe(config.render.tags)
    format_check = config.reward.format_checks[task]
    return (
        f"no reward possible: the format check {format_check!r} refuses ({reason}) a right answer "
        f"in the form that the prompt asks for, {form}, in {len(refused)} of {count} prompts. "
        "Let render.system_prompts (or your render.system_prompt) ask for what the format check "
        f"demands, or set reward.tasks.{task}.format_check; for a model that was taught the form "
        "set expert.render.form_known=true"
    )


def _missed(missed: Sequence[GradedPrompt], count: int) -> str:
    first = missed[0]
    return (
        f"the reference answer itself is graded wrong ({first.right.reason}) in {len(missed)} of "
        f"{count} prompts: {_where(missed)}"
    )


def _where(group: Sequence[GradedPrompt]) -> str:
    prompt = group[0].prompt
    return f"{prompt.place or prompt.id!r} (answer {prompt.answer[:80]!r})"


def _print(reports: Sequence[TaskReport], console: Console) -> None:
    table = Table("task", "prompts", "right answer earns", "wrong answer earns", "verdict")
    for report in reports:
        earned = [
            "-" if value is None else f"{value:.3f}"
            for value in (report.earned, report.earned_wrong)
        ]
        verdict = "no" if report.problems else "ok"
        table.add_row(report.task, str(report.prompts), *earned, verdict)
    show_table(console, table)
    for report in reports:
        for kind, texts in (("problem", report.problems), ("warning", report.warnings)):
            for text in texts:
                line = printable(f"{kind}: {report.task}: {text}")
                say(console, line)
