"""The search of examples/agents: its ranking, its tools, and what each form pays."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.agents import search
from tests.verification.environments.running import prompt, run
from verification.environments.policy import Call, Outcome, Reply, Say

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    {"title": "Ada", "text": "Ada Lovelace wrote the first program."},
    {"title": "Alan", "text": "Alan Turing broke Enigma; he wrote about machines that think."},
    {"title": "Enigma", "text": "A cipher machine. Its name is Greek OR for a riddle."},
]


def bm25(query: list[str], documents: list[list[str]]) -> list[float]:
    """Scores by the formula of Robertson and Zaragoza (2009), with k1 = 1.2 and b = 0.75.

    As SQLite does, the weight of a word in more than half of the documents is almost 0.
    """
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        score = 0.0
        for word in query:
            having = sum(word in other for other in documents)
            weight = max(math.log((len(documents) - having + 0.5) / (having + 0.5)), 1e-6)
            count = words.count(word)
            length = 0.25 + 0.75 * len(words) / mean
            score += weight * count * 2.2 / (count + 1.2 * length)
        scores.append(score)
    return scores


def test_documents_are_ranked_by_bm25() -> None:
    rng = random.Random(3)
    vocabulary = [f"w{number}" for number in range(30)]
    for _ in range(50):
        texts = [rng.choices(vocabulary, k=rng.randint(3, 20)) for _ in range(12)]
        documents = [
            {"title": f"t{number}", "text": " ".join(words)} for number, words in enumerate(texts)
        ]
        query = rng.sample(vocabulary, 3)
        scores = bm25(query, [[f"t{n}", *words] for n, words in enumerate(texts)])
        index = search.write_index(documents, ":memory:")
        found = [int(title[1:]) for title, _ in search.find(index, " ".join(query), most=12)]
        assert sorted(found) == [n for n, words in enumerate(texts) if set(query) & set(words)]
        assert [scores[n] for n in found] == pytest.approx(
            sorted(scores, reverse=True)[: len(found)]
        )


@pytest.mark.parametrize("query", ["", "* ^ -", '"', "OR", "NEAR(x y", "title:Ada", "Ada AND NOT"])
def test_no_query_is_a_command_of_the_index(query: str) -> None:
    found = search.find(search.write_index(DOCUMENTS, ":memory:"), query)
    assert [title for title, _ in found] == {
        "OR": ["Enigma"], "title:Ada": ["Ada"], "Ada AND NOT": ["Ada"],
    }.get(query, [])  # fmt: skip


def held(name: str, folder: Path, *given: Reply, **fields: Any) -> tuple[Outcome, list[str]]:
    """The outcome of an environment whose policy replies so, and what its tools told it."""
    told: list[str] = []
    left = list(given)

    async def answer(say: Say) -> Reply:
        told.extend(one["content"] for one in say.messages if one["role"] == "tool")
        return left.pop(0)

    found = run(
        folder, f"search:{name}", answer, task=prompt(**fields),
        paths=(str(ROOT / "examples" / "agents"),), variables=(search.INDEX_VARIABLE,),
    )  # fmt: skip
    return found, told


def text(said: str) -> Reply:
    return Reply(said, said)


def call(name: str, **arguments: str) -> Reply:
    return Reply("", "", calls=[Call(name, arguments)])


def test_a_model_that_calls_tools_searches_its_own_corpus_or_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = (
        call("search", query="Who broke Enigma?"), call("read", title="Alan"),
        call("read", title="Eve"), text("It was alan  turing."),
    )  # fmt: skip
    outcome, told = held("answers", tmp_path, *said, answer="Alan Turing", entry=DOCUMENTS)
    assert outcome == Outcome(1.0, "correct")
    assert told[0].startswith("Alan: Alan Turing broke") and "Enigma: A cipher" in told[0]
    assert told[1:] == [DOCUMENTS[1]["text"], "there is no document with this title"]
    corpus, index = tmp_path / "corpus.jsonl", tmp_path / "index"
    corpus.write_text("".join(json.dumps(one) + "\n" for one in DOCUMENTS))
    make = [sys.executable, "examples/agents/search.py", str(corpus), str(index)]
    subprocess.run(make, cwd=ROOT, check=True, timeout=200, env=os.environ | {"PYTHONPATH": "."})
    monkeypatch.setenv(search.INDEX_VARIABLE, str(index))
    assert held("answers", tmp_path, *said, answer="Alan Turing") == (outcome, told)
    wrong = held("answers", tmp_path, said[0], text("Turingia"), answer="Turing")
    assert wrong[0] == Outcome(0.0, "wrong_answer")
    assert held("answers", tmp_path, text("Turing"), answer="Turing")[0].reason == "no_call"


def test_the_tiny_form_answers_from_what_it_found(tmp_path: Path) -> None:
    documents = search.corpus(random.Random(1))
    digits = {one["title"]: one["text"][-1] for one in documents}
    fields = {"entry": documents, "answer": digits["bc"]}
    outcome, told = held("search", tmp_path, text("=bc"), text(digits["bc"]), **fields)
    assert outcome == Outcome(1.0, "correct") and told == [f"bc {digits['bc']}"]
    withheld, told = held("withheld", tmp_path, text("=bc"), text("none"), **fields)
    assert withheld == Outcome(0.0, "wrong_answer") and told == ["none"]
    assert held("search", tmp_path, text("9"), **fields)[0] == Outcome(0.0, "no_call")
