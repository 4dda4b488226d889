"""Inference servers on a board: they adopt between two batches, and every answer names its version."""

from __future__ import annotations

import threading
import time

import pytest
from torchrl.modules.inference_server import InferenceServer, ThreadingTransport
from torchrl.weight_update import MultiProcessWeightSyncScheme

from rlsync import (
    AdoptionTimeout,
    BoardScheme,
    ConfigError,
    DestinationNotFound,
    LayoutMismatch,
    PublishError,
    WorkerLost,
)
from tests.tools.parts import CanaryPolicy, kill, stopped, wait_until
from tests.tools.parts.servers import TRANSPORTS, make_canary_policy, make_server, request, serving
from tests.tools.running import in_three_lines

FEW_VERSIONS = 10  # fewer would prove nothing
transports = pytest.mark.parametrize("transport", TRANSPORTS)
processes = pytest.mark.processes


def told(scheme: BoardScheme, server: object) -> BoardScheme:
    """A scheme that knows its server, as a hand-written loop tells it."""
    scheme.init_on_sender(model_id="policy", context=server)
    return scheme


def saw(answer) -> tuple[float, float, int]:
    return answer["canary_min"].item(), answer["canary_max"].item(), answer["policy_version"].item()


def next_to(client, version: int) -> tuple[float, float, int]:
    """The first answer by a version that is at least this one."""
    answers = []
    assert wait_until(lambda: answers.append(saw(client(request()))) or answers[-1][2] >= version, 20)
    return answers[-1]


# --------------------------------------------------------------------------------------- canary


@pytest.mark.one_case
@processes
@transports
@pytest.mark.parametrize("adopt", ["alias", "copy"])
def test_no_answer_is_torn_or_misnamed_while_the_learner_publishes_without_a_pause(
    transport: str, adopt: str
) -> None:
    scheme = BoardScheme(adopt)
    server, clients = make_server(transport, scheme, clients=2)
    told(scheme, server)
    learner = make_canary_policy()
    scheme.send(learner.fill(1))
    answers: list[tuple[float, float, int]] = []
    stop = threading.Event()

    def ask(client) -> None:
        while not stop.is_set():
            answers.append(saw(client(request())))

    with serving(server):
        threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        end, version = time.monotonic() + 30, 1
        while time.monotonic() < end and len({stamp for _, _, stamp in answers}) < 3 * FEW_VERSIONS:
            version += 1
            scheme.send(learner.fill(version))
        stop.set()
        for thread in threads:
            thread.join(20)

    assert [answer for answer in answers if not answer[0] == answer[1] == answer[2]] == []
    assert len({stamp for _, _, stamp in answers}) >= FEW_VERSIONS


# ------------------------------------------------------------------------- what the learner does


def test_a_server_in_a_thread_acts_with_a_copy_so_the_learner_may_train_the_policy_it_was_given() -> None:
    policy, scheme = make_canary_policy(), BoardScheme()
    server, (client,) = make_server("thread", scheme, factory=lambda: policy)
    told(scheme, server)
    scheme.send(policy.fill(1))
    with serving(server):
        assert next_to(client, 1) == (1, 1, 1)
        policy.fill(7)  # an optimizer step that nobody published
        assert saw(client(request())) == (1, 1, 1)
        scheme.send(policy)
        assert next_to(client, 2) == (7, 7, 2)
    assert policy.canary.weights[0].is_leaf


def test_answers_before_the_first_publish_carry_version_0() -> None:
    scheme = BoardScheme()
    server, (client,) = make_server("thread", scheme)
    with serving(server):
        assert saw(client(request())) == (0, 0, 0)


def test_weights_that_do_not_fit_are_refused_before_the_server_has_started() -> None:
    scheme = BoardScheme()
    server, _ = make_server("thread", scheme)
    told(scheme, server)
    with pytest.raises(LayoutMismatch) as caught:
        scheme.send(CanaryPolicy(tensors=40, size=1))  # a width of 1 could be broadcast
    assert in_three_lines(caught.value)
    with pytest.raises(LayoutMismatch):
        scheme.send(CanaryPolicy(tensors=10, size=2000))


def test_a_policy_without_weights_is_refused_before_the_server_has_started() -> None:
    scheme = BoardScheme()
    server, _ = make_server("thread", scheme, factory=lambda: lambda tensordict: tensordict)
    told(scheme, server)
    with pytest.raises(DestinationNotFound, match="no module") as caught:
        scheme.send(make_canary_policy())
    assert in_three_lines(caught.value)


def test_a_send_by_a_scheme_that_knows_no_server_is_refused() -> None:
    with pytest.raises(PublishError, match="no collector yet") as caught:
        BoardScheme().send(make_canary_policy())
    assert in_three_lines(caught.value)


def test_a_scheme_that_the_server_was_not_given_is_refused() -> None:
    server, _ = make_server("thread", MultiProcessWeightSyncScheme())
    with pytest.raises(ConfigError, match="not the weight_sync of that InferenceServer") as caught:
        told(BoardScheme(), server)
    assert in_three_lines(caught.value)


def test_one_board_serves_one_server() -> None:
    scheme = BoardScheme()
    server, _ = make_server("thread", scheme)
    other = InferenceServer(make_canary_policy(), ThreadingTransport(), weight_sync=scheme)
    told(scheme, server)
    with pytest.raises(PublishError, match="already serves another") as caught:
        told(scheme, other)
    assert in_three_lines(caught.value)


@processes
@pytest.mark.parametrize("transport", ["thread", "process"])
def test_weights_that_go_around_the_board_are_refused(transport: str) -> None:
    scheme = BoardScheme()
    server, (client,) = make_server(transport, scheme)
    told(scheme, server)
    with serving(server):
        client(request())
        update = server.update_model if transport == "thread" else server.update_model_weights
        with pytest.raises((PublishError, RuntimeError), match="come from a board"):
            update(request())
        assert saw(client(request())) == (0, 0, 0)


@processes
def test_a_forked_server_inherits_the_learners_scheme_and_is_served() -> None:
    scheme = BoardScheme()
    server, (client,) = make_server("process", scheme, start="fork")
    told(scheme, server)
    learner = make_canary_policy()
    scheme.send(learner.fill(1))
    with serving(server):
        assert next_to(client, 1) == (1, 1, 1)
        scheme.send(learner.fill(2))
        assert next_to(client, 2) == (2, 2, 2)


# ----------------------------------------------------------------------------------------- faults


@processes
def test_a_killed_server_is_told_with_how_it_ended() -> None:
    scheme = BoardScheme()
    server, (client,) = make_server("process", scheme)
    told(scheme, server)
    learner = make_canary_policy()
    scheme.send(learner.fill(1))
    with serving(server):
        next_to(client, 1)
        kill(server.health()["pid"])
        scheme.send(learner.fill(2))  # the learner is not held
        with pytest.raises(WorkerLost) as caught:
            scheme.wait(20)
    assert "killed by SIGKILL" in str(caught.value)
    assert "acted with version 1" in str(caught.value)


@processes
def test_a_stopped_server_is_told_and_goes_on_with_the_newest_version() -> None:
    scheme = BoardScheme()
    server, (client,) = make_server("process", scheme)
    told(scheme, server)
    learner = make_canary_policy()
    scheme.send(learner.fill(1))
    with serving(server):
        next_to(client, 1)
        with stopped(server.health()["pid"]):
            for version in (2, 3, 4):
                scheme.send(learner.fill(version))
            with pytest.raises(AdoptionTimeout, match="stopped"):
                scheme.wait(0.2)
        scheme.wait(20)
        assert next_to(client, 4) == (4, 4, 4)


@processes
@pytest.mark.parametrize("transport", ["thread", "process_slot"])
def test_a_server_that_starts_again_acts_with_the_newest_version(transport: str) -> None:
    scheme = BoardScheme()
    server, (client,) = make_server(transport, scheme)
    told(scheme, server)
    learner = make_canary_policy()
    scheme.send(learner.fill(1))
    with serving(server):
        assert next_to(client, 1) == (1, 1, 1)
        if transport == "process_slot":
            kill(server.health()["pid"])
            assert wait_until(lambda: not server.is_alive, 20)
    scheme.send(learner.fill(2))
    with serving(server):
        assert next_to(client, 2) == (2, 2, 2)
        scheme.wait(20)
