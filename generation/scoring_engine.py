"""A frozen SGLang server that returns the logprobs of given tokens, and replies of a judge.

Used by the scorer process. Logprobs are those of softmax(logits): SGLang 0.5.23 applies no
temperature to logprobs of the input, so no request sets one.
"""

import math
from dataclasses import dataclass
from typing import Any

from generation.engine import EngineError, EngineSetup, EngineTimeout, RequestRefused
from generation.sglang_engine import SGLangEngine
from generation.sglang_http import post
from megatron_rl.config.tree import Config
from megatron_rl.protocol.render import judge_context, read_values
from megatron_rl.protocol.wire import LOOPBACK
from megatron_rl.weights.layout.shape import read_shape


@dataclass(frozen=True)
class Vocabulary:
    """Token ids of the reference."""

    size: int
    policy_size: int

    @property
    def foreign_ids(self) -> range:
        """Ids that the policy lacks, which do not count: larger models of a family pad more."""
        return range(self.policy_size, self.size)


class ScoringEngine(SGLangEngine):
    """One `sglang.launch_server` child with the weights of its folder."""

    section = "scorer"
    may_ask_directly = False
    """Only its HTTP server returns logprobs of the input."""

    def __init__(self, setup: EngineSetup, vocab: Vocabulary) -> None:
        super().__init__(setup)
        self._vocab = vocab

    async def logprobs(self, token_ids: list[int], start: int) -> list[float]:
        """Logprobs of token_ids[start:], each given all tokens before it; start is at least 1.

        The softmax runs over all ids but the foreign ones.

        Raises RequestRefused, and EngineError for an engine that does not answer in
        request_timeout_s or answers something else.
        """
        if max(token_ids) >= self._vocab.size:
            # SGLang 0.5.23 would give the logprob of its last id instead (schedule_batch.py:3054).
            raise RequestRefused(
                f"token id {max(token_ids)}, and the reference has {self._vocab.size} ids"
            )
        limit_s = self._setup.request_timeout_s
        body = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            # The first returned entry has no logprob if it is the first token of the input.
            "logprob_start_len": start - 1,
        }
        if self._vocab.foreign_ids:
            body["token_ids_logprob"] = list(self._vocab.foreign_ids)
        try:
            answer = await post(self._session, "/generate", body, limit_s)
        except EngineTimeout as error:
            raise EngineError(
                f"/generate: no logprobs in expert.scorer.request_timeout_s={limit_s:.0f}"
            ) from error
        found = read_logprobs(answer, token_ids, start, last_id=self._vocab.size - 1)
        if self._vocab.foreign_ids:
            found = without_foreign(found, answer["meta_info"].get("input_token_ids_logprobs"))
        return found


def read_logprobs(
    answer: dict[str, Any], token_ids: list[int], start: int, *, last_id: int
) -> list[float]:
    """Logprobs of token_ids[start:] from an answer of /generate. Raises EngineError.

    Each must be present and of the requested token: a gap would be trained on as zero.
    """
    entries = answer.get("meta_info", {}).get("input_token_logprobs") or []
    entries = entries[-(len(token_ids) - start) :]
    # SGLang 0.5.23 names its last id 0 (logprob_result_processor.py:54); the logprob is right.
    named = [0 if token_id == last_id else token_id for token_id in token_ids[start:]]
    if [entry[1] for entry in entries] not in (named, token_ids[start:]):
        raise EngineError(
            f"SGLang gave logprobs of {len(entries)} tokens that are not the "
            f"{len(token_ids) - start} asked for"
        )
    found = [entry[0] for entry in entries]
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in found):
        raise EngineError("SGLang gave logprobs that are no finite numbers")
    return found


def without_foreign(
    logprobs: list[float], foreign: list[list[list[Any]] | None] | None
) -> list[float]:
    """The same logprobs under a softmax without the foreign ids.

    foreign: for each position, aligned at the end with `logprobs`, [logprob, id, text] of each
    foreign id. Raises EngineError.
    """
    rows = (foreign or [])[-len(logprobs) :]
    if len(rows) != len(logprobs) or None in rows:
        raise EngineError("SGLang gave no logprobs of the token ids that the policy lacks")
    return [
        # log(1 - p), where p is the probability of the foreign ids.
        value - math.log1p(-math.fsum(math.exp(entry[0]) for entry in row or ()))
        for value, row in zip(logprobs, rows, strict=True)
    ]


def vocabulary(config: Config) -> Vocabulary:
    """Vocabulary of the frozen model of a run; as a judge alone, it has tokens of its own."""
    # The engine knows more architectures than the trainer.
    size = int(read_values(config.scored_folder / "config.json")["vocab_size"])
    if not config.algorithm.needs_scorer:
        return Vocabulary(size, size)
    return Vocabulary(size, read_shape(config.model.path).vocab)


def scoring_setup(config: Config, stop_ids: tuple[int, ...] = ()) -> EngineSetup:
    """Setup of the engine of `[scorer]`. stop_ids: end a judge's reply."""
    scorer, context_tokens = config.scorer, config.generator.context_tokens
    if config.judge_folder is not None:
        context_tokens = max(judge_context(config), context_tokens)
    dtype = scorer.dtype or config.model.dtype
    return EngineSetup(
        model=config.scored_folder,
        dtype=dtype,
        stop_ids=stop_ids,
        tensor_parallel=scorer.tensor_parallel,
        max_running=scorer.max_running,
        kv_tokens=scorer.kv_tokens,
        context_tokens=context_tokens,
        nice=scorer.nice,
        start_timeout_s=scorer.start_timeout_s,
        request_timeout_s=scorer.request_timeout_s,
        weights_timeout_s=scorer.request_timeout_s,
        host=LOOPBACK[0],
        port=config.ports.scorer + 1,
        seed=config.run.seed,
        version=0,
        log_path=config.run.dir / "logs" / "scorer-0-sglang.log",
        quantization=scorer.quantization,
        has_wide_head=dtype != "float32" and config.model.logits_dtype == "float32",
        # Preflight has checked the length of sequences.
        may_exceed_model=True,
    )
