"""The first message of every kind between trainer and scorer is lost: the batch gets its logprobs.

Client, scorer and sockets are the real ones; the scorer's engine follows a script.
"""

import asyncio
import threading

import numpy as np
import pytest

from generation.async_sockets import AsyncRouter
from generation.engine import RequestRefused
from generation.scorer import Scorer
from megatron_rl.protocol.process import TrainingStopped
from megatron_rl.protocol.types import AnyMessage, TrainSequence
from megatron_rl.trainer import scoring_client
from megatron_rl.trainer.scoring_client import ScoringClient
from tests.lossy_router import LINKS, Loss
from tests.ports import free_port

JUDGE = {"JudgeRequest", "Judged", "JudgeRefused"}
"""Kinds of generators: tests/generation/test_judge.py loses them."""
REFUSED = 9
"""A token id that the engine does not take."""


class ScriptedEngine:
    """The logprob of a token is its id, negative."""

    async def logprobs(self, token_ids: list[int], start: int) -> list[float]:
        if REFUSED in token_ids:
            raise RequestRefused("no such token")
        return [-float(token) for token in token_ids[start:]]

    async def failed(self) -> str:
        await asyncio.sleep(3600)
        return "never"


class LossyAsyncRouter(AsyncRouter):
    """Loses the first message of each kind, in both directions."""

    def __init__(self, port: int, loss: Loss) -> None:
        super().__init__("127.0.0.1", port)
        self.loss = loss

    def send(self, peer: str, message: AnyMessage) -> bool:
        return self.loss.takes(peer, message) or super().send(peer, message)

    async def next_message(self) -> tuple[str, AnyMessage]:
        while self.loss.takes(*(received := await super().next_message())):
            pass
        return received


def sequence(*token_ids: int) -> TrainSequence:
    count = len(token_ids) - 1
    return TrainSequence(
        token_ids=np.array(token_ids, np.int32), prompt_length=1,
        generator_logprobs=np.zeros(count, np.float32),
        version_runs=[(0, count)], advantage=0.0, weight=1.0,
    )  # fmt: skip


def test_a_batch_outlives_the_first_loss_of_every_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_client, "ASK_AGAIN_S", 0.2)
    kinds = set(LINKS["scorer"]) - JUDGE
    port, loss = free_port(), Loss(set(kinds))

    async def serve() -> None:
        with LossyAsyncRouter(port, loss) as router:
            await Scorer(ScriptedEngine(), router, 4).run()

    scorer = threading.Thread(target=lambda: asyncio.run(asyncio.wait_for(serve(), 20)))
    scorer.start()
    with ScoringClient(
        f"127.0.0.1:{port}", "trainer-0", keys=None, label="", max_open=2, answer_within_s=10.0
    ) as client:
        client.begin([sequence(1, 2, 3), sequence(4, 5)])
        found = client.take(10.0)
        assert found is not None and found.tolist() == [-2.0, -3.0, -5.0]
        client.begin([sequence(1, REFUSED)])
        with pytest.raises(TrainingStopped, match="no such token"):
            client.take(10.0)
        # One request, one answer and one refusal were lost.
        assert client.asked_again == 3
        client.stop()
        scorer.join(60)
    assert not scorer.is_alive() and loss.kinds == sorted(kinds)
