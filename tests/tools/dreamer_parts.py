"""Small Dreamer models of TorchRL's own parts: losses, and players of the same modules or of copies."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule as Drawn
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import BaseCollector, Collector
from torchrl.data import Bounded, Composite, OneHot, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, TransformedEnv
from torchrl.envs.model_based import DreamerEnv
from torchrl.modules import (
    MLP,
    DreamerActor,
    DreamerV3DiscreteActor,
    DreamerV3ImageDecoder,
    DreamerV3ImageEncoder,
    DreamerV3MLP,
    ObsDecoder,
    ObsEncoder,
    RSSMPosterior,
    RSSMPosteriorV3,
    RSSMPrior,
    RSSMPriorV3,
    RSSMRollout,
    RSSMRolloutV3,
    RSSMStateEstimatorV3,
    TanhNormal,
    WorldModelWrapper,
    symlog,
)
from torchrl.objectives import (
    DreamerActorLoss,
    DreamerModelLoss,
    DreamerV3ActorLoss,
    DreamerV3Loss,
    DreamerV3ModelLoss,
    DreamerV3ValueLoss,
    SoftUpdate,
)
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper, DreamerV3Optimizer

from rlsync.torchrl_plugin.dreamer.player import DreamerPlayer
from tests.tools.parts import ACTIONS, OBSERVATIONS, CountingEnv

CLASSES, BELIEF, EMBEDDING = 4, 8, 8
STATE = 2 * CLASSES
PIXELS_V1, PIXELS_V3 = (3, 64, 64), (3, 16, 16)


@dataclass
class Dreamer:
    """A loss of each kind, and the player of the learner's own modules.

    Args:
        version: 1 or 3.
        loss_module: of version 3, the whole loss; of version 1, a module of both losses.
        model_loss, actor_loss: its parts.
        player: acts with the modules that are trained.
    """

    version: int
    loss_module: nn.Module
    model_loss: nn.Module
    actor_loss: nn.Module
    player: TensorDictSequential

    def with_the_prior_last(self) -> TensorDictSequential:
        """DreamerV3's player in DreamerV1's arrangement, as TorchRL's example of DreamerV3 has it."""
        encoder, estimator, actor = self.player.module
        return TensorDictSequential(
            TensorDictModule(symlog, ["observation"], ["observation"]),
            encoder,
            TensorDictModule(estimator.posterior, ["belief", "encoded_latents"], ["_", "state"]),
            actor,
            TensorDictModule(estimator.prior, ["state", "belief", "action"], ["_", "_", ("next", "belief")]),
        )

    def copied(self) -> TensorDictSequential:
        """A player with memory of its own."""
        return copy.deepcopy(self.player)


def make_v3(
    *, pixels: bool = False, recurrent_model: str = "gru", prior_class: type[RSSMPriorV3] = RSSMPriorV3
) -> Dreamer:
    """DreamerV3 with one-hot actions, as in TorchRL's documentation of DreamerV3Loss."""
    seen = "pixels" if pixels else "observation"
    image = DreamerV3ImageEncoder(depth=2, mults=(1, 2)) if pixels else None
    encoder = image or DreamerV3MLP(OBSERVATIONS, None, depth=1, num_cells=EMBEDDING)
    embedding = image.output_features(PIXELS_V3) if image else EMBEDDING
    if image:
        decoder = DreamerV3ImageDecoder((STATE + BELIEF), PIXELS_V3, depth=2, mults=(1, 2))
    else:
        decoder = DreamerV3MLP(STATE + BELIEF, OBSERVATIONS, depth=1, num_cells=8)
    sizes = {"hidden_dim": 8, "rnn_hidden_dim": BELIEF, "num_categoricals": 2, "num_classes": CLASSES}
    prior = prior_class(
        action_shape=(ACTIONS,), action_dim=ACTIONS, recurrent_model=recurrent_model, num_blocks=2, **sizes
    )
    posterior = RSSMPosteriorV3(obs_embed_dim=embedding, **sizes)
    reward = MLP(in_features=STATE + BELIEF, out_features=1, num_cells=8, depth=1)
    world_model = TensorDictSequential(
        TensorDictModule(encoder, [("next", seen)], [("next", "encoded_latents")]),
        RSSMRolloutV3(
            TensorDictModule(
                prior,
                ["state", "belief", "action"],
                [("next", "prior_logits"), ("next", "state"), ("next", "belief")],
            ),
            TensorDictModule(
                posterior,
                [("next", "belief"), ("next", "encoded_latents")],
                [("next", "posterior_logits"), ("next", "state")],
            ),
        ),
        TensorDictModule(decoder, [("next", "state"), ("next", "belief")], [("next", "reco_pixels")]),
        TensorDictModule(reward, [("next", "state"), ("next", "belief")], [("next", "reward")]),
    )
    actor = DreamerV3DiscreteActor(STATE + BELIEF, ACTIONS, depth=1, num_cells=8)
    value = TensorDictModule(
        MLP(in_features=STATE + BELIEF, out_features=1, num_cells=8, depth=1),
        ["state", "belief"],
        ["state_value"],
    )
    model_loss = DreamerV3ModelLoss(world_model, reward_two_hot=False, detach_output=False)
    model_loss.set_keys(pixels=seen)
    imagined = _imagination(prior, ["_", "state", "belief"], reward, STATE)
    actor_loss = DreamerV3ActorLoss(actor, value, imagined, imagination_horizon=3, use_reinforce=True)
    value_loss = DreamerV3ValueLoss(value, actor_loss=actor_loss, slow_critic_regularization=1.0)
    loss = DreamerV3Loss(model_loss, actor_loss, value_loss)
    player = TensorDictSequential(
        TensorDictModule(encoder, [seen], ["encoded_latents"]),
        RSSMStateEstimatorV3(prior, posterior),
        actor,
    )
    return Dreamer(3, loss, model_loss, actor_loss, player)


def make_v1(*, pixels: bool = False, prior_class: type[RSSMPrior] = RSSMPrior) -> Dreamer:
    """DreamerV1 with one action in [-1, 1], in the order in which TorchRL's ``make_dreamer`` puts it."""
    seen = "pixels" if pixels else "observation"
    encoder = ObsEncoder(channels=2, num_layers=4) if pixels else _mlp(OBSERVATIONS, EMBEDDING)
    decoder = (
        ObsDecoder(channels=2, latent_dim=STATE + BELIEF) if pixels else _mlp2(STATE + BELIEF, OBSERVATIONS)
    )
    prior = prior_class(
        action_spec=Bounded(-1, 1, (1,)), hidden_dim=8, rnn_hidden_dim=BELIEF, state_dim=STATE, action_dim=1
    )
    posterior = RSSMPosterior(hidden_dim=8, state_dim=STATE)
    reward = MLP(in_features=STATE + BELIEF, out_features=1, num_cells=8, depth=1)
    means = [("next", "prior_mean"), ("next", "prior_std"), "_", ("next", "belief")]
    drawn = [("next", "posterior_mean"), ("next", "posterior_std"), ("next", "state")]
    transition = TensorDictSequential(
        TensorDictModule(encoder, [("next", seen)], [("next", "encoded_latents")]),
        RSSMRollout(
            TensorDictModule(prior, ["state", "belief", "action"], means),
            TensorDictModule(posterior, [("next", "belief"), ("next", "encoded_latents")], drawn),
        ),
        TensorDictModule(decoder, [("next", "state"), ("next", "belief")], [("next", "reco_pixels")]),
    )
    rewarded = TensorDictModule(reward, [("next", "state"), ("next", "belief")], [("next", "reward")])
    world_model = WorldModelWrapper(transition, rewarded)
    net = DreamerActor(out_features=1, depth=1, num_cells=8)
    value = TensorDictModule(
        MLP(in_features=STATE + BELIEF, out_features=1, num_cells=8, depth=1),
        ["state", "belief"],
        ["state_value"],
    )
    model_loss = DreamerModelLoss(world_model)
    model_loss.set_keys(pixels=seen)
    imagined = _imagination(prior, ["_", "_", "state", "belief"], reward, STATE)
    actor_loss = DreamerActorLoss(_drawn_from(net), value, imagined, imagination_horizon=3)
    player = TensorDictSequential(
        TensorDictModule(encoder, [seen], ["encoded_latents"]),
        TensorDictModule(posterior, ["belief", "encoded_latents"], ["_", "_", "state"]),
        _drawn_from(net),
        TensorDictModule(prior, ["state", "belief", "action"], ["_", "_", "_", ("next", "belief")]),
    )
    frame = torch.zeros(PIXELS_V1 if pixels else OBSERVATIONS)
    player(TensorDict({seen: frame, "belief": torch.zeros(BELIEF)}, []))  # lazy layers get their sizes
    both = nn.ModuleDict({"model_loss": model_loss, "actor_loss": actor_loss})
    return Dreamer(1, both, model_loss, actor_loss, player)


def _drawn_from(net: nn.Module) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, ["state", "belief"], ["loc", "scale"]),
        Drawn(["loc", "scale"], ["action"], distribution_class=TanhNormal),
    )


def _imagination(prior: nn.Module, out_keys: list[str], reward: nn.Module, state: int) -> DreamerEnv:
    env = DreamerEnv(
        WorldModelWrapper(
            TensorDictModule(prior, ["state", "belief", "action"], out_keys),
            TensorDictModule(reward, ["state", "belief"], ["reward"]),
        ),
        prior_shape=(state,),
        belief_shape=(BELIEF,),
    )
    env.observation_spec = Composite(state=Unbounded(state), belief=Unbounded(BELIEF))
    env.state_spec = env.observation_spec.clone()
    env.action_spec = OneHot(ACTIONS) if out_keys[1] == "state" else Bounded(-1, 1, (1,))
    env.reward_spec = Unbounded((1,))
    return env


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.SiLU())


def _mlp2(inputs: int, outputs: int) -> nn.Module:
    return MLP(in_features=inputs, out_features=outputs, num_cells=8, depth=1)


class PixelEnv(CountingEnv):
    """A counting environment that shows pixels."""

    def __init__(self, shape: tuple[int, ...], continuous: bool) -> None:
        super().__init__(continuous=continuous)
        self.frame_shape = shape
        self.observation_spec = Composite(pixels=Unbounded(shape=shape))

    def _observe(self) -> TensorDict:
        return TensorDict({"pixels": torch.full(self.frame_shape, self.steps / 10)}, [])


def make_env(version: int = 3, *, pixels: bool = False, horizon: int = 10) -> EnvBase:
    """What a player of this version can act in, without any state yet."""
    shape = PIXELS_V1 if version == 1 else PIXELS_V3
    env = PixelEnv(shape, version == 1) if pixels else CountingEnv(horizon, continuous=version == 1)
    return TransformedEnv(env, Compose(InitTracker()))


def make_dreamer_env(player: DreamerPlayer, **options: object) -> EnvBase:
    """An environment that carries the state of a player."""
    env = make_env(**options)
    env.append_transform(player.primer())
    return env


def make_dreamer_collector(policy: DreamerPlayer, *, frames: int = 4, **options: object) -> Collector:
    """A collector in this process, with stamps."""
    return Collector(
        lambda: make_dreamer_env(policy, **options),
        policy,
        frames_per_batch=frames,
        total_frames=-1,
        track_policy_version=True,
    )


def make_trainer(dreamer: Dreamer, collector: object) -> SimpleNamespace:
    """Where sources are looked for: with the names that TorchRL's Dreamer examples use."""
    return SimpleNamespace(
        collector=collector,
        loss_module=dreamer.loss_module,
        model_loss=dreamer.model_loss,
        actor_loss=dreamer.actor_loss,
    )


def make_stock_trainer(dreamer: Dreamer, collector: BaseCollector, *, total_frames: int = 32) -> Trainer:
    """TorchRL's trainer and DreamerV3's own stepper: one update a batch, on the batch as one sequence."""
    optimizer = DreamerV3Optimizer(dreamer.loss_module.parameters(), lr=1e-2, warmup_steps=0)
    targets = SoftUpdate(dreamer.loss_module.value_loss, tau=0.02)
    stepper = DreamerV3OptimizationStepper(dreamer.loss_module, optimizer, targets)
    trainer = Trainer(
        collector=collector,
        total_frames=total_frames,
        frame_skip=1,
        optim_steps_per_batch=1,
        loss_module=dreamer.loss_module,
        optimizer=optimizer,
        optimization_stepper=stepper,
        progress_bar=False,
    )
    trainer.register_op("process_optim_batch", lambda batch: batch.reshape(-1, batch.shape[-1]))
    return trainer
