"""The sync map of a Dreamer player: derived from real losses, equal to the one written by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import DreamerV3SeededPolicy, RSSMStateEstimatorV3

from rlsync import (
    ConfigError,
    DreamerPlayer,
    LayoutMismatch,
    PathSyntaxError,
    Source,
    SyncWeights,
    dreamer_map,
    resolve,
)
from tests.tools.dreamer_parts import (
    BELIEF,
    PIXELS_V3,
    STATE,
    Dreamer,
    make_dreamer_collector,
    make_trainer,
    make_v1,
    make_v3,
)
from tests.tools.parts import ACTIONS, OBSERVATIONS, make_dqn_trainer
from tests.tools.running import in_three_lines, running

pixels = pytest.mark.parametrize("pixels", [False, True], ids=["vector", "pixels"])

MODEL_V1 = "model_loss.world_model.module.0.module"
MODEL_V3 = "loss_module.model_loss.world_model.module"

#: Written by hand, in full.
BY_HAND = {
    1: {
        "policy.player.module.0.module": f"{MODEL_V1}.0.module",
        "policy.player.module.1.module": f"{MODEL_V1}.1.rssm_posterior.module",
        "policy.player.module.2.module.0.module": "actor_loss.actor_model.module.0.module",
        "policy.player.module.3.module": f"{MODEL_V1}.1.rssm_prior.module",
    },
    3: {
        "policy.player.module.0.module": f"{MODEL_V3}.0.module",
        "policy.player.module.1.prior": Source(
            f"{MODEL_V3}.1.rssm_prior.module", exclude=("rnn_to_prior_projector.*",)
        ),
        "policy.player.module.1.posterior": f"{MODEL_V3}.1.rssm_posterior.module",
        "policy.player.module.2": "loss_module.actor_loss.actor_model",
    },
}


@contextmanager
def beside(
    dreamer: Dreamer, player: nn.Module | None = None, **options: object
) -> Iterator[tuple[SimpleNamespace, DreamerPlayer]]:
    """A trainer whose collector acts with a player of its own."""
    acting = DreamerPlayer(dreamer.copied() if player is None else player)
    collector = make_dreamer_collector(acting, version=dreamer.version, **options)
    with running(collector):
        yield make_trainer(dreamer, collector), acting


def losses_of(dreamer: Dreamer) -> nn.Module | dict[str, nn.Module]:
    """As the trainer holds them: V1 has no loss of its own for all parts."""
    if dreamer.version == 3:
        return dreamer.loss_module
    return {"model_loss": dreamer.model_loss, "actor_loss": dreamer.actor_loss}


def leaves(plan: object) -> set[tuple[str, ...]]:
    """What each leaf gets, whatever the entries of the map are."""

    def spelt(name: str) -> str:
        return name.replace("[", ".").replace("]", "")

    return {(spelt(row.destination), spelt(row.source), str(row.verdict)) for row in plan.check().rows}


@pytest.mark.seconds
@pixels
@pytest.mark.parametrize("make", [make_v1, make_v3])
@pytest.mark.each_value
def test_the_derived_map_moves_the_leaves_of_the_map_that_is_written_by_hand(make, pixels: bool) -> None:
    dreamer = make(pixels=pixels)
    with beside(dreamer, pixels=pixels) as (trainer, player):
        derived = resolve(dreamer_map(losses_of(dreamer), player), trainer)
        by_hand = resolve(BY_HAND[dreamer.version], trainer)
        assert leaves(derived) == leaves(by_hand)
        excluded = 0 if dreamer.version == 1 else 4
        assert len(leaves(derived)) == len(list(player.parameters())) - excluded


def test_the_paths_of_the_derived_map_are_short() -> None:
    dreamer = make_v3()
    assert dreamer_map(dreamer.loss_module, dreamer.player) == {
        "policy.module[0]": "loss_module.model_loss.world_model.module[0]",
        "policy.module[1].prior": Source(
            "loss_module.model_loss.world_model.module[1].rssm_prior.module",
            exclude=("rnn_to_prior_projector.*",),
        ),
        "policy.module[1].posterior": "loss_module.model_loss.world_model.module[1].rssm_posterior.module",
        "policy.module[2].module[0]": "loss_module.actor_loss.actor_model.module[0]",
    }


@pytest.mark.one_case
@pytest.mark.parametrize("make", [make_v1, make_v3])
def test_after_a_publish_the_player_acts_as_one_of_the_learners_own_modules(make) -> None:
    dreamer = make()
    with beside(dreamer) as (trainer, player):
        with torch.no_grad():
            for parameter in dreamer.player.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        assert any(outcome(player) != outcome(DreamerPlayer(dreamer.player)) for _ in range(3))
        SyncWeights(dreamer_map(losses_of(dreamer), player), trainer=as_trainer(trainer)).publish()
        assert outcome(player) == outcome(DreamerPlayer(dreamer.player))


@pytest.mark.parametrize("recurrent_model", ["gru", "block_gru"])
def test_what_is_excluded_takes_no_part_in_acting(recurrent_model: str) -> None:
    player = DreamerPlayer(make_v3(recurrent_model=recurrent_model).player)
    before = outcome(player)
    with torch.no_grad():
        for name, parameter in player.named_parameters():
            if ".prior.rnn_to_prior_projector." in name:
                parameter.fill_(torch.nan)
    assert outcome(player) == before
    with torch.no_grad():
        next(player.player[1].prior.rnn.parameters()).add_(1)
    assert outcome(player) != before


@pytest.mark.seconds
def test_a_player_of_version_3_may_have_its_prior_at_the_end() -> None:
    dreamer = make_v3()
    own = copy.deepcopy(dreamer.with_the_prior_last())
    with beside(dreamer, own) as (trainer, player):
        plan = resolve(dreamer_map(dreamer.loss_module, player), trainer).check()
        sent = {row.destination.removeprefix("policy.player.module[") for row in plan.rows}
        assert len(sent) == len(list(player.parameters())) - 4
        assert not any("rnn_to_prior_projector" in name for name in sent)
        before = outcome(player)
        with torch.no_grad():
            player.player[4].module.rnn_to_prior_projector[0].weight.add_(1)
        assert outcome(player) == before
        assert sorted(player.primer().primers.keys()) == ["belief", "state", "state_version"]


def test_a_wrapped_player_is_looked_into() -> None:
    dreamer = make_v3()
    seeded = DreamerPlayer(DreamerV3SeededPolicy(dreamer.copied(), seed=1))
    found = dreamer_map(dreamer.loss_module, seeded)
    assert [path.split(".module", 1)[0] for path in found] == ["policy.player"] * 4


# ------------------------------------------------------------------------------------------ what does not fit


def refused(loss: nn.Module | dict[str, nn.Module], player: nn.Module, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as wrong:
        dreamer_map(loss, player)
    assert in_three_lines(wrong.value)


def test_a_loss_or_a_player_of_another_kind_is_refused() -> None:
    v1, v3 = make_v1(), make_v3()
    refused(nn.Linear(1, 1), v3.player, "there is no DreamerModelLoss")
    refused(v3.model_loss, v3.player, "there is no DreamerActorLoss")
    refused(v3.loss_module, nn.Linear(1, 1), "there is no RSSMStateEstimatorV3, RSSMPosterior or")
    refused(v3.loss_module, v1.player, "DreamerV3's and the player is DreamerV1's")
    refused({"a": v1.model_loss, "b": v3.actor_loss}, v1.player, "DreamerV1's and the actor is DreamerV3's")
    refused({"a": v3.loss_module, "b": make_v3().loss_module}, v3.player, "2 of DreamerModelLoss")


def test_a_destination_that_is_no_path_is_refused() -> None:
    dreamer = make_v3()
    with pytest.raises(PathSyntaxError):
        dreamer_map(dreamer.loss_module, dreamer.player, destination="my policy")
    found = dreamer_map(dreamer.loss_module, dreamer.player, destination="env.policy")
    assert all(path.startswith("env.policy.") for path in found)


def test_a_player_with_parts_that_the_loss_does_not_train_is_refused() -> None:
    dreamer = make_v3()
    encoder, estimator, actor = dreamer.player.module
    more = TensorDictModule(nn.Linear(OBSERVATIONS, OBSERVATIONS), ["observation"], ["observation"])
    refused(
        dreamer.loss_module, TensorDictSequential(more, encoder, estimator, actor), "2 modules as encoder"
    )
    swapped = RSSMStateEstimatorV3(estimator.posterior, estimator.prior)
    player = TensorDictSequential(encoder, swapped, actor)
    refused(dreamer.loss_module, player, "not made of a prior and then a posterior")
    with pytest.raises(ConfigError, match="not made of a prior and then a posterior"):
        DreamerPlayer(player)
    refused(dreamer.loss_module, TensorDictSequential(encoder, estimator), "no actor after its posterior")
    refused(dreamer.loss_module, TensorDictSequential(estimator, actor), "no encoder before its posterior")


def test_a_player_of_other_sizes_is_refused_when_the_map_is_resolved() -> None:
    dreamer, other = make_v3(), make_v3(pixels=True)
    with beside(dreamer, other.player, pixels=True) as (trainer, player):
        with pytest.raises(LayoutMismatch) as wrong:
            resolve(dreamer_map(dreamer.loss_module, player), trainer).check()
        assert in_three_lines(wrong.value)


# ------------------------------------------------------------------------------------------------------ parts


def outcome(player: DreamerPlayer) -> list[float]:
    """What five steps from a seed come to: actions, and the state at the end."""
    torch.manual_seed(0)
    shapes = {"state": (STATE,), "belief": (BELIEF,), "previous_action": (ACTIONS,)}
    carried = {key: torch.zeros(3, *shape) for key, shape in shapes.items()}
    carried["state_version"] = torch.full((3, 1), -1)
    said: list[float] = []
    for step in range(5):
        seen = {"observation": torch.randn(3, OBSERVATIONS), "pixels": torch.randn(3, *PIXELS_V3)}
        frame = TensorDict({**carried, **seen, "is_init": torch.full((3, 1), step == 0)}, [3])
        with torch.no_grad():
            player(frame)
        said += frame["action"].flatten().tolist() + frame["next", "belief"].flatten().tolist()
        carried = {key: frame.get(("next", key), value) for key, value in carried.items()}
    return said


def as_trainer(names: SimpleNamespace) -> object:
    """A stock trainer that has the losses under the names of TorchRL's Dreamer examples."""
    trainer = make_dqn_trainer(names.collector)
    trainer.loss_module = names.loss_module
    trainer.model_loss, trainer.actor_loss = names.model_loss, names.actor_loss
    return trainer
