"""What SGLang's server answers, read and checked. Pure functions, used by `sglang_engine.py`."""

import json
from base64 import b64decode
from typing import Any, NamedTuple

from generation.engine import Completion, EngineError
from generation.sglang_messages import Ended
from generation.weight_versions import spans_from_arrivals, spans_from_report


def read_event(event: bytes) -> dict[str, Any]:
    """Body of one server-sent event. Raises EngineError when it reports an error."""
    body = json.loads(event.removeprefix(b"data: "))
    if "error" in body:
        raise EngineError(f"/generate: {body['error'].get('message', body['error'])}")
    return body


class Arrival(NamedTuple):
    """An event of a completion."""

    tokens: int
    """Sampled so far."""
    version: int
    """Held by the engine then."""
    at: float
    """By time.monotonic()."""


def read_complete_mark(event: dict[str, Any], index: int, arrivals: list[Arrival]) -> Completion:
    """Completion of a last event. Raises EngineError when it was aborted or contradicts itself.

    arrivals: of all its events. Where the server reports no spans they tell the versions; the first
    tells when the first token came, unless more tokens came with it.
    """
    meta, token_ids = event["meta_info"], event["output_ids"]
    finish = meta["finish_reason"]
    if finish["type"] not in ("stop", "length"):
        raise EngineError(f"SGLang ended a completion by {finish['type']}: {finish.get('message')}")
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    if len(logprobs) != len(token_ids):
        raise EngineError(f"SGLang sent {len(logprobs)} logprobs for {len(token_ids)} tokens")
    try:
        if "weight_versions" in meta:
            spans = spans_from_report(meta["weight_versions"], len(token_ids))
        else:
            told = [(arrival.tokens, arrival.version) for arrival in arrivals]
            spans = spans_from_arrivals(told, len(token_ids))
    except ValueError as error:
        raise EngineError(f"SGLang's weight versions: {error}") from error
    # Present if asked for: [prompt + completion - 1, layers, experts of a token] int32 in base64.
    choices = b64decode(meta.get("routed_experts", ""))
    first_at = arrivals[0].at if arrivals[0].tokens == 1 else -1.0
    return Completion(index, token_ids, logprobs, spans, finish["type"], choices, first_at)


def read_ended(ended: Ended, index: int, engine: str = "SGLang") -> Completion:
    """Completion of what the scheduler says; raises as above, under the name of the engine."""
    if ended.finish not in ("stop", "length"):
        raise EngineError(f"{engine} ended a completion by {ended.finish}: {ended.message}")
    token_ids, logprobs = ended.token_ids, ended.logprobs
    if len(logprobs) != len(token_ids):
        raise EngineError(f"{engine} sent {len(logprobs)} logprobs for {len(token_ids)} tokens")
    report = [{"version": v, "start": start, "end": end} for v, start, end in ended.spans]
    try:
        spans = spans_from_report(report, len(token_ids))
    except ValueError as error:
        raise EngineError(f"{engine} reports invalid weight versions: {error}") from error
    return Completion(
        index,
        token_ids,
        logprobs,
        spans,
        ended.finish,
        expert_choices=ended.expert_choices,
        first_token_at=ended.first_token_at,
    )


def check_answer(path: str, status: int, text: str) -> None:
    """Raise EngineError for a bad status and for a JSON body with success=false."""
    if status != 200:
        raise EngineError(f"{path}: {status} {text}")
    try:
        body = json.loads(text)
    except json.JSONDecodeError:
        return  # some routes answer in plain text
    if isinstance(body, dict) and body.get("success") is False:
        raise EngineError(f"{path}: {body.get('message', text)}")
