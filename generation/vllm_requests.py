"""Completions in vLLM's engine core, and the policy version of each of their tokens.

Runs in the vLLM process (`vllm_server.py`), which alone imports vLLM. This thread steps the core
without vLLM's front end. Between two steps nothing is in flight: during a pause no step is taken,
and every token sampled before it is known.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from generation.vllm_messages import Job
from generation.weight_versions import spans_from_cuts
from megatron_rl.protocol.engine_requests import Ended, Generate
from megatron_rl.protocol.render import stop_ids
from megatron_rl.weights.layout.shape import read_shape

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core import EngineCore

BLOCK_TOKENS = 32
"""Tokens of a block of the KV cache; with vLLM's default, 128, short prompts share no prefix."""
PREFILL_TOKENS = 2048
"""Most tokens that one forward pass processes."""


def open_core(job: Job) -> "EngineCore":
    """vLLM's engine core with the model loaded, in this process and thread."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    from generation.vllm_sampler import install

    arguments = EngineArgs(
        model=job.model,
        dtype=job.dtype,
        max_model_len=job.context_tokens,
        max_num_seqs=job.max_running,
        max_num_batched_tokens=max(PREFILL_TOKENS, job.max_running),
        block_size=BLOCK_TOKENS,
        enable_prefix_caching=True,
        # Otherwise vLLM takes a share of the whole memory of the machine.
        kv_cache_memory_bytes=_kv_bytes(job),
        # Token ids go in and come out.
        skip_tokenizer_init=True,
        # Compiled code would keep the weights that a weight sync replaces.
        enforce_eager=True,
        # A pause is exact only when no further step is in flight.
        async_scheduling=False,
        seed=job.seed,
        disable_log_stats=True,
    )
    config = arguments.create_engine_config()
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    install(core)
    return core


def _kv_bytes(job: Job) -> int:
    """Bytes of the KV cache: all tokens, and vLLM's null block."""
    shape = read_shape(Path(job.model))
    blocks = -(-job.kv_tokens // BLOCK_TOKENS) + 1
    itemsize = 4 if job.dtype == "float32" else 2
    of_token = 2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize
    return blocks * BLOCK_TOKENS * of_token


@dataclass(slots=True)
class _Completion:
    """A completion that has not ended."""

    name: str
    request: Generate
    core_name: str = ""
    """Its name in vLLM; "": it waits for the end of a pause."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """(version replaced, tokens sampled by then) of each weight sync since its first token."""
    first_token_at: float = -1.0


class CompletionRequests:
    """All requested completions that have not ended."""

    def __init__(self, core: "EngineCore", job: Job) -> None:
        self._core, self._job = core, job
        self._stop_ids = stop_ids(Path(job.model), None)
        self._version = job.version
        self._by_name: dict[str, _Completion] = {}
        self._by_core_name: dict[str, _Completion] = {}
        self._submitted = 0
        self._epoch = 0
        """Number of pauses; each begins a separate prefix cache."""
        self.is_paused = False

    @property
    def are_runnable(self) -> bool:
        """Whether a step has work."""
        return not self.is_paused and self._core.scheduler.has_requests()

    def add(self, request: Generate) -> list[Ended]:
        """Begin completions, or keep them during a pause; return ends of impossible ones."""
        room = self._job.context_tokens - len(request.prompt_ids)
        if room <= 0 or not request.prompt_ids:
            message = (
                f"the prompt has {len(request.prompt_ids)} tokens, generator.context_tokens="
                f"{self._job.context_tokens}"
            )
            return [Ended(name, [], [], [], "abort", message, 0) for name in request.names]
        for name in request.names:
            completion = self._by_name[name] = _Completion(name, request)
            if not self.is_paused:
                self._submit(completion)
        return []

    def _submit(self, completion: _Completion) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        asked = completion.request
        # A new name each time: the model runner may still hold the earlier one.
        self._submitted += 1
        completion.core_name = str(self._submitted)
        self._by_core_name[completion.core_name] = completion
        sampling = SamplingParams(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            max_tokens=asked.max_new_tokens,
            stop_token_ids=sorted({*asked.stop_ids, *self._stop_ids}),
            # Logprob of the sampled token only.
            logprobs=0,
            detokenize=False,
        )
        request = EngineCoreRequest(
            request_id=completion.core_name,
            prompt_token_ids=asked.prompt_ids,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=f"{self._epoch}.{self._version}",
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))

    def abort(self, names: list[str]) -> None:
        """Stop completions; unknown names have ended."""
        found = [self._by_name.pop(name) for name in names if name in self._by_name]
        self._withdraw(found)

    def _withdraw(self, completions: list[_Completion]) -> None:
        begun = [one.core_name for one in completions if one.core_name]
        for core_name in begun:
            del self._by_core_name[core_name]
        self._core.abort_requests(begun)

    def step(self) -> list[Ended]:
        """Sample a token of each running completion; return those that ended."""
        if not self.are_runnable:
            return []
        found, _ = self._core.step()
        now = time.monotonic()
        ended = []
        for outputs in found.values():
            for output in outputs.outputs:
                # None: it was aborted after its last step.
                completion = self._by_core_name.get(output.request_id)
                if completion is not None and self._note(completion, output, now):
                    del self._by_core_name[completion.core_name], self._by_name[completion.name]
                    ended.append(self._end_of(completion, output))
        return ended

    def _note(self, completion: _Completion, output: "EngineCoreOutput", now: float) -> bool:
        """Record the output of a step; return whether the completion has ended."""
        if output.new_token_ids and not completion.token_ids:
            completion.first_token_at = now
        completion.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            # [tokens, at least 1]: the first column has the sampled tokens.
            completion.logprobs += [float(row[0]) for row in output.new_logprobs.logprobs]
        return output.finish_reason is not None

    def _end_of(self, completion: _Completion, output: "EngineCoreOutput") -> Ended:
        tokens = len(completion.token_ids)
        spans = spans_from_cuts(completion.cuts, self._version, tokens) if tokens else []
        finish = str(output.finish_reason)
        is_whole = finish in ("stop", "length")
        return Ended(
            completion.name,
            completion.token_ids,
            completion.logprobs,
            [(str(span.version), span.start, span.end) for span in spans],
            finish if is_whole else "abort",
            "" if is_whole else f"vLLM's engine core says {finish}",
            0,
            first_token_at=completion.first_token_at,
        )

    def pause(self, *, recomputes: bool) -> None:
        """Take no step until `resume`. A second call does nothing.

        `resume` restarts completions without a token: part of their prompt may have a KV cache of
        the older weights. recomputes: drop the KV cache of all other completions too.
        """
        if self.is_paused:
            return
        self.is_paused = True
        self._epoch += 1
        for completion in self._by_name.values():
            if completion.token_ids:
                completion.cuts.append((self._version, len(completion.token_ids)))
        tokenless = [one for one in self._by_name.values() if not one.token_ids]
        self._withdraw(tokenless)
        for completion in tokenless:
            completion.core_name = ""
        if recomputes:
            self._core.reset_prefix_cache(reset_running_requests=True)

    def resume(self, version: int) -> None:
        """Continue; later tokens carry `version`."""
        self._version = version
        self.is_paused = False
        for completion in self._by_name.values():
            if not completion.core_name:
                self._submit(completion)
