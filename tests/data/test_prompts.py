import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.errors import InputError
from megatron_rl.config.evaluation import EvalSet
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.tree import Config, PromptSource
from megatron_rl.data.prompts import PromptSets, PromptStream, prompts_of_run, read_prompts
from megatron_rl.protocol.types import Prompt
from tests.rollout_queue.makers import make_prompt


def line(question: str, split: str = "train", **more: object) -> str:
    row = {
        "task": "math", "messages": [{"role": "user", "content": question}], "answer": "1",
        "split": split, **more,
    }  # fmt: skip
    return json.dumps(row)


def write(folder: Path, *lines: str) -> PromptSource:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return PromptSource(path=path)


def own_source(source: PromptSource, seed: int) -> list[Prompt]:
    return [make_prompt("own"), make_prompt("own held", split="held_out")]


def test_jsonl_prompts_are_split_and_held_out_questions_leave_the_train_split(
    tmp_path: Path,
) -> None:
    source = write(
        tmp_path, line("a?"), line("What  is B?"), "", line("c\u2028?", id="mine"),
        line("what is b?", "held_out"),
    )  # fmt: skip
    sets = read_prompts([source], seed=0).divide()
    assert [[p.id for p in prompts] for prompts in sets.train] == [["prompts:1", "mine"]]
    assert [p.id for p in sets.held_out] == ["prompts:5"]
    assert sets.duplicates_removed == 1
    assert sets.describe() == (
        "prompts: 2 for training, 1 held out; 1 train prompts removed because their question is "
        "held out"
    )


def test_dropped_prompts_are_in_no_split_and_empty_sources_leave_the_mixture(
    tmp_path: Path,
) -> None:
    source = write(tmp_path, line("a?"), line("b?"), line("c?", "held_out"), line("d?", "held_out"))
    other = PromptSource(kind="tests.data.test_prompts:own_source", weight=3.0)
    everything = read_prompts([source, other], seed=0).divide()
    assert (everything.weights, everything.dropped) == ([1.0, 3.0], 0)
    dropped = frozenset({"prompts:2", "prompts:3", "own"})
    sets = read_prompts([source, other], seed=0).divide(dropped)
    assert [[p.id for p in prompts] for prompts in sets.train] == [["prompts:1"]]
    assert [p.id for p in sets.held_out] == ["own held", "prompts:4"]
    assert (sets.weights, sets.dropped) == ([1.0], 3)
    assert sets.describe().endswith(
        "1 for training, 2 held out; 3 left out (prompts_dropped.jsonl)"
    )


def test_missing_file_and_missing_path_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the prompts .*none.jsonl"):
        read_prompts([PromptSource(path=tmp_path / "none.jsonl")], seed=0).divide()
    with pytest.raises(InputError, match="needs a path"):
        read_prompts([PromptSource()], seed=0).divide()
    with pytest.raises(InputError, match=r"add a \[\[prompts\]\] section"):
        read_prompts([], seed=0).divide()


def test_source_kind_may_be_a_function_and_unknown_kinds_are_named(tmp_path: Path) -> None:
    kind = "tests.data.test_prompts:own_source"
    sets = read_prompts([PromptSource(kind=kind), PromptSource(kind=kind)], seed=0).divide()
    assert [p.id for prompts in sets.train for p in prompts] == ["own", "1:own"]
    with pytest.raises(InputError, match="'jsonll' .* did you mean 'jsonl'"):
        read_prompts([PromptSource(kind="jsonll")], seed=0).divide()


CHAIN_SUM = PromptSource(
    kind="reasoning_gym", name="chain_sum", train_size=150, held_out_size=40,
    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    strip_prefix="State the final answer to the following arithmetic problem: ",
    template="Compute {question} Put it in \\boxed{}.",
)  # fmt: skip


def test_reasoning_gym_prompts_are_distinct_and_held_out_ones_stay_out_of_training() -> None:
    sets = read_prompts([CHAIN_SUM], seed=0).divide()
    questions = [p.messages[0].content for p in sets.train[0] + sets.held_out]
    assert len(sets.train[0]) == 150 and len(sets.held_out) == 40
    assert len(set(questions)) == 190
    for prompt in sets.train[0] + sets.held_out:
        text = prompt.messages[0].content
        assert text.startswith("Compute ") and text.endswith("= Put it in \\boxed{}.")
        sum_text = text.removeprefix("Compute ").split("=")[0]
        assert prompt.task == "math" and prompt.entry == ""
        # chain_sum's questions are plain sums of integers.
        terms = sum_text.replace("- ", "-").replace("+ ", "+").split()
        assert sum(map(int, terms)) == int(prompt.answer)


def test_held_out_prompts_do_not_depend_on_the_seed_and_train_prompts_do() -> None:
    first, second = (
        read_prompts([CHAIN_SUM], seed=0).divide(),
        read_prompts([CHAIN_SUM], seed=1).divide(),
    )
    assert first.held_out == second.held_out
    assert first.train != second.train
    assert first.train == read_prompts([CHAIN_SUM], seed=0).divide().train


def test_dataset_with_other_answers_carries_the_entry_for_its_own_scorer() -> None:
    source = PromptSource(kind="reasoning_gym", name="countdown", train_size=3, held_out_size=2)
    prompt = read_prompts([source], seed=0).divide().train[0][0]
    entry = json.loads(prompt.entry)
    assert prompt.task == "reasoning_gym" and entry["dataset"] == "countdown"
    assert set(entry) == {"dataset", "question", "answer", "metadata"}
    assert entry["question"].strip() == prompt.messages[0].content


def test_prompts_keep_out_every_held_out_question_of_a_tiny_dataset() -> None:
    source = PromptSource(
        kind="reasoning_gym", name="chain_sum", train_size=5000, held_out_size=20,
        options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    )  # fmt: skip
    sets = read_prompts([source], seed=0).divide()
    assert len(sets.held_out) == 20
    # Two one-digit terms, 1-9 or 0-9, with + or -: at most 200 questions in all.
    assert 100 < len(sets.train[0]) <= 180


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "chain_summ"}, "'chain_summ' is no reasoning_gym dataset; did you mean .*sum"),
        ({"options": {"max_term": 3}}, "chain_sum has no option 'max_term'; it has .*max_terms"),
        ({"options": {"min_terms": 0}}, "does not accept .*min_terms must be positive"),
        ({"options": {"min_terms": "x"}}, "does not accept"),
        ({"name": "n_queens", "kind": "auto"}, "'n_queens' is refused: its scorer evaluates"),
        ({"template": "Compute"}, "does not contain {question}"),
        ({"strip_prefix": "Hello"}, "no question of chain_sum starts with .*'Hello'"),
        ({"train_size": 0, "held_out_size": 0}, "are both 0"),
    ],
)
def test_wrong_reasoning_gym_source_is_a_clear_error(change: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_prompts([CHAIN_SUM.model_copy(update=change)], seed=0).divide()


def mixture() -> PromptSets:
    many = [make_prompt(f"m{n}") for n in range(10)]
    few = [make_prompt(f"f{n}") for n in range(3)]
    return PromptSets([many, few], [3.0, 1.0], [], 0)


def test_every_epoch_gives_each_prompt_once_in_another_order() -> None:
    prompts = [make_prompt(str(n)) for n in range(20)]
    stream = PromptStream(PromptSets([prompts], [1.0], [], 0), seed=4)
    epochs = [[stream.next().id for _ in range(20)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(p.id for p in prompts) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_mixture_follows_the_weights() -> None:
    stream = PromptStream(mixture(), seed=0)
    drawn = Counter(stream.next().id[0] for _ in range(4000))
    assert 0.72 < drawn["m"] / 4000 < 0.78


def test_restored_stream_continues_exactly() -> None:
    stream = PromptStream(mixture(), seed=7)
    for _ in range(25):
        stream.next()
    saved = stream.state()
    expected = [stream.next().id for _ in range(40)]
    restored = PromptStream(mixture(), seed=7)
    restored.restore(saved)
    assert [restored.next().id for _ in range(40)] == expected


def test_cursor_of_other_sources_and_missing_train_prompts_are_refused() -> None:
    stream = PromptStream(mixture(), seed=0)
    other = PromptStream(PromptSets([[make_prompt()]], [1.0], [], 0), seed=0)
    with pytest.raises(InputError, match="is for 1 sources of .1. train .* this run has 2 of"):
        stream.restore(other.state())
    with pytest.raises(InputError, match="run.seed=5; this run has .* run.seed=0"):
        stream.restore(PromptStream(mixture(), seed=5).state())
    with pytest.raises(InputError, match="no train prompts"):
        PromptStream(PromptSets([], [], [make_prompt()], 0), seed=0).next()


def test_evaluation_sets_have_prompts_of_their_own_which_are_not_trained_on(tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    lines = [{"question": f"Q{n}", "answer": "1", "split": "train"} for n in range(3)]
    train.write_text("\n".join(map(json.dumps, lines)))
    aime = tmp_path / "aime.jsonl"
    lines = [{"question": "q1", "answer": "1"}, {"question": "other", "answer": "2"},
             {"question": "shown", "answer": "2", "split": "train"}]  # fmt: skip
    aime.write_text("\n".join(map(json.dumps, lines)))
    wanted = EvalSet(name="aime", prompts=PromptSource(path=aime))
    sets = read_prompts([PromptSource(path=train)], seed=0, eval_sets=[wanted]).divide()
    assert [p.id for p in sets.eval_sets["aime"]] == ["aime/aime:1", "aime/aime:2"]
    assert [p.question for p in sets.train[0]] == ["Q0", "Q2"]
    assert "2 of the evaluation set aime; 1 train prompts removed" in sets.describe()
    # The sets alone will do; what cannot be rendered is left out of them.
    alone = read_prompts([], 0, eval_sets=[wanted]).divide(frozenset({"aime/aime:2"}))
    assert [p.id for p in alone.all] == ["aime/aime:1"] and alone.dropped == 1
    with pytest.raises(InputError, match="'aime' has 2 prompts .* expected 5"):
        read_prompts([], 0, eval_sets=[wanted.model_copy(update={"problems": 5})]).divide()
    # The keys in the error are those of this set, not of the train file.
    aime.write_text('{"asked": "q1", "answer": "1"}\n')
    with pytest.raises(InputError, match=r"^eval\.sets, aime: .*prompts\.columns\.question"):
        read_prompts([PromptSource(path=train)], 0, eval_sets=[wanted])


def run_of(folder: Path, questions: list[str], *overrides: str) -> Config:
    rows = [json.dumps({"question": q, "answer": "1"}) for q in questions]
    source = write(folder, *rows)
    config = Config(prompts=[source])
    (folder / "c.toml").write_text(dump_toml(config))
    return load_config(folder / "c.toml", overrides)


def trained_and_held(config: Config, **more: Any) -> tuple[set[str], set[str]]:
    sets = prompts_of_run(config, **more)
    trained = {p.question for prompts in sets.train for p in prompts}
    assert all(p.split == "train" and not p.is_spare for ps in sets.train for p in ps)
    return trained, {p.question for p in sets.held_out}


def test_only_prompts_that_an_evaluation_looks_at_are_held_out(tmp_path: Path) -> None:
    questions = [f"question {n}?" for n in range(4000)]
    config = run_of(tmp_path, questions)
    trained, held = trained_and_held(config)
    assert len(held) == 256 and trained == set(questions) - held
    _, all_held = trained_and_held(run_of(tmp_path, questions, "eval.prompts=4000"))
    assert 320 < len(all_held) < 480 and held < all_held
    # The first of the file, which earlier versions evaluated on as well.
    assert held == set([q for q in questions if q in all_held][:256])
    for nothing in (["eval.prompts=0"], ["eval.sets=[{name='own', prompts={path='x'}}]"]):
        found = run_of(tmp_path, questions, *nothing)
        (tmp_path / "eval.jsonl").write_text('{"question": "question 7?", "answer": "1"}\n')
        sets = [s.model_copy(update={"prompts": PromptSource(path=tmp_path / "eval.jsonl")})
                for s in found.eval.sets]  # fmt: skip
        found = found.model_copy(update={"eval": found.eval.model_copy(update={"sets": sets})})
        assert trained_and_held(found) == (
            set(questions) - ({"question 7?"} if sets else set()),
            set(),
        )
    # Said to be for evaluation alone: nothing of it is trained on.
    whole = run_of(tmp_path, questions, "prompts.0.held_out_share=1.0")
    assert trained_and_held(whole) == (set(), set(questions))


def test_a_train_prompt_stays_one_when_prompts_are_added(tmp_path: Path) -> None:
    old = [f"question {n}?" for n in range(0, 6000, 2)]
    trained, _ = trained_and_held(run_of(tmp_path, old))
    grown = sorted({*old, *(f"question {n}?" for n in range(6000))}, key=lambda q: int(q[9:-1]))
    now, held = trained_and_held(run_of(tmp_path, grown))
    assert trained < now and len(held) == 256


def test_twins_of_a_held_out_prompt_do_not_train(tmp_path: Path) -> None:
    questions = [f"question {n}?" for n in range(4000)]
    trained, held = trained_and_held(run_of(tmp_path, questions + [q.upper() for q in questions]))
    assert not {q.upper() for q in held} & {q.upper() for q in trained}


def test_a_run_that_began_by_the_older_rule_resumes_by_it(tmp_path: Path) -> None:
    config = run_of(tmp_path, [f"question {n}?" for n in range(4000)])
    trained, held = trained_and_held(config)
    older = read_prompts(config.prompts, config.run.seed).divide()
    assert older.sizes < [len(trained)]
    cursor = PromptStream(older, 0).state()
    sets = prompts_of_run(config, cursor=cursor)
    assert sets.train == older.train and {p.question for p in sets.held_out[:256]} == held
