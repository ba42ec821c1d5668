import subprocess
import sys
import time
from collections import Counter
from typing import Any, Literal, get_args, get_type_hints

import msgspec
import numpy as np
import pytest

from megatron_rl.protocol import types
from megatron_rl.protocol.endpoints import ENDPOINTS, Endpoint, names_of
from megatron_rl.protocol.generator_messages import EngineActivity, EnvironmentFault
from megatron_rl.protocol.node_messages import PhaseKind, RoleRestart, TrainerOrder, TrainerPart
from megatron_rl.protocol.prompt import LengthRule
from megatron_rl.protocol.queue_state import (
    CurriculumState,
    PromptCursor,
    PromptVisits,
    QueueState,
    StageState,
    UnfinishedEvaluation,
    UnfinishedGroup,
)
from megatron_rl.protocol.scorer_messages import LogprobRequest, LogprobsDone
from megatron_rl.protocol.types import (
    NOT_GRADED,
    AnyMessage,
    ChatMessage,
    Lease,
    MinibatchShare,
    NextBatch,
    Prompt,
    RankBatch,
    Rollout,
    RolloutDone,
    Sampling,
    Score,
    ScoreDone,
    ScoreFailed,
    Stop,
    TrainSequence,
    VersionSpan,
)  # fmt: skip
from megatron_rl.protocol.wire import (
    DeadlineExceeded,
    Dealer,
    Router,
    TurnedAway,
    WireError,
    decode,
    encode,
)
from tests.ports import free_port


def same(one: Any, two: Any) -> bool:
    """Equality that looks into arrays, their dtypes included."""
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and one.tolist() == two.tolist()
    if isinstance(one, msgspec.Struct):
        return type(one) is type(two) and all(
            same(getattr(one, f), getattr(two, f)) for f in one.__struct_fields__
        )
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


def sequence(length: int) -> TrainSequence:
    return TrainSequence(
        np.arange(length, dtype=np.int32), 1, np.full(length - 1, -1 / 3, np.float32),
        [(version, 1) for version in range(length - 1)], advantage=-0.25, weight=1e-9,
    )  # fmt: skip


def examples() -> list[Any]:
    rollout = Rollout(
        3, 1, np.arange(4, dtype=np.int32), np.array([7, 2**31 - 1], np.int32),
        np.array([-0.1, -1e30], np.float32), [VersionSpan(2, 0, 1), VersionSpan(3, 1, 2)], "stop",
        "été \u2028 \x00",
    )  # fmt: skip
    prompt = Prompt("id", "math", [ChatMessage("user", "1+1?")], "2", "held_out", '{"a": 1}')
    batch = RankBatch(
        4, 0, [MinibatchShare([[sequence(5), sequence(2)], []]), MinibatchShare([[sequence(9)]])],
        {"queue/x": (1.5, 2.0, "mean")},
    )  # fmt: skip
    special = [
        RolloutDone(rollout), Lease(1, prompt, [0, 3], Sampling(8, 0.0)), batch,
        ScoreDone(5, Score(1.0, {"format": 0.1}, "correct")),
        LogprobRequest(2**40, np.array([7, 0, 2**31 - 1], np.int32), 1),
        LogprobsDone(2**40, np.array([-0.1, -1e30], np.float32)),
        QueueState(
            6, PromptCursor(9, [9], [4], 1), 12, [UnfinishedGroup(11, "id", 1)], ["before"],
            StageState([0, 5], [0.25], ["", "rollout/correct"]),
            CurriculumState(1, [(3, 4)], {"id": PromptVisits(2, 1, False)}, 0),
            [UnfinishedEvaluation("step_5.aime", 5, has_begun=True)],
        ),
    ]  # fmt: skip
    kinds = set(map(type, special))
    return special + [plain(kind) for kind in get_args(AnyMessage) if kind not in kinds]


def plain(kind: type) -> Any:
    """A message of a kind whose fields are plain."""
    values: dict[Any, Any] = {
        PhaseKind: PhaseKind.SFT_BASELINE,
        int: 7, str: "text", bool: True, float: 0.5, list[str]: ["a", "b"],
        list[int]: [0, 3], list[int] | None: [7, 2**40],
        list[tuple[int, int]]: [(2**40, 1)],
        list[ChatMessage]: [ChatMessage("user", "a question")],
        list[float]: [-0.5, -1e30],
        list[list[int]]: [[1], [2, 3]], dict[str, int]: {"answers": 4, "code": 1},
        dict[str, str]: {"NCCL_CUMEM_ENABLE": "1"}, dict[int, str]: {0: "10.0.0.1", 1: "10.0.0.2"},
        LengthRule | None: LengthRule(8, 2, 0.1),
        Literal["engine", "none", EnvironmentFault]: "hang",
        EngineActivity | None: EngineActivity(1.5, 2.5, 300, 4, 40, 5, 1),
        tuple[RoleRestart, ...]: (RoleRestart("generator-1", "generator", -9, 1, 3, 1),),
        TrainerOrder: TrainerOrder(start=3, stop=2),
        TrainerPart: TrainerPart(3, is_over=True, exit_code=-9, text="killed"),
    }  # fmt: skip
    hints = get_type_hints(kind)  # without Annotated
    found = {field.name: values[hints[field.name]] for field in msgspec.structs.fields(kind)}
    return kind(**found | ({"kind": NOT_GRADED} if kind is ScoreFailed else {}))


@pytest.mark.parametrize("message", examples(), ids=lambda m: type(m).__name__)
def test_message_survives_the_wire(message: Any) -> None:
    assert same(decode(encode(message)), message)


def test_reason_that_a_completion_had_a_hand_in_can_be_sent_and_is_short() -> None:
    failed = ScoreFailed(3, "bad \ud800 tail\x00\n" + "x" * 5_000_000)
    received = decode(encode(failed))
    assert same(received, failed) and received.kind == "ungradable"
    assert received.reason.startswith("bad \\ud800 tail\x00\nxxx")
    assert len(received.reason) == 2000


def test_every_message_has_its_own_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in get_args(AnyMessage)]
    assert len(set(tags)) == len(tags) == len(set(map(type, examples())))


def test_wide_arrays_become_32_bit_and_other_objects_are_refused() -> None:
    wide = msgspec.structs.replace(sequence(3), token_ids=np.array([1, 2, 3], np.int64))
    batch = RankBatch(0, 0, [MinibatchShare([[wide]])], {})
    assert decode(encode(batch)).minibatches[0].microbatches[0][0].token_ids.dtype == np.int32
    with pytest.raises(NotImplementedError, match="cannot send ndarray"):
        encode(msgspec.structs.replace(sequence(3), token_ids=np.zeros((2, 2))))


@pytest.mark.parametrize(
    "frame",
    [
        b"", b"\xc1garbage", encode(Stop())[:-3], msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "NextBatch", "step": "x", "dp_rank": 0, "dp_size": 1}),
        encode(RolloutDone(examples()[0].rollout)).replace(b"\xa1i", b"\xa1q"),
    ],
    ids=["empty", "garbage", "cut", "unknown kind", "wrong type", "unknown array kind"],
)  # fmt: skip
def test_bad_frame_is_a_wire_error(frame: bytes) -> None:
    with pytest.raises(WireError, match="that is no message"):
        decode(frame)


def test_every_kind_of_message_goes_over_an_endpoint() -> None:
    found = {
        name
        for endpoint in ENDPOINTS
        for name in (*names_of(endpoint.router_hears), *names_of(endpoint.dealer_hears))
    }
    assert found == set(names_of(AnyMessage))


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_a_message_of_another_endpoint_is_refused_by_name(endpoint: Endpoint) -> None:
    port = free_port()
    heard, said = names_of(endpoint.router_hears), names_of(endpoint.dealer_hears)
    address = f"127.0.0.1:{port}"
    with (
        Router("127.0.0.1", port, endpoint=endpoint) as router,
        Dealer(address, "a", endpoint=endpoint) as dealer,
    ):
        for message in examples():
            name = type(message).__name__
            expected = f"{endpoint.name} endpoint: .*{name}.*; allowed are"
            dealer.send(message)
            if name in heard:
                received = router.receive(60)
                assert received is not None and type(received[1]) is type(message)
            else:
                with pytest.raises(WireError, match=f"{expected} {', '.join(heard)}$") as error:
                    router.receive(60)
                assert error.value.peer == "a"
            assert router.send("a", message)
            if name in said:
                assert type(dealer.receive(60)) is type(message)
            else:
                with pytest.raises(WireError, match=f"{expected} {', '.join(said)}$"):
                    dealer.receive(60)


def test_router_and_dealer_exchange_messages_and_a_restarted_peer_takes_over() -> None:
    port = free_port()
    with Router("127.0.0.1", port) as router:
        with Dealer(f"127.0.0.1:{port}", "a") as dealer:
            dealer.send(NextBatch(1, 0, 1))
            assert router.receive(60) == ("a", NextBatch(1, 0, 1))
            assert router.send("a", Stop("x")) and dealer.receive(60) == Stop("x")
        with Dealer(f"127.0.0.1:{port}", "a") as dealer:
            dealer.send(NextBatch(2, 0, 1))
            assert router.receive(60) == ("a", NextBatch(2, 0, 1))
            assert router.send("a", Stop("y")) and dealer.receive(60) == Stop("y")
        assert not router.send("stranger", Stop())


def test_bad_frame_at_a_router_is_a_wire_error() -> None:
    port = free_port()
    with Router("127.0.0.1", port) as router, Dealer(f"127.0.0.1:{port}", "a") as dealer:
        dealer.socket.send(b"garbage")
        with pytest.raises(WireError, match="a frame of 7 bytes that is no message"):
            router.receive(60)


def test_port_in_use_is_a_clear_error() -> None:
    port = free_port()
    message = f"cannot listen on 127.0.0.1:{port}"
    with Router("127.0.0.1", port), pytest.raises(WireError, match=message):
        Router("127.0.0.1", port)


FORGOTTEN = """
import gc, sys
from megatron_rl.protocol.wire import Dealer, Router
router = Router("127.0.0.1", int(sys.argv[1]))
dealer = Dealer(f"127.0.0.1:{sys.argv[1]}", "a")
router.self, dealer.self = router, dealer
del router, dealer
gc.collect()
"""


def test_sockets_that_nobody_closed_are_collected_without_waiting() -> None:
    """In rings, as those of an exception and its frames."""
    arguments = [sys.executable, "-c", FORGOTTEN, str(free_port())]
    assert subprocess.run(arguments, timeout=60, check=False).returncode == 0


def test_binding_to_other_hosts_without_keys_is_refused() -> None:
    with pytest.raises(WireError, match="refusing to bind 0.0.0.0 without CURVE keys"):
        Router("0.0.0.0", free_port())


def test_waits_end_at_their_deadline() -> None:
    port = free_port()
    with Router("127.0.0.1", port) as router, Dealer(f"127.0.0.1:{port}", "a") as dealer:
        started = time.monotonic()
        assert router.receive(0.1) is None and dealer.receive(0.1) is None
        with pytest.raises(DeadlineExceeded, match="no answer from .* to NextBatch"):
            dealer.request(NextBatch(0, 0, 1), timeout_s=0.1)
        assert time.monotonic() - started < 30


def test_rollout_knows_its_oldest_and_newest_version() -> None:
    rollout = examples()[0].rollout
    assert isinstance(rollout, types.Rollout)
    assert (rollout.oldest_version, rollout.newest_version) == (2, 3)


def test_a_peer_of_another_phase_is_turned_away_and_never_heard(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    with (
        Router("127.0.0.1", port, label="a1.step_2") as router,
        Dealer(address, "generator-0", label="a1.step_2") as own,
        Dealer(address, "generator-0", label="a1.step_1") as late,
        Dealer(address, "generator-0") as unlabelled,
    ):
        # The same name: what is sent to it goes to its own phase alone, whoever comes last.
        own.send(NextBatch(1, 0, 1))
        assert router.receive(60) == ("generator-0", NextBatch(1, 0, 1))
        for stranger, count in ((late, 3), (unlabelled, 2)):
            for step in range(count):
                stranger.send(NextBatch(step, 0, 1))
        own.send(NextBatch(2, 0, 1))
        assert router.receive(60) == ("generator-0", NextBatch(2, 0, 1))
        deadline = time.monotonic() + 60
        while router.turned_away.total() < 5 and time.monotonic() < deadline:
            assert router.receive(0.05) is None
        assert router.turned_away == {"generator-0@a1.step_1": 3, "generator-0": 2}
        assert router.send("generator-0", Stop("x")) and own.receive(60) == Stop("x")
        expected = r"does not serve this process of phase step_1: .* \(expert.ports.label\)"
        with pytest.raises(TurnedAway, match=expected) as refused:
            late.receive(60)
        # A stranger is not told the label under which it would be heard, and logs have none.
        assert "step_2" not in str(refused.value)
        with pytest.raises(TurnedAway, match="serve this process: "):
            unlabelled.receive(60)
        assert "generator-0 of phase step_1 is turned away" in caplog.text
        assert "a1" not in caplog.text + str(refused.value)
        assert own.receive(0.0) is None


def test_turning_strangers_away_does_not_keep_the_receiver() -> None:
    port = free_port()
    with (
        Router("127.0.0.1", port, label="a") as router,
        Dealer(f"127.0.0.1:{port}", "g", label="b") as stranger,
    ):
        for step in range(50):
            stranger.send(NextBatch(step, 0, 1))
        deadline = time.monotonic() + 60
        while router.turned_away.total() < 1 and time.monotonic() < deadline:
            router.receive(0.01)
        # One message a look: what else is to be done comes in between.
        before = router.turned_away.total()
        assert router.receive(0.0) is None
        assert router.turned_away.total() <= before + 1


def test_strangers_of_many_names_are_counted_under_a_bounded_number_of_names() -> None:
    router = object.__new__(Router)
    router._label, router.turned_away = "a", Counter()
    router._dismiss = lambda identity, why: None
    for number in range(1500):
        router._turn_away(f"stranger-{number}".encode())
    assert len(router.turned_away) == 1001 and router.turned_away.total() == 1500
    assert router.turned_away["(others)"] == 500
