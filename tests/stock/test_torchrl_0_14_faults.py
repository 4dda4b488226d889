"""Faults of TorchRL 0.14 that rlsync works around, as far as one process shows them.

The numbers are those of the project's list of TorchRL facts. A test here fails when TorchRL has
fixed the fault, and says what may then be removed. Those that need worker processes are in
test_torchrl_0_14_worker_faults.py.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import MultiSyncCollector
from torchrl.collectors.utils import _make_meta_policy_cm
from torchrl.envs import SerialEnv
from torchrl.modules import RandomPolicy
from torchrl.trainers import UpdateWeights
from torchrl.trainers.algorithms import DQNTrainer, SACTrainer
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from tests.stock.faults import still_happens
from tests.tools.parts import (
    CanaryPolicy,
    make_collector,
    make_counting_env,
    make_mlp,
    make_plain_policy,
    make_policy,
    make_ppo_loss,
    make_ppo_trainer,
    make_sac_loss,
    make_workers,
)
from tests.tools.parts.policies import Greedy

RESOLVE = "rlsync/sync/resolve.py"
SYNC_WEIGHTS = "rlsync/torchrl_plugin/hooks/sync_weights.py"
LEAVES = "rlsync/tensors/leaves.py"
COMPARE = "rlsync/tensors/compare.py"


def _copy_to(destination: nn.Module, weights: TensorDict) -> None:
    WeightStrategy().apply_weights(destination, weights)


def _weights(module: nn.Module) -> TensorDict:
    return WeightStrategy().extract_weights(module)


def _raises(error: type[Exception], call: Callable[[], None]) -> bool:
    try:
        call()
    except error:
        return True
    return False


# --------------------------------------------------------------------------------------- the map


@pytest.mark.parametrize("destination", ["policy", "polcy"])
def test_fault_1_a_map_on_an_in_process_collector_is_dropped_but_the_version_advances(
    destination: str,
) -> None:
    policy = CanaryPolicy(2, 3)
    collector = make_collector(policy)
    learner = SimpleNamespace(policy=CanaryPolicy(2, 3).fill(5))
    sync_map = {destination: "policy"}

    UpdateWeights(collector, 1, weight_update_map=sync_map, trainer=learner)()

    unchanged = policy.canary.low_high() == (0, 0)
    still_happens(1, unchanged and collector.policy_version == 1, RESOLVE)


def test_fault_18_documented_forms_of_update_policy_weights_raise_on_a_plain_collector() -> None:
    collector = make_collector(make_plain_policy())
    update, other = collector.update_policy_weights_, make_plain_policy()
    forms = [
        lambda: update(other),
        lambda: update(policy=other),
        lambda: update(weights=other.state_dict()),
    ]

    still_happens(18, all(_raises(AttributeError, form) for form in forms), SYNC_WEIGHTS)


# ---------------------------------------------------------------------------- layouts that differ


def _layout_faults() -> dict[str, TensorDict]:
    def changed(key: tuple[str, str], value: torch.Tensor) -> TensorDict:
        return _weights(make_mlp(2)).data.clone().set(key, value)

    whole = _weights(make_mlp(2)).data
    return {
        "some keys are missing": whole.select("0"),
        "all keys are missing": TensorDict(),
        "a key is extra": changed(("0", "extra"), torch.zeros(3)),
        "a shape broadcasts": changed(("0", "weight"), torch.zeros(1)),
        "a value is NaN": changed(("0", "bias"), torch.full((16,), torch.nan)),
    }


@pytest.mark.parametrize("what", _layout_faults())
def test_fault_8_wrong_weights_are_applied_in_silence_when(what: str) -> None:
    wrong = _layout_faults()[what]
    silent = not _raises(Exception, lambda: _copy_to(make_mlp(2), wrong))
    still_happens(8, silent, COMPARE)


def test_fault_8_a_shape_mismatch_fails_when_the_first_layers_are_already_new() -> None:
    source, destination = make_mlp(2), make_mlp(2)
    wrong = _weights(source).data.clone().set(("2", "weight"), torch.zeros(7, 7))

    refused = _raises(KeyError, lambda: _copy_to(destination, wrong))

    half_new = torch.equal(destination[0].weight, source[0].weight)
    half_old = not torch.equal(destination[2].bias, source[2].bias)
    still_happens(8, refused and half_new and half_old, COMPARE)


# ------------------------------------------------------------------- sources that are not plain


class _Counter(nn.Module):
    """State that travels only as extra state."""

    def __init__(self, count: int = 0) -> None:
        super().__init__()
        self.count = torch.tensor(count)
        self.scale = nn.Parameter(torch.ones(()))

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self.count = state["count"]


def test_fault_9_extra_state_of_a_nested_module_does_not_travel() -> None:
    source, destination = nn.Sequential(_Counter(3)), nn.Sequential(_Counter())
    _copy_to(destination, _weights(source))
    still_happens(9, destination[0].count.item() == 0, LEAVES)


@pytest.mark.thorough
def test_fault_9_a_compiled_learner_is_refused_for_its_key_names() -> None:
    compiled = torch.compile(make_mlp(2))
    refused = _raises(KeyError, lambda: _copy_to(make_mlp(2), _weights(compiled)))
    still_happens(9, refused, LEAVES)


def test_fault_9_a_ddp_learner_is_refused_for_its_key_names() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(make_mlp(2))
        refused = _raises(KeyError, lambda: _copy_to(make_mlp(2), _weights(wrapped)))
    finally:
        torch.distributed.destroy_process_group()
    still_happens(9, refused, LEAVES)


@pytest.mark.processes
def test_fault_9_a_policy_with_weight_norm_cannot_be_sent_to_a_worker() -> None:
    policy = make_policy()
    nn.utils.parametrizations.weight_norm(policy.module[0].module[0])

    try:
        make_workers(MultiSyncCollector, policy, workers=1).shutdown()
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)

    still_happens(9, "Serialization of parametrized modules" in refusal, LEAVES)


# ----------------------------------------------------------------- counters, intervals, trainers


class _Sender:
    def __init__(self) -> None:
        self.sent = 0

    def update_weights(self) -> None:
        self.sent += 1


def test_fault_11_a_hook_given_to_register_op_is_not_in_the_trainers_checkpoint() -> None:
    trainer = make_ppo_trainer(make_collector(make_policy()))
    before = set(trainer.state_dict())
    trainer.register_op("post_steps", UpdateWeights(sender=_Sender()))
    still_happens(11, set(trainer.state_dict()) == before, SYNC_WEIGHTS)


@pytest.mark.usefixtures("fork_workers")
def test_fault_11_an_on_policy_trainer_refuses_a_process_collector_without_a_map() -> None:
    collector = make_workers(MultiSyncCollector, make_policy(), workers=1)
    refused = _raises(ValueError, lambda: make_ppo_trainer(collector))
    collector.shutdown()
    still_happens(11, refused, SYNC_WEIGHTS)


@pytest.mark.parametrize("trainer", [DQNTrainer, SACTrainer])
def test_fault_11_an_off_policy_trainer_has_no_interval_and_no_map(trainer: type) -> None:
    arguments = inspect.signature(trainer.__init__).parameters
    still_happens(11, not [name for name in arguments if "weight" in name], SYNC_WEIGHTS)


def test_fault_13_an_interval_of_3_fires_3_steps_after_the_last_time_not_at_multiples() -> None:
    stepper, sender = SimpleNamespace(optimizer_step_count=0), _Sender()
    trainer = SimpleNamespace(optimization_stepper=stepper)
    hook = UpdateWeights(None, 3, sender=sender, trainer=trainer, interval_unit="optim_steps")
    fired = []

    for stepper.optimizer_step_count in (1, 2, 5, 6, 8, 9):
        before = sender.sent
        hook()
        fired += [stepper.optimizer_step_count] * (sender.sent - before)

    still_happens(13, fired == [5, 8], "rlsync/core/trigger.py")


# --------------------------------------------------------------- modules that are not the trained


def test_fault_12_the_qvalue_network_of_sac_is_not_the_trained_ensemble() -> None:
    loss = make_sac_loss()
    before = [weight.clone() for weight in loss.qvalue_network.parameters()]

    with torch.no_grad():
        for weight in loss.parameters():
            weight.add_(1.0)

    after = list(loss.qvalue_network.parameters())
    untrained = all(map(torch.equal, before, after))
    ensembles = all(weight.shape[0] == 2 for weight in loss.qvalue_network_params.parameters())
    still_happens(12, untrained and ensembles, RESOLVE)


def test_fault_12_the_actor_network_of_a_copied_loss_is_stale() -> None:
    loss = copy.deepcopy(make_ppo_loss())

    with torch.no_grad():
        for weight in loss.actor_network_params.parameters():
            weight.fill_(3.0)

    acting = loss.actor_network.parameters()
    still_happens(12, not any((weight == 3).all() for weight in acting), RESOLVE)


# ---------------------------------------------------------------------------------------- stamps


def test_fault_22_the_first_frame_of_a_batch_carries_the_version_before() -> None:
    collector = make_collector(CanaryPolicy(2, 3))
    batches = iter(collector)
    next(batches)

    collector.update_policy_weights_()
    batch = next(batches)

    stamps = batch["policy_version"].tolist(), batch["next", "policy_version"].tolist()
    wrong_at_the_root = stamps[0] == [0] + [1] * (len(batch) - 1)
    still_happens(22, wrong_at_the_root and set(stamps[1]) == {1}, "rlsync/torchrl_plugin/scheme.py")


def error_of(call: Callable[[], object]) -> str:
    """What a call raises, with its cause; empty when it raises nothing."""
    try:
        call()
    except Exception as error:  # whatever it is, the test reads it
        return f"{error} {error.__cause__}"
    return ""


def test_fault_23_a_plain_module_is_called_with_the_stamp() -> None:
    told = error_of(lambda: make_collector(Greedy()))

    with_the_stamp = "unexpected keyword argument 'policy_version'" in told
    still_happens(23, with_the_stamp, "rlsync/torchrl_plugin/compat/stamps.py")


def test_fault_24_versions_are_not_tracked_on_a_vector_of_environments() -> None:
    told = error_of(lambda: make_collector(make_plain_policy(), env=lambda: SerialEnv(2, make_counting_env)))

    refused = "BatchedEnvBase is not supported" in told
    still_happens(24, refused, "rlsync/torchrl_plugin/compat/stamps.py")


def test_fault_25_a_policy_that_is_no_module_cannot_be_sent_beside_a_scheme() -> None:
    policy = RandomPolicy(make_counting_env().action_spec)
    told = error_of(lambda: _make_meta_policy_cm(policy, mp_start_method="spawn"))

    still_happens(25, "_parameters" in told, "rlsync/torchrl_plugin/compat/schemes.py")
