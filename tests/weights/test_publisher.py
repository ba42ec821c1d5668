"""The publisher against a peer that speaks the weights protocol over real sockets and gloo."""

import socket
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_rl.protocol.types import (
    Ack,
    Bucket,
    Failed,
    Hello,
    JoinGroup,
    LeaveGroup,
    Pause,
    Resume,
)
from megatron_rl.protocol.wire import DeadlineExceeded, Dealer, Router
from megatron_rl.weights.group import bucket_bytes, open_group, split_bucket
from megatron_rl.weights.publisher import GeneratorLink, PublishError, WeightPublisher
from tests.distributed import run_ranks

TIMEOUT_S = 4.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tensors_of(version: int) -> list[tuple[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(version)
    return [
        ("a", torch.randn(7, 3, generator=rng)),
        ("b", torch.randn(5, generator=rng).bfloat16()),
        ("c", torch.randn(11, 2, generator=rng)),
    ]


def publish_twice(port: int) -> float:
    """Rank 0: publish versions 0 and 1 in two buckets each; returns the seconds of the second."""
    version = 0

    def source() -> Iterator[list[tuple[str, torch.Tensor]]]:
        tensors = tensors_of(version)
        yield tensors[:2]
        yield tensors[2:]

    with Router("127.0.0.1", port) as router:
        link = GeneratorLink(router, replicas=1, timeout_s=TIMEOUT_S, join_timeout_s=20)
        link.open("127.0.0.1", "gloo", "weights-test")
        with WeightPublisher(source, link) as weights:
            weights.publish(0)
            version = 1
            weights.publish(1)
            return weights.metrics[0].value


def obey(port: int, fail_at: str = "") -> list[tuple[str, object]]:
    """Rank 1: a generator; returns what it was told, with the tensors that it received."""
    told: list[tuple[str, object]] = []
    group: dist.ProcessGroup | None = None
    with Dealer(f"127.0.0.1:{port}", "generator-0") as dealer:
        dealer.send(Hello(1, "scripted", "1"))
        while (message := dealer.receive(20)) is not None:
            name = type(message).__name__
            if name == fail_at:
                dealer.send(Failed(name, "scripted failure"))
                time.sleep(1)
                return told
            match message:
                case JoinGroup():
                    dealer_group = open_group(
                        message.address, message.port, message.rank_offset, message.world_size,
                        message.group_name, message.backend, message.timeout_s,
                    )  # fmt: skip
                    group = dealer_group
                    told.append((name, message.world_size))
                case Bucket():
                    size = bucket_bytes(message.dtypes, message.shapes)
                    flat = torch.empty(size, dtype=torch.uint8)
                    dist.broadcast(flat, src=0, group=group)
                    received = split_bucket(flat, message.names, message.dtypes, message.shapes)
                    # Clones: torch.save refuses views of different types on one buffer.
                    told.append((name, [(tensor_name, t.clone()) for tensor_name, t in received]))
                case Pause():
                    told.append((name, None))
                case Resume():
                    told.append((name, message.version))
                case LeaveGroup():
                    return told
            dealer.send(Ack(name))
    return told


def play(port: int) -> object:
    return publish_twice(port) if dist_rank() == 0 else obey(port)


def play_failure(port: int) -> object:
    if dist_rank() == 1:
        return obey(port, fail_at="Bucket")
    started = time.monotonic()
    try:
        publish_twice(port)
    except PublishError as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def dist_rank() -> int:
    import os

    return int(os.environ["RANK"])


def test_versions_arrive_bit_for_bit_inside_pause_and_resume() -> None:
    _, told = run_ranks(play, 2, free_port())
    names = [name for name, _ in told]
    assert names == ["JoinGroup", *(["Pause", "Bucket", "Bucket", "Resume"] * 2)]
    assert [value for name, value in told if name == "Resume"] == [0, 1]
    received = [tensors for name, tensors in told if name == "Bucket"]
    for version in (0, 1):
        got = received[2 * version] + received[2 * version + 1]
        for (name, tensor), (expected_name, expected) in zip(got, tensors_of(version), strict=True):
            assert name == expected_name
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)


def test_failure_of_a_generator_ends_the_broadcast_with_its_reason() -> None:
    text, seconds = run_ranks(play_failure, 2, free_port())[0]
    assert "scripted failure" in text and "Bucket" in text
    assert seconds < TIMEOUT_S + 10


def test_missing_generator_is_a_deadline_that_says_where_to_look() -> None:
    with Router("127.0.0.1", free_port()) as router:
        link = GeneratorLink(router, replicas=2, timeout_s=1, join_timeout_s=0.5)
        with pytest.raises(DeadlineExceeded, match=r"0 of 2 generators .* logs/generator"):
            link.open("127.0.0.1", "gloo", "weights-test")
