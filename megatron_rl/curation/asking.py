"""Requests translations from a served model, several at once, and keeps each one on disk.

Used by `data translate --endpoint`; one thread, one event loop.

| tasks | take | give | end |
|---|---|---|---|
| `at_once` workers | a request | a line of the kept file | when no request is left, or one raises |

Later calls append to the kept file and do not repeat its requests. Unanswered requests are not in
the file. A last line that a crash cut short is removed.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import msgspec
from aiohttp import ClientSession

from megatron_rl.config.errors import InputError
from megatron_rl.curation.chat_endpoint import Answer, Endpoint, ask, check_served, open_session
from megatron_rl.curation.rows import encode_lines
from megatron_rl.curation.tool import Progress, check_at_least, no_progress
from megatron_rl.curation.translate import NAMES, Chosen, check_translation
from megatron_rl.protocol.line_errors import line_error

SYSTEM = (
    "Translate the text of the user from English into {language}. It is a problem to be solved by "
    "others: do not solve it. Signs such as ⟦3⟧ stand for numbers and formulas: each must be in "
    "the translation exactly once, unchanged, where its meaning belongs. Write no digits and no "
    "formulas of your own. Reply with the translation alone."
)
FIRST_TEMPERATURE, LATER_TEMPERATURE = 0.0, 0.7
"""Later tries must differ from the first one."""
MAX_FAULTS_IN_A_ROW = 20
"""Failures of the server that end the command."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class Kept(msgspec.Struct, frozen=True):
    """A line of the kept file, which is also a line of a file of translations."""

    id: str
    language: str
    source: str
    """Text of the request."""
    text: str
    """The last translation, also a refused one."""


@dataclass
class Asked:
    """Translations, and the figures of the report."""

    texts: dict[tuple[str, str], str] = field(default_factory=dict)
    """By id and language."""
    from_before: int = 0
    """Translations of earlier calls."""
    tries: int = 0
    failed_tries: Counter[str] = field(default_factory=Counter)
    """By failure of the server, or reason of the refusal."""
    unanswered: int = 0
    """Requests without a kept line; the same command repeats them."""

    def figures(self) -> dict[str, object]:
        figures = asdict(self) | {"failed_tries": dict(self.failed_tries.most_common())}
        del figures["texts"]
        return figures


def ask_all(
    chosen: Sequence[Chosen],
    endpoint: Endpoint,
    kept: Path,
    *,
    attempts: int,
    at_once: int,
    progress: Progress = no_progress,
) -> Asked:
    """Request translations of the chosen rows.

    A request has `attempts` tries of at most endpoint.timeout_s. Raises InputError if the server is
    away, does not serve the model, or keeps failing.
    """
    check_at_least("--attempts", attempts, 1)
    check_at_least("--at-once", at_once, 1)
    found = Asked()
    earlier = read_kept(kept)
    missing = []
    for item in chosen:
        request = item.request
        line = earlier.get((request.id, request.language))
        if line is not None and line.source == request.text:
            found.texts[request.id, request.language] = line.text
            found.from_before += 1
        else:
            missing.append(item)
    if missing:
        asyncio.run(_Asking(endpoint, attempts, found, progress).ask(missing, kept, at_once))
    return found


class _Asking:
    """One call of `ask_all`. Its workers share the state: they switch only at an await."""

    def __init__(self, endpoint: Endpoint, attempts: int, found: Asked, progress: Progress) -> None:
        self._endpoint = endpoint
        self._attempts = attempts
        self._found = found
        self._progress = progress
        self._faults = 0
        """Failures of the server in a row."""

    async def ask(self, missing: list[Chosen], kept: Path, at_once: int) -> None:
        found, total = self._found, self._found.from_before + len(missing)
        async with open_session(self._endpoint, at_once) as session:
            await check_served(session, self._endpoint)
            with kept.open("a", encoding="utf-8") as file:
                items = iter(missing)

                async def work() -> None:
                    for item in items:
                        await self._translate(session, file, item)
                        self._progress(len(found.texts) + found.unanswered, total)

                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(at_once, len(missing))):
                            group.create_task(work())
                except* InputError as errors:
                    raise errors.exceptions[0] from None

    async def _translate(self, session: ClientSession, file: TextIO, item: Chosen) -> None:
        """Ask until a translation is accepted, or no tries are left; keep the last one."""
        request = item.request
        messages = [
            {"role": "system", "content": SYSTEM.format(language=NAMES[request.language])},
            {"role": "user", "content": request.text},
        ]
        text, answer = "", Answer()
        for attempt in range(self._attempts):
            if attempt:
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (attempt - 1)))
            temperature = LATER_TEMPERATURE if attempt else FIRST_TEMPERATURE
            answer = await ask(session, self._endpoint, messages, temperature=temperature)
            text = answer.text or text
            refusal = "" if answer.failure else check_translation(item, answer.text)[1]
            self._count(answer, refusal, file)
            if answer.is_final or not (answer.failure or refusal):
                break
        # The same command repeats a request after a server's fault, but keeps a refusal.
        if text and not answer.is_server_fault:
            self._found.texts[request.id, request.language] = text
            file.write(encode_lines([Kept(request.id, request.language, request.text, text)]))
            file.flush()
        else:
            self._found.unanswered += 1

    def _count(self, answer: Answer, refusal: str, file: TextIO) -> None:
        """Count a try. Raises InputError after too many failures of the server in a row."""
        self._found.tries += 1
        if answer.failure or refusal:
            self._found.failed_tries[answer.failure or f"refused: {refusal}"] += 1
        self._faults = self._faults + 1 if answer.is_server_fault else 0
        if self._faults >= MAX_FAULTS_IN_A_ROW:
            raise InputError(
                f"--endpoint {self._endpoint.url} failed {self._faults} times in a row, last: "
                f"{answer.failure}. Translations so far are kept in {file.name}: start the "
                "server again, and give the same command"
            )


def read_kept(path: Path) -> dict[tuple[str, str], Kept]:
    """Lines of the kept file, the last of each request; a cut last line is removed from the file.

    Raises InputError for a file of another kind.
    """
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    found: dict[tuple[str, str], Kept] = {}
    decoder = msgspec.json.Decoder(Kept)
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            kept = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            expected = "a translation of an earlier call: name another --out, or remove the file"
            raise line_error(path, number, error, expected=expected) from error
        found[kept.id, kept.language] = kept
    if len(whole) < len(content):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return found
