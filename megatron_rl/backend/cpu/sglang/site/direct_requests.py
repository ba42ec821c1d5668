"""Requests of our generator, straight into SGLang's scheduler and straight back.

Imported by SGLang's scheduler processes on the CPU; `generation/sglang_direct.py` is the other end.
By HTTP each completion passes through two more processes, as JSON, pickles and events of asyncio:
that costs as much Python as a small model's tokens. Weights and pauses still come by HTTP.

Completions of one prompt share its keys and values: the first goes ahead, the others follow when
its prompt is in the prefix cache, which is after one step. Nothing else of ours goes there: nobody
asks for the continuation of a completion, and the cache's tree costs time for each that ends.

Only the scheduler's first rank holds the connection; what it reads goes to the others as all
requests do. One thread, SGLang's loop:

| waits for       | in                        | woken by                   |
|-----------------|---------------------------|----------------------------|
| requests        | the idle sleeper's poller | our socket, SGLang's own   |
| end of a pause  | the same poller           | the same                   |
"""

import copy
import os
import socket
import time
from array import array
from types import ModuleType
from typing import Any

import zmq

from megatron_rl.protocol.engine_requests import (
    FIRST_SUFFIX,
    NAME_PREFIX,
    SOCKET_VARIABLE,
    TURN_PREFIX,
    Abort,
    Ended,
    Generate,
    order_decoder,
    pack,
    unpack,
)

RECEIVE_BYTES = 1 << 18
PAUSED_POLL_MS = 20
"""While paused SGLang asks for requests without a rest, and takes a core from who sends weights."""


class Connection:
    """The scheduler's end of the socket. Reading and writing never wait."""

    def __init__(self, path: str, poller: zmq.Poller | None) -> None:
        """poller: where an idle scheduler sleeps; None where it never does."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._socket.setblocking(False)
        self._poller = poller
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_closed = False
        self._watch(zmq.POLLIN)

    def receive(self) -> list[Generate | Abort]:
        """Messages that have arrived; sends on what had no room before."""
        if self._unsent:
            self._flush()
        while not self._is_closed:
            try:
                received = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                received = b""
            if not received:
                self._close()
            self._received += received
        return unpack(self._received, order_decoder) if self._received else []

    def send(self, ended: list[Ended]) -> None:
        """Tell of ended completions."""
        if not self._is_closed:
            self._unsent += pack(ended)
            self._flush()

    def _flush(self) -> None:
        had_unsent = bool(self._unsent)
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._watch(zmq.POLLIN | zmq.POLLOUT)
            return
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()
            return
        if had_unsent:
            self._watch(zmq.POLLIN)

    def _watch(self, events: int) -> None:
        if self._poller is not None and not self._is_closed:
            self._poller.register(self._socket.fileno(), events)

    def _close(self) -> None:
        # The generator is gone, and this server with it. Watched on, its socket would be readable.
        if self._poller is not None:
            self._poller.unregister(self._socket.fileno())
        self._is_closed = True
        self._socket.close()


class Requests:
    """Our requests in this scheduler: turned into SGLang's, held back for a prefix, answered."""

    def __init__(self, connection: Connection, scheduler: Any, module: ModuleType) -> None:
        self._connection = connection
        self._scheduler = scheduler
        self._module = module
        self._followers: dict[str, list[Any]] = {}
        """By the name of the first of a prompt: the others, until its prompt is cached."""
        self._due: list[Any] = []
        self._first_token_at: dict[str, float] = {}
        """By name of each completion that has begun and not ended; time.monotonic()."""

    def take(self) -> list[Any]:
        """Requests in SGLang's own form, to be taken in now."""
        for message in self._connection.receive():
            if isinstance(message, Generate):
                self._generate(message)
            else:
                self._abort(message.names)
        due, self._due = self._due, []
        return due

    def _sampling(self, message: Generate) -> Any:
        """SGLang's sampling parameters. Raises ValueError for impossible ones."""
        sampling = self._module.SamplingParams(
            max_new_tokens=message.max_new_tokens,
            temperature=message.temperature,
            top_p=message.top_p,
            top_k=message.top_k or -1,
            min_p=message.min_p,
            stop=message.stop or None,
            stop_token_ids=message.stop_ids or None,
        )
        sampling.normalize(self._scheduler.tokenizer)
        sampling.verify(self._scheduler.model_config.vocab_size)
        return sampling

    def _generate(self, message: Generate) -> None:
        try:
            sampling = self._sampling(message)
        except ValueError as error:
            refused = [Ended(n, [], [], [], "abort", str(error), 0) for n in message.names]
            self._connection.send(refused)
            return
        prompt_ids = array("q", message.prompt_ids)
        samplings = [copy.copy(sampling) for _ in message.names]
        for own, seed in zip(samplings, message.seeds, strict=False):
            own.sampling_seed = seed
        first, *followers = [
            self._module.TokenizedGenerateReqInput(
                rid=name,
                input_text=None,
                input_ids=prompt_ids,
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=own,
                return_logprob=True,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                extra_key=message.extra_key,
                return_routed_experts=message.returns_expert_choices,
                routed_experts_start_len=message.choices_from,
            )
            for name, own in zip(message.names, samplings, strict=True)
        ]
        self._due.append(first)
        if followers:
            self._followers[first.rid] = followers

    def _abort(self, names: list[str]) -> None:
        unwanted = set(names)
        for first, followers in list(self._followers.items()):
            self._followers[first] = [f for f in followers if f.rid not in unwanted]
        for name in names:
            self._release(name)
            self._due.append(self._module.AbortReq(rid=name))

    def _release(self, first: str) -> None:
        """Schedule the completions that wait for the prompt of `first`."""
        self._due += self._followers.pop(first, [])

    def note_step(self, reqs: list[Any], skipped: Any, version: str) -> list[Any]:
        """Answer what has ended after a step over `reqs`; those that are not ours.

        skipped: the one whose prompt is not whole yet, if any. version: that of the weights.
        """
        others, ended = [], []
        now = time.monotonic()
        for req in reqs:
            if not req.rid.startswith(NAME_PREFIX):
                others.append(req)
                continue
            if req is not skipped:
                if self._followers:
                    self._release(req.rid)
                if req.output_ids and not req.finished_output:
                    self._first_token_at.setdefault(req.rid, now)
            if req.finished_reason is not None and not req.finished_output:
                req.finished_output = True
                if req.finished_len is None:
                    req.finished_len = len(req.output_ids)
                ended.append(self._ended(req, version))
        if ended:
            self._connection.send(ended)
        return others

    def _ended(self, req: Any, version: str) -> Ended:
        token_ids = list(req.output_ids_through_stop)
        spans = self._module.compute_weight_version_spans(
            req.weight_version_events, version, len(token_ids)
        )
        reason = req.finished_reason.to_json()
        choices = req.routed_experts
        return Ended(
            req.rid,
            token_ids,
            list(req.logprob.output_token_logprobs_val[: len(token_ids)]),
            [(span.version, span.start, span.end) for span in spans],
            reason["type"],
            str(reason.get("message", "")),
            req.cached_tokens,
            b"" if choices is None else choices.numpy().tobytes(),
            self._first_token_at.pop(req.rid, -1.0),
        )

    def note_abort(self, name: str, reason: Any) -> None:
        """A request was ended while it waited."""
        self._release(name)
        # One that had begun waits again after it was retracted.
        self._first_token_at.pop(name, None)
        message = str((reason or {}).get("message", "aborted while it waited"))
        self._connection.send([Ended(name, [], [], [], "abort", message, 0)])


def install(module: ModuleType) -> None:
    """Open the connection in `sglang.srt.managers.scheduler`'s first rank, and serve it there."""
    # Here, since a module of SGLang that is imported too early escapes its own patch.
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        return
    module.SamplingParams = SamplingParams
    module.compute_weight_version_spans = compute_weight_version_spans
    scheduler_class = module.Scheduler
    served: list[Requests] = []
    init_request_receiver = scheduler_class.init_request_receiver

    def open_connection(self: Any) -> None:
        init_request_receiver(self)
        parallel = module.get_parallel()
        if (parallel.pp_rank, parallel.attn_tp_rank, parallel.attn_cp_rank) == (0, 0, 0):
            poller = self.idle_sleeper.poller if self.idle_sleeper is not None else None
            served.append(Requests(Connection(path, poller), self, module))

    scheduler_class.init_request_receiver = open_connection
    _install_input(module, served)
    _install_output(module, served)
    _install_prefixes(module)


def _install_prefixes(module: ModuleType) -> None:
    """On every rank alike: what no request continues stays out of the prefix cache.

    Prompts go there, once a request; and replies that are turns of a conversation.
    """
    scheduler_class = module.Scheduler
    create_req = scheduler_class._create_generation_req
    streamer_class = scheduler_class.get_output_streamer_class(scheduler_class)
    stream_generation = streamer_class._stream_output_generation

    def has_no_next_turn(req: Any) -> bool:
        return req.rid.startswith(NAME_PREFIX) and not req.rid.startswith(TURN_PREFIX)

    def create(self: Any, recv_req: Any, *args: Any, **options: Any) -> Any:
        req = create_req(self, recv_req, *args, **options)
        if has_no_next_turn(req) and not req.rid.endswith(FIRST_SUFFIX):
            req.skip_radix_cache_insert = True
        return req

    def stream(
        self: Any, reqs: list[Any], return_logprob: bool, skip_req: Any = None, **options: Any
    ) -> None:
        for req in reqs:
            # Its prompt is in the cache now.
            if req is not skip_req and has_no_next_turn(req):
                req.skip_radix_cache_insert = True
        stream_generation(self, reqs, return_logprob, skip_req, **options)

    scheduler_class._create_generation_req = create
    streamer_class._stream_output_generation = stream


def _install_input(module: ModuleType, served: list[Requests]) -> None:
    receiver_class, scheduler_class = module.SchedulerRequestReceiver, module.Scheduler
    pull_raw_reqs = receiver_class._pull_raw_reqs
    record_paused = scheduler_class._record_scheduler_state_for_paused_engine

    def pull(self: Any) -> list[Any] | None:
        requests = pull_raw_reqs(self)
        return requests + served[0].take() if served else requests

    def rest_while_paused(self: Any) -> None:
        record_paused(self)
        if self.idle_sleeper is not None:
            self.idle_sleeper.poller.poll(PAUSED_POLL_MS)

    receiver_class._pull_raw_reqs = pull
    scheduler_class._record_scheduler_state_for_paused_engine = rest_while_paused


def _install_output(module: ModuleType, served: list[Requests]) -> None:
    scheduler_class = module.Scheduler
    streamer_class = scheduler_class.get_output_streamer_class(scheduler_class)
    stream_generation = streamer_class._stream_output_generation
    send_abort = scheduler_class.send_abort_output

    def stream(
        self: Any,
        reqs: list[Any],
        return_logprob: bool,
        skip_req: Any = None,
        is_idle_batch: bool = False,
    ) -> None:
        if served:
            version = module.get_serving().weight_version
            others = served[0].note_step(reqs, skip_req, version)
            if reqs and not others:
                return
            reqs = others
        stream_generation(self, reqs, return_logprob, skip_req, is_idle_batch)

    def send_abort_output(self: Any, abort_req: Any, req: Any) -> None:
        if served and req.rid.startswith(NAME_PREFIX):
            served[0].note_abort(req.rid, abort_req.finished_reason)
        else:
            send_abort(self, abort_req, req)

    streamer_class._stream_output_generation = stream
    scheduler_class.send_abort_output = send_abort_output
