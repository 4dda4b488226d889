"""The worker's side of a board: any policy and any environment acts there, and its frames are stamped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import BaseCollector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data.utils import CloudpickleWrapper
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv
from torchrl.modules import RandomPolicy

from rlsync import BoardScheme, LayoutMismatch
from tests.tools.parts import ACTIONS, CountingEnv, make_counting_env, make_plain_policy
from tests.tools.parts.policies import Greedy
from tests.tools.running import running, values

pytestmark = pytest.mark.processes


class FirstAction(nn.Module):
    """Takes the first action always: a policy without weights, which TorchRL wraps by itself."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(torch.zeros(observation.shape[:-1], dtype=torch.int64), ACTIONS)


class ReadsTheStamp(nn.Module):
    """A policy whose forward asks for the version that is on the frame."""

    def forward(self, observation: torch.Tensor, policy_version: torch.Tensor) -> torch.Tensor:
        return nn.functional.one_hot(torch.zeros_like(policy_version, dtype=torch.int64), ACTIONS)


def first_action(tensordict: TensorDictBase) -> TensorDictBase:
    """A function as a policy."""
    return tensordict.set("action", FirstAction()(tensordict["observation"]))


def wrapped_first_action() -> TensorDictModule:
    return TensorDictModule(FirstAction(), in_keys=["observation"], out_keys=["action"])


def make_random_policy() -> RandomPolicy:
    return RandomPolicy(CountingEnv().action_spec)


def make_random_method() -> CloudpickleWrapper:
    return CloudpickleWrapper(CountingEnv().rand_action)


def two_serial() -> EnvBase:
    return SerialEnv(2, make_counting_env)


def two_parallel() -> EnvBase:
    return ParallelEnv(2, make_counting_env, mp_start_method="fork")


def workers(
    policy: object = None,
    kind: type[BaseCollector] = MultiSyncCollector,
    env: Callable[[], EnvBase] = make_counting_env,
    **options: object,
) -> BaseCollector:
    """Two workers on a board; the board itself turns stamps on."""
    board = {"policy": BoardScheme()}
    size = {"frames_per_batch": 40, "total_frames": -1}
    return kind([env] * 2, policy, weight_sync_schemes=board, **size, **options)


def stamps_of(collector: BaseCollector, batches: int = 3) -> list[set[float]]:
    """The stamps of batches between which TorchRL's own method publishes."""
    found = []
    with running(collector):
        for _, batch in zip(range(batches), collector, strict=False):
            stamps = values(batch, "policy_version")
            assert stamps == values(batch, "next", "policy_version")
            found.append(stamps)
            collector.update_policy_weights_()
    return found


# ---------------------------------------------------------------------------- policies without weights


@pytest.mark.parametrize(
    "make",
    [FirstAction, wrapped_first_action, make_random_policy, lambda: first_action, make_random_method],
    ids=["module", "tensordict module", "random", "function", "method"],
)
def test_a_policy_without_weights_acts_and_its_versions_count(make: Callable[[], object]) -> None:
    policy = make()
    assert stamps_of(workers(policy)) == [{1}, {2}, {3}]


def test_workers_that_are_given_no_policy_act_at_random_and_their_versions_count() -> None:
    assert stamps_of(workers()) == [{0}, {1}, {2}]  # nothing was there to be published at the start


def test_a_policy_without_weights_made_by_a_factory_has_versions() -> None:
    collector = workers(policy_factory=wrapped_first_action)
    assert stamps_of(collector) == [{0}, {1}, {2}]


@pytest.mark.usefixtures("fork_workers")
def test_forked_workers_stamp_a_policy_without_weights() -> None:
    assert stamps_of(workers(wrapped_first_action())) == [{1}, {2}, {3}]


def test_asynchronous_workers_adopt_versions_without_weights() -> None:
    with running(workers(FirstAction(), MultiAsyncCollector)) as collector:
        board, batches = collector._weight_sync_schemes["policy"].board, iter(collector)
        assert values(next(batches), "policy_version") == {1}
        collector.update_policy_weights_()
        assert collector.policy_version == 2
        while {worker.adopted_version for worker in board.status()} != {2}:
            next(batches)


def test_a_function_that_holds_a_network_is_refused() -> None:
    network = make_plain_policy()
    with pytest.raises(LayoutMismatch, match="function holds no weights"):
        workers(lambda tensordict: network(tensordict))


# --------------------------------------------------------------- what a policy is called with, and where


def test_a_plain_module_is_not_called_with_the_stamp() -> None:
    assert stamps_of(workers(Greedy())) == [{1}, {2}, {3}]


def test_a_plain_module_made_by_a_factory_is_not_called_with_the_stamp() -> None:
    with running(workers(policy_factory=Greedy)) as collector:
        batches = iter(collector)
        next(batches)
        collector.update_policy_weights_(Greedy())
        assert values(next(batches), "policy_version") == {1}


def test_a_plain_module_that_asks_for_the_stamp_gets_it() -> None:
    assert stamps_of(workers(ReadsTheStamp())) == [{1}, {2}, {3}]


@pytest.mark.one_case
@pytest.mark.parametrize("env", [two_serial, two_parallel])
def test_vectors_of_environments_are_stamped_as_they_are(env: Callable[[], EnvBase]) -> None:
    collector = workers(make_plain_policy(), env=env)
    assert stamps_of(collector) == [{1}, {2}, {3}]


def test_this_process_goes_on_with_torchrls_own_functions() -> None:
    from torchrl.collectors import Collector, _single
    from torchrl.envs import utils

    tracking = Collector._setup_policy_version_tracking
    with running(workers(Greedy())) as collector:
        next(iter(collector))
    assert _single._make_compatible_policy is utils._make_compatible_policy
    assert Collector._setup_policy_version_tracking is tracking
