"""Asks a served model for translations, many at once, and keeps each on disk as it comes.

Used by `data translate --endpoint`; one thread, one event loop.

| tasks | take | give | end |
|---|---|---|---|
| `at_once` workers | a request | a line of the kept file | when none is left, or one raises |

The kept file goes on growing: a request whose text is there is not asked for again. A request that
the server has not answered is not there. A cut last line, left by a crash, is forgotten.
"""

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import msgspec
from aiohttp import ClientSession

from megatron_rl.config.errors import InputError
from megatron_rl.curation.chat_endpoint import Answer, Endpoint, ask, check_served, open_session
from megatron_rl.curation.options import check_at_least
from megatron_rl.curation.rows import encode_lines
from megatron_rl.curation.translate import Chosen, Request, check_translation, request_of

NAMES = {"fr": "French", "es": "Spanish", "it": "Italian", "de": "German", "zh": "Chinese",
         "ru": "Russian"}  # fmt: skip
SYSTEM = (
    "Translate the text of the user from English into {language}. It is a problem to be solved by "
    "others: do not solve it. Signs such as ⟦3⟧ stand for numbers and formulas: each must be in "
    "the translation exactly once, unchanged, where its meaning belongs. Write no digits and no "
    "formulas of your own. Reply with the translation alone."
)
FIRST_TEMPERATURE, LATER_TEMPERATURE = 0.0, 0.7
"""The most likely translation first; the same again would be refused for the same reason."""
MAX_FAULTS_IN_A_ROW = 20
"""Of the server, before it is given up."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class Kept(msgspec.Struct, frozen=True):
    """A line of the kept file; also one of a file of translations."""

    id: str
    language: str
    source: str
    """Text of the request."""
    text: str
    """The last translation; it may be one that is refused."""


@dataclass
class Asked:
    """What came of the requests."""

    texts: dict[tuple[str, str], str] = field(default_factory=dict)
    """By id and language."""
    from_before: int = 0
    """Of them, those that an earlier call got."""
    tries: int = 0
    failed_tries: Counter[str] = field(default_factory=Counter)
    """By reason: of the server, or why a translation was refused."""
    unanswered: int = 0
    """Requests that are not kept: the same command asks for them again."""

    def figures(self) -> dict[str, object]:
        """For the report."""
        return {
            "from_before": self.from_before,
            "tries": self.tries,
            "failed_tries": dict(self.failed_tries.most_common()),
            "unanswered": self.unanswered,
        }


class _Asking:
    """State that the workers share; no two of them are between awaits at once."""

    def __init__(self, endpoint: Endpoint, attempts: int, file: TextIO, found: Asked) -> None:
        self.endpoint = endpoint
        self.attempts = attempts
        self.found = found
        self._file = file
        self._faults = 0

    def note(self, answer: Answer, refusal: str) -> None:
        """Count a try. Raises InputError when the server is no longer one."""
        self.found.tries += 1
        if answer.failure or refusal:
            self.found.failed_tries[answer.failure or f"refused: {refusal}"] += 1
        self._faults = self._faults + 1 if answer.is_server_fault else 0
        if self._faults >= MAX_FAULTS_IN_A_ROW:
            raise InputError(
                f"--endpoint {self.endpoint.url} failed {self._faults} times in a row, last: "
                f"{answer.failure}. Translations so far are kept in {self._file.name}: start the "
                "server again, and give the same command"
            )

    def keep(self, request: Request, text: str) -> None:
        """Keep the outcome of a request for this call and for later ones."""
        self.found.texts[request.id, request.language] = text
        self._file.write(encode_lines([Kept(request.id, request.language, request.text, text)]))
        self._file.flush()


def ask_all(
    chosen: Sequence[Chosen],
    endpoint: Endpoint,
    kept: Path,
    *,
    attempts: int,
    at_once: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Asked:
    """Translations of all that were chosen, as far as they could be had.

    progress is told the requests that are over, and all. A request has `attempts` tries, of which
    each takes endpoint.timeout_s at most. Raises InputError when the server is not there, does not
    serve the model, or fails on and on.
    """
    check_at_least("--attempts", attempts, 1)
    check_at_least("--at-once", at_once, 1)
    found = Asked()
    earlier = read_kept(kept)
    missing = []
    for item in chosen:
        request = request_of(item)
        line = earlier.get((request.id, request.language))
        if line is not None and line.source == request.text:
            found.texts[request.id, request.language] = line.text
            found.from_before += 1
        else:
            missing.append(item)
    if missing:
        asking = functools.partial(_ask_missing, attempts=attempts, at_once=at_once)
        asyncio.run(asking(missing, endpoint, kept, found, progress=progress))
    return found


async def _ask_missing(
    missing: list[Chosen],
    endpoint: Endpoint,
    kept: Path,
    found: Asked,
    *,
    attempts: int,
    at_once: int,
    progress: Callable[[int, int], None],
) -> None:
    async with open_session(endpoint, at_once) as session:
        await check_served(session, endpoint)
        with kept.open("a", encoding="utf-8") as file:
            asking = _Asking(endpoint, attempts, file, found)
            items = iter(missing)

            async def work() -> None:
                for item in items:
                    await _translate(session, asking, item)
                    over = len(found.texts) + found.unanswered
                    progress(over, found.from_before + len(missing))

            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(at_once, len(missing))):
                        group.create_task(work())
            except* InputError as errors:
                raise errors.exceptions[0] from None


async def _translate(session: ClientSession, asking: _Asking, item: Chosen) -> None:
    """Ask until a translation is taken, or tries are spent; keep what there is."""
    request = request_of(item)
    text, answer = "", Answer()
    for attempt in range(asking.attempts):
        if attempt:
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))
        temperature = LATER_TEMPERATURE if attempt else FIRST_TEMPERATURE
        answer = await ask(session, asking.endpoint, messages_of(request), temperature=temperature)
        text = answer.text or text
        refusal = "" if answer.failure else check_translation(item, answer.text)[1]
        asking.note(answer, refusal)
        if answer.is_final or not (answer.failure or refusal):
            break
    # A server that was away may do better next time than what was refused before.
    if text and not answer.is_server_fault:
        asking.keep(request, text)
    else:
        asking.found.unanswered += 1


def messages_of(request: Request) -> list[dict[str, str]]:
    """What the model is told."""
    system = SYSTEM.format(language=NAMES[request.language])
    return [{"role": "system", "content": system}, {"role": "user", "content": request.text}]


def read_kept(path: Path) -> dict[tuple[str, str], Kept]:
    """Lines of the kept file, the last of each request; a cut last line is removed from it.

    Raises InputError for a file of another kind.
    """
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    found = {(line.id, line.language): line for line in _lines(whole, path)}
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return found


def _lines(content: bytes, path: Path) -> Iterator[Kept]:
    decoder = msgspec.json.Decoder(Kept)
    for number, line in enumerate(content.splitlines(), 1):
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path}:{number}: {error}; this file keeps translations between calls: name "
                "another --out, or remove it"
            ) from error
