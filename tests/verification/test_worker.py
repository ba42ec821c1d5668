import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import verification.worker
from megatron_rl.config.files import dump_toml, load_config
from megatron_rl.config.reward import (
    ExtraReward,
    RewardConfig,
    TaskConfig,
    VerifierConfig,
    WorkerPoolConfig,
)  # fmt: skip
from megatron_rl.config.tree import Config, PortsConfig, PromptSource, RunConfig
from megatron_rl.protocol.types import (
    AnyMessage,
    ClassDone,
    ClassRequest,
    Sampling,
    ScoreDone,
    ScoreFailed,
    ScoreRequest,
    Stop,
    VerifierReady,
)  # fmt: skip
from megatron_rl.protocol.wire import Router
from megatron_rl.rollout_queue import peers
from megatron_rl.rollout_queue.groups import Group
from megatron_rl.rollout_queue.scoring import Scoring
from tests.ports import free_port
from tests.rollout_queue.makers import make_prompt, make_rollout
from tests.verification.requests import boxed, make_request

HANG = "tests.verification.pool.hostile_tasks:hang"
CAPACITY = 8


def _write_config(folder: Path, port: int, *, dataset: str = "chain_sum") -> Path:
    config = Config(
        run=RunConfig(dir=folder),
        reward=RewardConfig(
            tasks={"hang": TaskConfig(compare=HANG), "slow": TaskConfig(compare="exact")},
            extra=[ExtraReward(name="patience", function=HANG, tasks=["slow"])],
        ),
        verifier=VerifierConfig(
            answers=WorkerPoolConfig(timeout_s=1.0, max_pending=CAPACITY),
            custom=WorkerPoolConfig(timeout_s=1.0, max_pending=CAPACITY),
        ),
        ports=PortsConfig(verify=port),
        prompts=[PromptSource(kind="reasoning_gym", name=dataset)],
    )
    path = folder / "config.toml"
    path.write_text(dump_toml(config))
    return path


@contextlib.contextmanager
def _verifier(config: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, "-m", "verification.worker", "--config", config])
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)


def _receive(router: Router, limit_s: float = 30.0) -> AnyMessage:
    received = router.receive(limit_s)
    assert received is not None, "the verifier is silent"
    peer, message = received
    assert peer == "verifier"
    return message


def _wait_for_ready(router: Router) -> VerifierReady:
    message = _receive(router)
    assert isinstance(message, VerifierReady)
    return message


def _score(router: Router, requests: list[ScoreRequest]) -> dict[int, ScoreDone | ScoreFailed]:
    for request in requests:
        assert router.send("verifier", request)
    answers: dict[int, ScoreDone | ScoreFailed] = {}
    deadline = time.monotonic() + 60
    while len(answers) < len(requests):
        assert time.monotonic() < deadline
        message = _receive(router)
        if isinstance(message, ScoreDone | ScoreFailed):
            assert message.request_id not in answers
            answers[message.request_id] = message
    return answers


def _wait_for_children(pid: int, number: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while len(children := psutil.Process(pid).children(recursive=True)) != number:
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
    return children


def _requests() -> list[ScoreRequest]:
    return [
        make_request(boxed("7"), request_id=0),
        make_request(boxed("8"), request_id=1),
        make_request(boxed("\\frac{14}{2}"), request_id=2),
        make_request(boxed("cat"), request_id=3, task="exact", answer="cat"),
        make_request("7", request_id=4),
        make_request(boxed("7"), request_id=5, task="no_such_task"),
        make_request(boxed("7"), request_id=6, task="hang"),
        make_request(boxed("(x+1)(x-1)"), request_id=7, answer="x^2-1"),
    ]


def test_verifier_grades_over_sockets_and_stops_clean(tmp_path: Path) -> None:
    port = free_port()
    with Router("127.0.0.1", port) as router, _verifier(_write_config(tmp_path, port)) as process:
        ready = _wait_for_ready(router)
        assert ready.capacity["answers"] == CAPACITY
        assert ready.session > 0
        answers = _score(router, _requests())
        reasons = {
            number: a.score.reason for number, a in answers.items() if isinstance(a, ScoreDone)
        }
        assert reasons == {
            0: "correct", 1: "wrong_answer", 2: "correct", 3: "correct", 4: "no_think_start",
            6: "grading_timeout", 7: "correct",
        }  # fmt: skip
        assert "unknown task 'no_such_task'" in answers[5].reason
        # Fork server, the process that graded the product, its spare; the one that hung is killed.
        children = _wait_for_children(process.pid, 3)
        router.send("verifier", Stop("the test is over"))
        assert process.wait(60) == 0
        assert not any(child.is_running() for child in children)
    assert "told to stop" in (tmp_path / "logs" / "verifier.log").read_text()


def test_requests_beyond_the_room_of_their_pool_are_refused_and_other_pools_go_on(
    tmp_path: Path,
) -> None:
    port = free_port()
    with Router("127.0.0.1", port) as router, _verifier(_write_config(tmp_path, port)):
        _wait_for_ready(router)
        # A comparison of the user's, and an extra reward beside one of ours: both need this worker
        # pool.
        tasks = ["hang"] * 15 + ["slow"] * 15
        hanging = [make_request(boxed("7"), request_id=i, task=t) for i, t in enumerate(tasks)]
        for request in hanging:
            router.send("verifier", request)
        product = boxed("(x+1)(x-1)")
        others = [make_request(product, request_id=100 + i, answer="x^2-1") for i in range(8)]
        for request in others:
            router.send("verifier", request)
        refused, done = set(), set()
        deadline = time.monotonic() + 60
        while len(done) < len(others):
            assert time.monotonic() < deadline
            message = _receive(router)
            if isinstance(message, ScoreFailed):
                assert "no room in worker pool 'custom'" in message.reason
                refused.add(message.request_id)
            elif isinstance(message, ScoreDone) and message.request_id >= 100:
                assert message.score.is_correct
                done.add(message.request_id)
        # Twice the room, for what a queue asked for before it restarted.
        assert refused == set(range(2 * CAPACITY, 30))


def test_verifier_finds_classes_beside_scores_and_survives_answers_that_hang(
    tmp_path: Path,
) -> None:
    def asked(number: int, answers: list[str], task: str = "math") -> ClassRequest:
        return ClassRequest(number, task, [boxed(a) for a in answers], [""] * len(answers))

    port = free_port()
    with Router("127.0.0.1", port) as router, _verifier(_write_config(tmp_path, port)) as process:
        _wait_for_ready(router)
        requests = [
            asked(10, ["3", "x+1", "3.0", "1+x"]), asked(11, ["a", "b", "a"], "hang"),
            asked(12, ["a"], "no_such_task"), make_request(boxed("7"), request_id=13),
        ]  # fmt: skip
        for request in requests:
            router.send("verifier", request)
        answers: dict[int, AnyMessage] = {}
        while len(answers) < len(requests):
            message = _receive(router)
            if not isinstance(message, VerifierReady):
                answers[message.request_id] = message
        assert answers[10] == ClassDone(10, [0, 1, 0, 1])
        # The pair exceeded its limit, twice: two answers.
        assert answers[11] == ClassDone(11, [0, 1, 0])
        assert isinstance(answers[12], ScoreFailed) and "no_such_task" in answers[12].reason
        assert isinstance(answers[13], ScoreDone) and answers[13].score.is_correct
        # More than twice the room of the worker pool: a queue that restarted.
        for number in range(20, 50):
            router.send("verifier", asked(number, ["a", "b"], "hang"))
        refused = set()
        while len(refused) < 30 - 2 * CAPACITY:
            message = _receive(router)
            if isinstance(message, ScoreFailed) and "no room" in message.reason:
                refused.add(message.request_id)
        assert refused == set(range(20 + 2 * CAPACITY, 50))
        router.send("verifier", Stop("the test is over"))
        assert process.wait(60) == 0


def test_heartbeats_continue_and_a_new_queue_is_met_again(tmp_path: Path) -> None:
    port = free_port()
    with _verifier(_write_config(tmp_path, port)):
        with Router("127.0.0.1", port) as router:
            first = _wait_for_ready(router)
            start = time.monotonic()
            # Two of 2 s: the test may have been late to look at the first one.
            assert _wait_for_ready(router) == _wait_for_ready(router) == first
            assert 1.0 < time.monotonic() - start < 50.0
        with Router("127.0.0.1", port) as router:
            assert _wait_for_ready(router) == first
            answers = _score(router, [make_request(boxed("7"))])
            assert isinstance(answers[1], ScoreDone)


def test_a_verifier_names_what_it_grades_and_a_lost_request_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification.worker, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(peers, "ABSENT_S", 0.4)
    port = free_port()
    config = load_config(_write_config(tmp_path, port))
    queue = Scoring(config.queue, config.reward)
    for number, task in enumerate(("hang", "math")):
        group = Group(number, make_prompt(task=task), Sampling(8, 1.0), 1, 0)
        queue.submit(group, make_rollout(text=boxed("1")))
    asked: Counter[str] = Counter()
    named, reasons = [], {}
    with Router("127.0.0.1", port) as router:
        grading = threading.Thread(
            target=verification.worker.serve, args=(config, "verifier"), daemon=True
        )
        grading.start()
        try:
            deadline = time.monotonic() + 60
            while len(reasons) < 2 or named[-1]:
                assert time.monotonic() < deadline, (asked, named)
                message, now = _receive(router), time.monotonic()
                if isinstance(message, VerifierReady):
                    named.append(message.requests)
                    queue.announce("verifier", message, now)
                else:
                    assert isinstance(message, ScoreDone)
                    group, scored = queue.take_score("verifier", message, now)
                    reasons[group.prompt.task] = scored.score.reason
                while (found := queue.next_request(now)) is not None:
                    asked[found[1].task] += 1
                    # The first request of this task is lost on the way.
                    if (found[1].task, asked["math"]) != ("math", 1):
                        router.send(*found)
        finally:
            router.send("verifier", Stop("the test is over"))
            grading.join(60)
    assert not grading.is_alive()
    # It grades "hang" for longer than a request may be absent, and says so.
    assert [0] in named and asked == {"hang": 1, "math": 2}
    assert reasons == {"hang": "grading_timeout", "math": "correct"}


@pytest.mark.parametrize(
    ("number", "exit_codes"), [(signal.SIGTERM, {143}), (signal.SIGKILL, {-9})]
)
def test_grading_processes_die_with_the_verifier(
    tmp_path: Path, number: signal.Signals, exit_codes: set[int]
) -> None:
    port = free_port()
    with Router("127.0.0.1", port) as router, _verifier(_write_config(tmp_path, port)) as process:
        _wait_for_ready(router)
        _score(router, [make_request(boxed("(x+1)(x-1)"), answer="x^2-1")])
        router.send("verifier", make_request(boxed("7"), request_id=2, task="hang"))
        children = _wait_for_children(process.pid, 4)
        os.kill(process.pid, number)
        assert process.wait(60) in exit_codes
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def test_refused_dataset_ends_the_verifier_at_once(tmp_path: Path) -> None:
    config = _write_config(tmp_path, free_port(), dataset="spiral_matrix")
    result = subprocess.run(
        [sys.executable, "-m", "verification.worker", "--config", config],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 2
    assert "'spiral_matrix' is refused: its scorer evaluates" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_verifier_of_another_phase_ends_with_exit_code_2(tmp_path: Path) -> None:
    port = free_port()
    path = _write_config(tmp_path, port)
    text = path.read_text()
    assert 'label = ""' in text
    path.write_text(text.replace('label = ""', 'label = "a.step_1"'))
    with Router("127.0.0.1", port, label="a.step_2") as router, _verifier(path) as process:
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            assert router.receive(0.1) is None
        assert process.wait(1) == 2
        assert set(router.turned_away) == {"verifier@a.step_1"}
    log = (tmp_path / "logs" / "verifier.log").read_text()
    assert "does not serve this process of phase step_1" in log and "Traceback" not in log


@pytest.mark.parametrize(("limit_s", "answered"), [(60.0, True), (0.1, False)])
def test_a_leaving_verifier_answers_what_it_has_in_its_time_and_takes_no_more(
    tmp_path: Path, limit_s: float, answered: bool
) -> None:
    port = free_port()
    path = _write_config(tmp_path, port)
    config = load_config(path)
    nodes = config.nodes.model_copy(update={"leave_timeout_s": limit_s})
    path.write_text(dump_toml(config.model_copy(update={"nodes": nodes})))
    with Router("127.0.0.1", port) as router, _verifier(path) as process:
        _wait_for_ready(router)
        # It is graded until the pool's timeout of 1 s.
        assert router.send("verifier", make_request(boxed("7"), request_id=6, task="hang"))
        while _wait_for_ready(router).requests != [6]:
            pass
        process.send_signal(signal.SIGUSR2)
        states, answers = [], []
        while not states or states[-1].requests:
            message = _receive(router)
            if isinstance(message, VerifierReady) and message.is_leaving:
                if not states:
                    router.send("verifier", make_request(boxed("7"), request_id=7))
                states.append(message)
            elif isinstance(message, ScoreDone):
                answers.append(message.request_id)
        assert states[0].requests == [6] and answers == [6] * answered
        assert router.send("verifier", Stop("it has left the run"))
        assert process.wait(60) == 0
