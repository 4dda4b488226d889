"""DreamerV1: a world model from replayed sequences; the actor's gradient goes through what is imagined.

Workers hold the player as ``policy.player``: encoder, posterior, actor, noise and prior.
Source: Hafner et al. 2019, https://arxiv.org/abs/1912.01603; torchrl.objectives.DreamerModelLoss.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Generator, Tensor, nn, optim
from torchrl import modules
from torchrl.objectives import DreamerActorLoss, DreamerModelLoss, DreamerValueLoss, LossModule
from torchrl.trainers import Trainer

from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.actions import BoxActions
from rlsync.runs.actors.player import State
from rlsync.runs.recipes import parts
from rlsync.runs.recipes.dreamer.building import imagined_env, let_act, make_trainer
from rlsync.runs.recipes.dreamer.config import DreamerV1Config
from rlsync.runs.recipes.dreamer.player import (
    BELIEF,
    PREVIOUS_ACTION,
    STATE,
    ActingNetwork,
    WorldModelPlayer,
    bounds_of,
    squashed,
)
from rlsync.runs.recipes.dreamer.sequences import IMAGINED, REPLAYED


def build(run: parts.Run[DreamerV1Config]) -> Trainer:
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    network = loss.actor_network
    player = DreamerV1Player(network, recipe, run.spaces, on_adoption=recipe.on_adoption)
    with parts.started_collector(run, player, random_frames=recipe.pace.prefill) as collector:
        optimizer = optim.Adam(
            [
                {"params": list(loss.model_loss.parameters()), "lr": recipe.lr},
                {"params": list(loss.actor_loss.actor_model.parameters()), "lr": recipe.actor_lr},
                {"params": list(loss.value_loss.parameters()), "lr": recipe.value_lr},
            ]
        )
        trainer = make_trainer(
            run, collector, loss, optimizer, widths=player.widths, within_episodes=True
        )
        greedy = DreamerV1Player(network, recipe, run.spaces, deterministic=True)
        parts.register_with_evaluations(trainer, run, greedy)
    return trainer


#: TorchRL's loss sums its errors over the last three dimensions, those of a picture
_PICTURE = "picture"


class DreamerV1Loss(LossModule):
    """The three losses in one: none reaches another's weights. Rewards are learned times ``reward_scale``."""

    def __init__(
        self,
        model_loss: DreamerModelLoss,
        actor_loss: DreamerActorLoss,
        value_loss: DreamerValueLoss,
        reward_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.reward_scale = reward_scale
        self.model_loss = model_loss
        self.actor_loss = actor_loss
        self.value_loss = value_loss

    def forward(self, sample: TensorDictBase) -> TensorDictBase:
        sample = sample.copy()
        observation = sample["next", "observation"]
        sample["next", _PICTURE] = observation.reshape(*observation.shape[:-1], 1, 1, -1)
        sample["next", "reward"] = sample["next", "reward"] * self.reward_scale
        model_losses, posterior = self.model_loss(sample)

        # Every replayed state begins an imagined episode, of which the actor learns, and then the critic.
        begin = posterior["next"].select("state", "belief").reshape(-1)
        actor_losses, imagined = self.actor_loss(begin)
        value_losses, _ = self.value_loss(imagined)
        losses = TensorDict({name: loss.squeeze() for name, loss in model_losses.items()})
        # The critic's is half of the squared error.
        return losses.update(actor_losses).update(value_losses / 2)


class Networks(NamedTuple):
    """What the losses share, in the order in which initial weights are drawn."""

    encoder: nn.Module
    prior: modules.RSSMPrior
    posterior: modules.RSSMPosterior
    reward: nn.Module
    value: nn.Module
    decoder: nn.Module


def make_loss(
    recipe: DreamerV1Config, spaces: parts.Spaces, device: torch.device = CPU
) -> DreamerV1Loss:
    """The loss of a world model, an actor and a critic. Its ``actor_network`` is what acts with them."""
    networks = make_networks(recipe, spaces)
    prior = networks.prior
    model_loss = make_model_loss(networks, recipe)

    # The actor imagines with the prior, and without a decoder: it never sees an observation.
    transition = TensorDictModule(
        prior, ["state", "belief", "action"], ["_", "_", "state", "belief"]
    )
    rewards = TensorDictModule(networks.reward, IMAGINED, ["reward"])
    imagined = imagined_env(transition, rewards, recipe.state, recipe, spaces)
    critic = TensorDictModule(networks.value, IMAGINED, ["state_value"])
    actor = make_actor(recipe, spaces)
    actor_loss = DreamerActorLoss(actor, critic, imagined, imagination_horizon=recipe.horizon)
    # Without time_dim TorchRL takes the last dimension for time, so every target would be that of one step.
    actor_loss.make_value_estimator(gamma=recipe.gamma, lmbda=recipe.gae_lambda, time_dim=-2)
    value_loss = DreamerValueLoss(critic, gamma=recipe.gamma)
    loss = DreamerV1Loss(model_loss, actor_loss, value_loss, recipe.reward_scale).to(device)

    # Workers act with the learner's own modules: encoder, posterior, actor, noise, and the prior.
    acting = TensorDictSequential(
        TensorDictModule(networks.encoder, ["observation"], ["encoded_latents"]),
        TensorDictModule(networks.posterior, ["belief", "encoded_latents"], ["_", "_", "state"]),
        actor,
        spaces.noise(recipe.exploration_noise).to(device),
        TensorDictModule(prior, ["state", "belief", "action"], ["_", "_", "_", ("next", "belief")]),
    )
    let_act(loss, acting)
    return loss


def make_networks(recipe: DreamerV1Config, spaces: parts.Spaces) -> Networks:
    cells = recipe.cells
    belief = recipe.belief
    state = recipe.state
    features = state + belief

    def net(inputs: int, outputs: int, depth: int = recipe.depth) -> modules.MLP:
        return modules.MLP(inputs, outputs, depth=depth, num_cells=cells, activation_class=nn.ELU)

    encoder = nn.Sequential(net(spaces.features, cells, recipe.depth - 1), nn.ELU())
    prior = modules.RSSMPrior(spaces.action_spec, cells, belief, state, action_dim=spaces.actions)
    posterior = modules.RSSMPosterior(cells, state, rnn_hidden_dim=belief, obs_embed_dim=cells)
    reward = net(features, 1)
    value = net(features, 1)
    # as a picture
    decoder = net(features, spaces.features).append(nn.Unflatten(-1, (1, 1, spaces.features)))
    return Networks(encoder, prior, posterior, reward, value, decoder)


def make_model_loss(networks: Networks, recipe: DreamerV1Config) -> DreamerModelLoss:
    """The loss of the world model: -ln q(o|s) - ln q(r|s) + kl_scale KL(posterior || prior)."""
    world_model = modules.WorldModelWrapper(
        TensorDictSequential(
            TensorDictModule(
                networks.encoder, [("next", "observation")], [("next", "encoded_latents")]
            ),
            modules.RSSMRollout(
                TensorDictModule(
                    networks.prior,
                    ["state", "belief", "action"],
                    [("next", "prior_mean"), ("next", "prior_std"), "_", ("next", "belief")],
                ),
                TensorDictModule(
                    networks.posterior,
                    [("next", "belief"), ("next", "encoded_latents")],
                    [("next", "posterior_mean"), ("next", "posterior_std"), ("next", "state")],
                ),
            ),
            TensorDictModule(networks.decoder, REPLAYED, [("next", "reco_pixels")]),
        ),
        TensorDictModule(networks.reward, REPLAYED, [("next", "reward")]),
    )
    model_loss = DreamerModelLoss(
        world_model,
        lambda_kl=recipe.kl_scale,
        # with the square of an error: what a normal distribution of deviation 1 loses
        lambda_reco=0.5,
        lambda_reward=0.5,
        free_nats=recipe.free_nats,
        delayed_clamp=True,  # the paper's mean is over all rows, and only then cut
    )
    model_loss.set_keys(pixels=_PICTURE)
    return model_loss


class DreamerV1Player(WorldModelPlayer):
    """Make the belief by the prior from the action before, and draw the state by the posterior.

    Where an episode begins, the action is zeros.
    """

    draws = staticmethod(torch.randn)

    def __init__(
        self,
        network: ActingNetwork,
        recipe: DreamerV1Config,
        spaces: parts.Spaces,
        *,
        on_adoption: str | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(
            network,
            spaces,
            noise=(recipe.state,),
            widths=(recipe.state, recipe.belief),
            window=recipe.window,
            on_adoption=on_adoption,
            deterministic=deterministic,
        )

    def seen(
        self, observation: Tensor, before: State, begins: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        encoder, posterior, *_, model = self.parts
        prior = model.module
        moved = prior.action_state_projector(
            torch.cat([before[STATE], before[PREVIOUS_ACTION]], -1)
        )
        belief = prior.rnn(moved, before[BELIEF]).masked_fill(begins, 0.0)
        _, _, state = posterior.module(belief, encoder.module(observation), noise)
        return state, belief

    def chosen(self, state: Tensor, belief: Tensor, generator: Generator) -> Tensor:
        _, _, (actor, _), noise, _ = self.parts
        assert isinstance(self.actions, BoxActions)
        low, high = bounds_of(self.actions, belief)
        loc, scale = actor.module(state, belief)
        # As TanhNormal(tanh_loc=True) does: within 5 of the middle.
        loc = 5 * (loc / 5).tanh() + (high + low) / 2
        if self.deterministic:
            return squashed(loc, None, self.actions, generator)
        action = squashed(loc, scale, self.actions, generator)
        shaken = torch.randn(action.shape, generator=generator, device=action.device)
        return (action + noise.sigma * noise.std * shaken).clamp(low, high)


def make_actor(recipe: DreamerV1Config, spaces: parts.Spaces) -> ProbabilisticTensorDictSequential:
    low, high = spaces.bounds()
    net = modules.DreamerActor(
        spaces.actions,
        recipe.depth,
        recipe.cells,
        std_bias=recipe.actor_std,
        std_min_val=recipe.actor_least_std,
    )
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(net, IMAGINED, ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=modules.TanhNormal,
            # or the mean leaves the range
            distribution_kwargs={"low": low, "high": high, "tanh_loc": True},
        ),
    )

    # TorchRL's network gets its shapes, and so its weights, when it is called first.
    device = next(actor.parameters()).device
    with torch.no_grad():
        state = torch.zeros(1, recipe.state, device=device)
        belief = torch.zeros(1, recipe.belief, device=device)
        actor(TensorDict({"state": state, "belief": belief}, [1]))
    return actor


def acting(run: parts.Run[DreamerV1Config], deterministic: bool) -> parts.Acting:
    """What plays one version, so nothing is adopted."""
    network = make_loss(run.recipe, run.spaces).actor_network
    return parts.Acting(
        network, DreamerV1Player(network, run.recipe, run.spaces, deterministic=deterministic)
    )


RECIPE = parts.Recipe("dreamer_v1", DreamerV1Config, parts.BOX.probe, build, acting)
