"""Search in a corpus: the policy asks for documents, and answers with what it has read.

    bash examples/agents/run.sh search

SQLite's full-text index ranks documents by BM25. A prompt's `entry` is its own corpus: a list of
objects with `title` and `text`, as HotpotQA has ten paragraphs a question. Without an entry, the
variable SEARCH_INDEX (to be named in `expert.environments.variables`) has the path of a file that
`python examples/agents/search.py CORPUS.jsonl INDEX` made from such objects, one a line.

`answers` offers the tools `search` and `read` to a model that calls tools. `search`, for the tiny
model, reads "=" and a query as a search, and any other reply as the answer. The teacher of the tiny
model searches for a wrong word in half of its examples, and answers with a wrong digit in two of
five. The search of the control, `withheld`, finds nothing.
"""

import json
import os
import random
import re
import sqlite3
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verification.environments import EpisodeInput, Outcome, Policy, ToolRun, tools_episode

MOST_FOUND, SNIPPET_WORDS = 5, 30
INDEX_VARIABLE = "SEARCH_INDEX"
WORDS, VALUES = ["aa", "ab", "ac", "ba", "bb", "bc", "ca", "cb", "cc"], "12345"


def write_index(documents: Iterable[dict[str, str]], path: str) -> sqlite3.Connection:
    """An index of documents with `title` and `text`; path: ":memory:" or a new file."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text)")
    rows = ((one["title"], one["text"]) for one in documents)
    connection.executemany("INSERT INTO documents VALUES (?, ?)", rows)
    connection.commit()
    return connection


def open_index(prompt: EpisodeInput) -> sqlite3.Connection:
    """The prompt's own corpus, or else the file of SEARCH_INDEX."""
    if prompt.entry is not None:
        return write_index(prompt.entry, ":memory:")
    path = Path(os.environ[INDEX_VARIABLE]).absolute()
    return sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)


def find(index: sqlite3.Connection, query: str, most: int = MOST_FOUND) -> list[tuple[str, str]]:
    """(title, snippet) of the documents with any word of the query, the best by BM25 first."""
    # Each word in quotes, because the query language has words of its own.
    words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))
    if not words:
        return []
    return index.execute(
        "SELECT title, snippet(documents, 1, '', '', '...', ?) FROM documents "
        "WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?",
        (SNIPPET_WORDS, words, most),
    ).fetchall()


class Library:
    """The tools of a conversation."""

    def reset(self, prompt: EpisodeInput) -> None:
        """Open the corpus."""
        self._index = open_index(prompt)

    def search(self, query: str) -> str:
        """Search the corpus. Returns titles and snippets of the best documents."""
        found = find(self._index, query)
        return "\n".join(f"{title}: {text}" for title, text in found) or "nothing found"

    def read(self, title: str) -> str:
        """Read the whole document with this title."""
        row = self._index.execute("SELECT text FROM documents WHERE title = ?", (title,)).fetchone()
        return row[0] if row else "there is no document with this title"


def reward(prompt: EpisodeInput, run: ToolRun) -> Outcome:
    """1 if the last reply holds the answer, whatever its case and punctuation."""
    said, meant = (" ".join(re.findall(r"\w+", text.lower())) for text in (run.text, prompt.answer))
    is_right = bool(run.calls) and f" {meant} " in f" {said} "
    how = "wrong_answer" if run.calls else "no_call"
    return Outcome(float(is_right), "correct" if is_right else how)


answers = tools_episode(Library, reward=reward, max_turns=6)


async def search(prompt: EpisodeInput, policy: Policy, most: int = 1) -> Outcome:
    """The tiny model's form: one search, of which it reads the best document."""
    chat = policy.chat(prompt.messages)
    reply = await chat.say(max_tokens=4)
    has_called = reply.content.startswith("=")
    if has_called:
        found = find(open_index(prompt), reply.content[1:], most)
        chat.add("tool", found[0][1] if found else "none")
        reply = await chat.say(max_tokens=3)
    is_right = reply.content == prompt.answer
    how = "wrong_answer" if has_called else "no_call"
    return Outcome(float(is_right), "correct" if is_right else how)


async def withheld(prompt: EpisodeInput, policy: Policy) -> Outcome:
    """The same with a search that finds nothing."""
    return await search(prompt, policy, most=0)


def corpus(rng: random.Random) -> list[dict[str, str]]:
    """A document for each word: the word, and its digit."""
    return [{"title": word, "text": f"{word} {rng.choice(VALUES)}"} for word in WORDS]


def examples(rng: random.Random) -> list[dict[str, Any]]:
    """SFT examples of a teacher that is often wrong, by either turn."""
    lines = []
    for number in range(4000):
        word, value = rng.choice(WORDS), rng.choice(VALUES)
        question = {"role": "user", "content": word}
        query = "=" + (word if rng.random() < 1 / 2 else rng.choice(WORDS))
        answer = value if rng.random() < 1 / 2 else rng.choice(VALUES)
        called = [question, {"role": "assistant", "content": query},
                  {"role": "tool", "content": f"{word} {value}"}]  # fmt: skip
        lines.append({"task": "search", "messages": called if number % 2 else [question],
                      "response": answer if number % 2 else query})  # fmt: skip
    return lines


def prompts(rng: random.Random) -> list[dict[str, Any]]:
    """Prompts, each with a corpus of its own; the last 200 are held out."""
    lines = []
    for number in range(2000):
        documents, word = corpus(rng), rng.choice(WORDS)
        answer = documents[WORDS.index(word)]["text"].split()[1]
        lines.append({"id": f"search-{number}", "task": "search", "answer": answer,
                      "messages": [{"role": "user", "content": word}],
                      "entry": json.dumps(documents),
                      "split": "train" if number < 1800 else "held_out"})  # fmt: skip
    return lines


def main() -> None:
    """Write the index of a corpus."""
    source, target = sys.argv[1:]
    with open(source) as lines:
        write_index(map(json.loads, lines), target).close()


if __name__ == "__main__":
    main()
