"""Solved prompts leave, harder ones come: by hand, and against planted solve rates."""

import collections
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.prompts import CurriculumConfig
from megatron_rl.config.tree import Config
from megatron_rl.data.prompts import PromptSets, PromptStream
from megatron_rl.protocol.queue_state import PromptVisits
from megatron_rl.protocol.types import Prompt
from megatron_rl.rollout_queue.curriculum import Curriculum, Visit
from tests.rollout_queue.makers import make_prompt
from tests.rollout_queue.staged_run import StagedRun


def prompt(name: str, pass_rate: float | None = None) -> Prompt:
    return msgspec.structs.replace(make_prompt(name), pass_rate=pass_rate)


def sets(*sources: list[Prompt]) -> PromptSets:
    return PromptSets(list(sources), [1.0] * len(sources), [], 0)


def solved(name: str, times: int = 1) -> list[Visit]:
    return [Visit(name, right=4, graded=4, size=4)] * times


def counts(curriculum: Curriculum) -> dict[str, float]:
    return {m.name.removeprefix("curriculum/"): m.value for m in curriculum.metrics()}


def active(curriculum: Curriculum, prompts: list[Prompt]) -> set[str]:
    return {prompt.id for prompt in prompts if curriculum(prompt)}


def test_a_prompt_is_retired_after_so_many_solved_visits_in_a_row() -> None:
    prompts = [prompt("a"), prompt("b"), prompt("c")]
    curriculum = Curriculum(CurriculumConfig(retire_after=2), sets(prompts))
    missed, ungraded = Visit("a", 3, 4, 4), Visit("a", 3, 3, 4)
    curriculum.note([*solved("a"), missed, *solved("a"), ungraded, *solved("a")])
    # A group of which nothing was graded is no visit.
    curriculum.note([*solved("b"), Visit("b", 0, 0, 4), *solved("b")])
    assert active(curriculum, prompts) == {"a", "c"} and curriculum.count(0) == 2
    curriculum.note(solved("a"))
    assert active(curriculum, prompts) == {"c"} and curriculum.count(0) == 1
    # A group that was open when its prompt was retired does not bring it back.
    curriculum.note([Visit("a", 0, 4, 4)])
    assert active(curriculum, prompts) == {"c"} and curriculum.count(0) == 1
    assert curriculum.state().prompts == {}
    curriculum.commit()
    assert curriculum.state().prompts["a"] == PromptVisits(visits=7, solved=0, is_retired=True)
    assert counts(curriculum) == {
        "prompts_active": 1, "prompts_retired": 2, "prompts_admitted": 3, "prompts_readmitted": 0,
    }  # fmt: skip


def test_the_next_band_is_admitted_when_the_window_is_full_of_right_ones() -> None:
    prompts = [prompt("easy", 0.9), prompt("edge", 0.5), prompt("hard", 0.1), prompt("none", 0.0)]
    prompts.append(prompt("new"))
    config = CurriculumConfig(bands=[0.5, 0.1], admit_at=0.75, window_visits=2)
    curriculum = Curriculum(config, sets(prompts))
    assert active(curriculum, prompts) == {"easy", "edge", "new"}
    curriculum.note([Visit("easy", 4, 4, 4)])
    assert curriculum.count(0) == 3  # one visit is no window
    curriculum.note([Visit("edge", 1, 4, 4), Visit("new", 4, 4, 4)])
    assert curriculum.count(0) == 3  # 5 of 8
    curriculum.note([Visit("easy", 2, 4, 4)])  # with the one before: 6 of 8
    assert active(curriculum, prompts) == {"easy", "edge", "new", "hard"}
    found = counts(curriculum)
    assert (found["bands_admitted"], found["prompts_admitted"]) == (2, 4)


def test_retiring_everything_admits_the_next_band_then_begins_anew() -> None:
    prompts = [prompt("easy", 0.9), prompt("hard", 0.1)]
    curriculum = Curriculum(CurriculumConfig(retire_after=1, bands=[0.5, 0.0]), sets(prompts))
    curriculum.note(solved("easy"))
    curriculum.make_room([1.0])
    assert active(curriculum, prompts) == {"hard"}
    curriculum.note(solved("hard"))
    curriculum.make_room([1.0])
    assert active(curriculum, prompts) == {"easy", "hard"}
    assert counts(curriculum)["prompts_readmitted"] == 2


def test_a_source_that_is_used_up_leaves_the_draws_to_the_others() -> None:
    first, second = [prompt("a"), prompt("b")], [prompt("c"), prompt("d")]
    both = sets(first, second)
    curriculum = Curriculum(CurriculumConfig(retire_after=1), both)
    curriculum.note(solved("a") + solved("b") + solved("d"))
    stream = PromptStream(both, seed=3)
    curriculum.make_room([5.0, 1.0])
    assert {stream.next([5.0, 1.0], curriculum).id for _ in range(20)} == {"c"}
    # A stage that draws from the first alone gets its prompts again, those of the other stay away.
    curriculum.make_room([1.0, 0.0])
    assert {stream.next([1.0, 0.0], curriculum).id for _ in range(20)} == {"a", "b"}
    assert counts(curriculum)["prompts_readmitted"] == 2 and not curriculum(second[1])


def test_a_restored_curriculum_draws_the_same() -> None:
    prompts = [prompt(f"p{n}", n / 20) for n in range(20)]
    config = CurriculumConfig(retire_after=1, bands=[0.6, 0.3], admit_at=0.5, window_visits=3)

    def draw(stream: PromptStream, curriculum: Curriculum, times: int) -> list[str]:
        drawn = []
        for turn in range(times):
            curriculum.make_room([1.0])
            drawn.append(stream.next(None, curriculum).id)
            curriculum.note([Visit(drawn[-1], 4 if turn % 3 else 1, 4, 4)])
        return drawn

    stream, curriculum = PromptStream(sets(prompts), 1), Curriculum(config, sets(prompts))
    draw(stream, curriculum, 17)
    curriculum.commit()
    other, restored = PromptStream(sets(prompts), 1), Curriculum(config, sets(prompts))
    other.restore(stream.state())
    restored.restore(msgspec.json.decode(
        msgspec.json.encode(curriculum.state()), type=type(curriculum.state())
    ))  # fmt: skip
    assert draw(other, restored, 60) == draw(stream, curriculum, 60)
    for one in (restored, curriculum):
        one.commit()
    assert restored.state() == curriculum.state()
    with pytest.raises(InputError, match="names the prompt 'p1.*lack"):
        Curriculum(config, sets([prompt("x", 0.5)])).restore(curriculum.state())


def test_bands_without_any_pass_rate_are_refused() -> None:
    with pytest.raises(InputError, match='no train prompt has one: add "pass_rate"'):
        Curriculum(CurriculumConfig(bands=[0.5]), sets([prompt("a")]))


SOLVE_RATES = {"known": 1.0, "even": 0.5, "never": 0.0}
"""Of 30, 15 and 15 prompts."""
STEPS = 24


def planted() -> list[Prompt]:
    kinds = ["known"] * 30 + ["even"] * 15 + ["never"] * 15
    return [prompt(f"{kind}-{n}", SOLVE_RATES[kind]) for n, kind in enumerate(kinds)]


def curriculum_run(folder: Path, seed: int, until: int = STEPS, **curriculum: object) -> StagedRun:
    folder.mkdir(exist_ok=True)
    config = Config.model_validate({
        "run": {"dir": folder, "seed": seed}, "eval": {"prompts": 0},
        "train": {"steps": STEPS, "prompts_per_batch": 4, "group_size": 4},
        "sampling": {"max_new_tokens": 5}, "curriculum": curriculum,
    })  # fmt: skip
    run = StagedRun(
        config, seed=seed, prompts=planted(),
        solves=lambda prompt: SOLVE_RATES[prompt.id.split("-")[0]],
    )  # fmt: skip
    run.run(until)
    return run


def zero_variance_share(run: StagedRun) -> float:
    """Of the groups of the second half of the run, with equal rewards."""
    late = [batch.metrics for batch in run.batches[STEPS // 2 :]]
    flat = sum(metrics["queue/groups_dropped_zero_variance"][0] for metrics in late)
    return flat / (flat + sum(metrics["queue/groups_trained"][0] for metrics in late))


def test_flat_groups_become_fewer(tmp_path: Path) -> None:
    without = zero_variance_share(curriculum_run(tmp_path / "without", 0))
    retiring = curriculum_run(tmp_path / "retiring", 0, retire_after=1)
    banded = curriculum_run(tmp_path / "banded", 0, retire_after=1, bands=[0.9, 0.3])
    # Of all prompts 45 of 60 are always of zero variance, and of even ones 2 of 16 groups: 0.75 +
    # 0.25 / 8.
    assert abs(without - 0.78) < 0.08
    # Once known ones are retired 15 of 30 are: 0.5 + 0.5 / 8. Below the bands, never: 1 / 8.
    assert zero_variance_share(retiring) < 0.7 and zero_variance_share(banded) < 0.3
    late = retiring.batches[-1].metrics
    assert late["curriculum/prompts_retired"][0] == 60 - late["curriculum/prompts_active"][0] >= 25
    trained = collections.Counter(asked.problem for _, asked in banded.requests)
    assert not [problem for problem in trained if "never" in problem]


def test_statistics_are_saved_and_restored_with_the_queue(tmp_path: Path) -> None:
    before = curriculum_run(tmp_path, 2, until=10, retire_after=1)
    state = before.save()
    assert state.curriculum is not None
    retired = {name for name, known in state.curriculum.prompts.items() if known.is_retired}
    assert retired and all(name.startswith(("known", "even")) for name in retired)
    # Visits are those of batches: unfinished groups, which are generated again, are none yet.
    counted = sum(known.visits for known in state.curriculum.prompts.values())
    assert counted + len(state.unfinished) == state.groups_opened == state.cursor.draws
    after = StagedRun(
        before.config, seed=5, state=state, prompts=planted(),
        solves=lambda prompt: SOLVE_RATES[prompt.id.split("-")[0]],
    )  # fmt: skip
    after.run(STEPS)
    unfinished = {group.prompt_id for group in state.unfinished}
    again = {asked.problem.removeprefix("question ") for _, asked in after.requests}
    assert not (again & retired) - unfinished
