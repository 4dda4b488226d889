"""What a policy holds besides its leaves: what differs from the learner's, and memory that is its own."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules import BatchRenorm1d

from rlsync.core.errors import LayoutMismatch
from rlsync.sync.held import own_shared_memory, settings_of, unlike
from rlsync.sync.trained import Training, refuse_hidden, unsent
from rlsync.tensors.device import Covered
from rlsync.tensors.leaves import Leaves
from tests.tools.parts import ACTIONS, make_mlp
from tests.tools.parts.acting import Functional, Normalised, Scaled


def differing(acts: nn.Module, source: nn.Module, prefix: str = "") -> dict[str, str]:
    return dict(unlike(settings_of(acts, "policy"), prefix, source, "source"))


def test_numbers_tensors_and_modes_that_differ_are_named_and_nothing_else_is() -> None:
    acts, source = Scaled(2.0, mean=1.0, drops=0.1).eval(), Scaled(1.0, mean=0.0, drops=0.5)
    acts.kwargs = {"low": torch.zeros(2), "tanh_loc": True, "same": 1}
    source.kwargs = {"low": torch.ones(2), "tanh_loc": False, "same": 1}
    acts.also, source.other = 3, 4
    assert differing(acts, source) == {
        "by": "is 2.0 in the workers and 1.0 in the learner",
        "drop.drops": "is 0 in the workers and 0.5 in the learner",
        "drop.p": "is 0.1 in the workers and 0.5 in the learner",
        "kwargs['low']": "has other numbers in the workers",
        "kwargs['tanh_loc']": "is True in the workers and False in the learner",
        "mean": "has other numbers in the workers",
        "training": "is False in the workers and True in the learner",
    }


@pytest.mark.parametrize(
    ("norm", "trains", "named"),
    [
        (nn.BatchNorm1d(ACTIONS), True, True),
        (nn.BatchNorm1d(ACTIONS), False, False),
        (nn.BatchNorm1d(ACTIONS, track_running_stats=False), False, True),
        (nn.SyncBatchNorm(ACTIONS), True, True),
        (BatchRenorm1d(ACTIONS), True, True),
        (BatchRenorm1d(ACTIONS), False, False),
        (nn.InstanceNorm1d(ACTIONS), True, False),
        (nn.InstanceNorm1d(ACTIONS, track_running_stats=True), True, False),
        (nn.GroupNorm(1, ACTIONS), True, False),
        (nn.LayerNorm(ACTIONS), True, False),
    ],
)
def test_a_layer_that_normalises_by_the_rows_at_hand_is_named(
    norm: nn.Module, trains: bool, named: bool
) -> None:
    settings = settings_of(Normalised(norm).train(trains), "policy")
    layers = {path: kind for path, kind in settings.items() if path.endswith("batch_statistics")}
    assert layers == ({"norm.batch_statistics": type(norm).__name__} if named else {})


def test_weights_are_no_settings_however_they_are_held() -> None:
    assert differing(Functional(), Functional()) == {}
    assert set(differing(Functional(copies=True), Functional(copies=True))) == {
        f"held[{name!r}]" for name in Functional().held
    }


def test_a_template_on_the_meta_device_has_no_numbers_to_compare() -> None:
    acts, source = Scaled(1.0), Scaled(1.0)
    acts.__dict__["template"] = nn.Linear(1, 1, device="meta")
    source.__dict__["template"] = nn.Linear(1, 1, device="meta")
    assert differing(acts, source) == {}


def test_a_part_of_what_acts_is_compared_with_its_source() -> None:
    whole = nn.ModuleDict({"actor": Scaled(2.0), "critic": Scaled(3.0)})
    assert list(differing(whole, Scaled(1.0), "actor")) == ["by"]
    assert differing(whole, torch.compile(Scaled(3.0), backend="eager"), "critic") == {}
    assert settings_of(TensorDict(), "policy") == {}


@pytest.mark.parametrize("trained", [True, False])
def test_a_trained_tensor_in_a_container_is_refused(trained: bool) -> None:
    net = make_mlp(2)
    net.adapters = {"a": [torch.zeros(2, requires_grad=trained)]}
    refuse = partial(refuse_hidden, Leaves(net, "loss_module.actor"), Training())
    if not trained:
        refuse()
        net.adapters["a"].extend(net.parameters())  # they are sent
        refuse()
        return
    with pytest.raises(LayoutMismatch, match=r"adapters\.a\.0 is trained, and is no parameter") as raised:
        refuse()
    assert "nn.ParameterDict" in raised.value.cure


def test_a_trained_module_that_a_list_hides_is_listed_as_not_sent() -> None:
    net, hidden = make_mlp(2), nn.Linear(2, 2)
    net.twin = [hidden]
    vars(net)["other"] = nn.Linear(2, 2)  # TorchRL's losses hold networks so that others train
    optimizer = torch.optim.Adam([*net.parameters(), *hidden.parameters(), *net.other.parameters()])
    refuse_hidden(Leaves(net, "actor"), Training(lambda: [optimizer]))
    held = Covered([p for group in optimizer.param_groups for p in group["params"]])
    assert unsent({"actor": net}, net.parameters(), held) == ("actor.twin.0.weight", "actor.twin.0.bias")
    assert unsent({"actor": copy.deepcopy(net)}, net.parameters(), held) == ()


def test_memory_of_another_process_becomes_the_workers_own_and_views_stay_views() -> None:
    net = make_mlp(2)
    whole = torch.arange(6.0).share_memory_()
    held = {"row": whole[:3], "same": whole}
    net.register_buffer("mean", torch.zeros(2).share_memory_())  # a leaf: it travels
    net.extra = [held]
    net.act = lambda x: x + whole
    assert own_shared_memory(net, "policy") == ["policy.act.whole", "policy.extra[0]['row']"]
    assert not held["row"].is_shared()
    held["same"].fill_(7)
    assert held["row"].tolist() == [7, 7, 7]
    assert net.mean.is_shared()
