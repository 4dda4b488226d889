"""DreamerV3: a world model from replayed sequences, an actor and a critic from what it imagines.

Workers hold the player as ``policy.player``: encoder, recurrent model and actor.
Source: Hafner et al. 2023, https://arxiv.org/abs/2301.04104; torchrl.objectives.DreamerV3Loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Generator, Tensor, nn
from torchrl import modules
from torchrl.objectives import (
    DreamerV3ActorLoss,
    DreamerV3Loss,
    DreamerV3ModelLoss,
    DreamerV3ValueLoss,
)
from torchrl.trainers import Trainer
from torchrl.trainers.algorithms import DreamerV3OptimizationStepper, DreamerV3Optimizer

from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.actions import BoxActions
from rlsync.runs.actors.envs.observations import Observations
from rlsync.runs.actors.player import State
from rlsync.runs.compat.dreamer import ScaledPrior
from rlsync.runs.recipes import parts, pure
from rlsync.runs.recipes.dreamer.building import imagined_env, let_act, make_trainer
from rlsync.runs.recipes.dreamer.config import DreamerV3Config
from rlsync.runs.recipes.dreamer.player import (
    BELIEF,
    PREVIOUS_ACTION,
    STATE,
    ActingNetwork,
    WorldModelPlayer,
    squashed,
)
from rlsync.runs.recipes.dreamer.sequences import IMAGINED, REPLAYED
from rlsync.runs.recipes.dreamer.v3_update import (
    action_features,
    drawn_state,
    next_belief,
    pure_update,
)
from rlsync.runs.recipes.impala.heads import HeadDistribution, MultiCategorical, head_for
from rlsync.runs.recipes.spaces import Spaces


def build(run: parts.Run[DreamerV3Config]) -> Trainer:
    recipe = run.recipe
    loss = make_loss(recipe, run.spaces, run.device)
    network = loss.actor_network
    player = DreamerV3Player(network, recipe, run.spaces, on_adoption=recipe.on_adoption)
    with parts.started_collector(run, player, random_frames=recipe.pace.prefill) as collector:
        optimizer = DreamerV3Optimizer(
            loss.parameters(), lr=recipe.lr, agc=recipe.clip_norm, warmup_steps=recipe.warmup_steps
        )
        target = pure.SoftTargets(loss.value_loss, tau=recipe.tau)
        stepper = DreamerV3OptimizationStepper(
            loss,
            optimizer,
            target,
            compile_train_step=False,  # on two cores it takes minutes and gains nothing
            cudagraph=False,
        )
        trainer = make_trainer(
            run, collector, loss, optimizer, widths=player.widths, stepper=stepper
        )
        pure.PureStepper(lambda: pure_update(loss, optimizer, target)).register(trainer)
        greedy = DreamerV3Player(network, recipe, run.spaces, deterministic=True)
        parts.register_with_evaluations(trainer, run, greedy)
    return trainer


class SymlogMLP(modules.DreamerV3MLP):
    """An MLP whose input is squashed first: numbers of any size become small ones."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*map(modules.symlog, inputs))


class SymexpMLP(modules.DreamerV3MLP):
    """An MLP that says the symlog of its output, as the paper's decoder does: the loss takes it of both."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return modules.symexp(super().forward(*inputs))


class PictureDecoder(modules.DreamerV3ImageDecoder):
    """TorchRL's decoder, which says a multiple of 16 rows and columns; those that are too many are left out."""

    def __init__(self, features: int, picture: Sequence[int], channels: int) -> None:
        count, *size = picture
        whole = [16 * math.ceil(each / 16) for each in size]
        super().__init__(features, (count, *whole), channels, num_blocks=1)
        self._rows, self._columns = size

    def forward(self, *inputs: Tensor) -> Tensor:
        whole: Tensor = super().forward(*inputs)
        return whole[..., : self._rows, : self._columns]


class PartsEncoder(nn.Module):
    """What encoders make of the parts of observations, joined: of all numbers, and of each picture."""

    def __init__(self, observations: Observations, encoders: Sequence[nn.Module]) -> None:
        super().__init__()
        self._observations = observations
        self.encoders = nn.ModuleList(encoders)

    def forward(self, rows: Tensor) -> Tensor:
        parts = compared(self._observations, rows)
        return torch.cat([net(part) for net, part in zip(self.encoders, parts, strict=True)], -1)


class PartsDecoder(nn.Module):
    """What decoders say of each part of observations, and behind all that the parts themselves."""

    def __init__(self, observations: Observations, decoders: Sequence[nn.Module]) -> None:
        super().__init__()
        self._observations = observations
        self.decoders = nn.ModuleList(decoders)

    def forward(self, state: Tensor, belief: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        recos = [net(state, belief) for net in self.decoders]
        return (*recos, *compared(self._observations, rows))


def compared(observations: Observations, rows: Tensor) -> list[Tensor]:
    """All numbers of observations together, and each picture: what a model of the world says again."""
    parts = observations.split(rows)
    pictures = [parts[part.name] for part in observations.pictures]
    if not observations.features:
        return pictures
    return [observations.numbers(rows), *pictures]


class ChoosingMLP(modules.DreamerV3MLP):
    """An MLP that says the logits of several choices; each is uniform with probability ``unimix``."""

    def __init__(self, features: int, recipe: DreamerV3Config, head: MultiCategorical) -> None:
        super().__init__(features, head.width, recipe.depth, recipe.cells, 0.01)
        self._nvec = head.nvec
        self._unimix = recipe.unimix

    def forward(self, *inputs: Tensor) -> Tensor:
        mixed = []
        for logits in super().forward(*inputs).split(self._nvec, -1):
            uniform = self._unimix / logits.shape[-1]
            mixed.append(((1 - self._unimix) * logits.softmax(-1) + uniform).log())
        return torch.cat(mixed, -1)


class OneHotChoices(HeadDistribution):
    """Several choices, each of them one-hot, one behind the other: actions as the model sees them."""

    def __init__(self, params: Tensor, head: MultiCategorical) -> None:
        super().__init__(params, head)
        self._event_shape = torch.Size([head.width])

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        return self._encoded(super().sample(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        # The likeliest choices of one-hot vectors are those that they stand for.
        return super().log_prob(self._head.mode(value))

    @property
    def mode(self) -> Tensor:
        return self._encoded(super().mode)

    deterministic_sample = mode

    def _encoded(self, indices: Tensor) -> Tensor:
        return self._head.encode(indices).to(self._params.dtype)


class Networks(NamedTuple):
    """What the losses share, in the order in which initial weights are drawn."""

    encoder: nn.Module
    decoder: nn.Module
    prior: ScaledPrior
    posterior: modules.RSSMPosteriorV3
    ends: nn.Module  # says the logit of the probability that an episode goes on
    reward: nn.Module
    value: nn.Module
    actor: ProbabilisticTensorDictSequential
    mean: nn.Module  # of what a head of bins says


def make_loss(recipe: DreamerV3Config, spaces: Spaces, device: torch.device = CPU) -> DreamerV3Loss:
    """The loss of a world model, an actor and a critic. Its ``actor_network`` is what acts with them."""
    networks = make_networks(recipe, spaces)
    mean = networks.mean
    model_loss = make_model_loss(networks, recipe, spaces)

    # The actor imagines with the prior, and without a decoder: it never sees an observation.
    transition = TensorDictModule(
        networks.prior, ["state", "belief", "action"], ["_", "state", "belief"]
    )
    rewards = TensorDictSequential(
        TensorDictModule(networks.reward, IMAGINED, ["reward_logits"]),
        TensorDictModule(mean, ["reward_logits"], ["reward"]),
    )
    width = recipe.categoricals * recipe.classes
    imagined = imagined_env(transition, rewards, width, recipe, spaces)
    critic = TensorDictSequential(
        TensorDictModule(networks.value, IMAGINED, ["state_value_logits"]),
        TensorDictModule(mean, ["state_value_logits"], ["state_value"]),
    )
    actor_loss = DreamerV3ActorLoss(
        networks.actor,
        critic,
        imagined,
        continuation_model=TensorDictSequential(
            TensorDictModule(networks.ends, IMAGINED, ["continue_pred"]),
            TensorDictModule(nn.Sigmoid(), ["continue_pred"], ["continuation"]),
        ),
        imagination_horizon=recipe.horizon,
        entropy_bonus=recipe.entropy,
        use_reinforce=spaces.discrete,  # else the gradient goes through the model
    )
    actor_loss.make_value_estimator(gamma=recipe.gamma, lmbda=recipe.gae_lambda)
    value_loss = DreamerV3ValueLoss(
        critic,
        value_loss="two_hot",
        num_value_bins=recipe.bins,
        actor_loss=actor_loss,
        slow_critic_regularization=1.0,
    )
    value_loss.set_keys(value_logits="state_value_logits")
    loss = DreamerV3Loss(
        model_loss,
        actor_loss,
        value_loss,
        continuation_horizon=1 / (1 - recipe.gamma),
        lmbda=recipe.gae_lambda,
    ).to(device)

    # Workers act with the learner's own modules: encoder, prior and posterior, actor.
    encode = TensorDictModule(networks.encoder, ["observation"], ["encoded_latents"])
    model = modules.RSSMStateEstimatorV3(networks.prior, networks.posterior)
    let_act(loss, TensorDictSequential(encode, model, networks.actor))
    return loss


def make_networks(recipe: DreamerV3Config, spaces: Spaces) -> Networks:
    features = recipe.categoricals * recipe.classes + recipe.belief
    sizes = {
        "hidden_dim": recipe.cells,
        "rnn_hidden_dim": recipe.belief,
        "num_categoricals": recipe.categoricals,
        "num_classes": recipe.classes,
        "unimix": recipe.unimix,
    }

    def head(outputs: int, outscale: float = 1.0) -> modules.DreamerV3MLP:
        return modules.DreamerV3MLP(features, outputs, recipe.depth, recipe.cells, outscale)

    encoder, embedding, decoder = make_eyes(recipe, spaces, features)
    if spaces.discrete:
        bounds = None
    else:
        bounds = spaces.bounds()
    return Networks(
        encoder=encoder,
        decoder=decoder,
        prior=ScaledPrior(spaces.actions, bounds, num_blocks=1, prior_num_layers=1, **sizes),
        posterior=modules.RSSMPosteriorV3(obs_embed_dim=embedding, use_rms_norm=True, **sizes),
        ends=head(1),
        # Rewards and values begin at zero.
        reward=head(recipe.bins, 0.0),
        value=head(recipe.bins, 0.0),
        actor=make_actor(recipe, spaces, features),
        mean=modules.SymExpTwoHot(recipe.bins),
    )


def make_model_loss(
    networks: Networks, recipe: DreamerV3Config, spaces: Spaces
) -> DreamerV3ModelLoss:
    """The loss of the world model: of decoder, rewards and ends, and of prior and posterior, each way."""
    decoder = networks.decoder
    decoders = [decoder]
    reads = REPLAYED
    goals = ["observation"]
    recos = ["reco_pixels"]
    writes = recos
    if isinstance(decoder, PartsDecoder):
        decoders = [*decoder.decoders]
        reads = [*REPLAYED, ("next", "observation")]
        goals = [f"part_{number}" for number in range(len(decoders))]
        recos = [f"reco_{goal}" for goal in goals]
        writes = [*recos, *goals]
    world_model = TensorDictSequential(
        TensorDictModule(
            networks.encoder, [("next", "observation")], [("next", "encoded_latents")]
        ),
        modules.RSSMRolloutV3(
            TensorDictModule(
                networks.prior,
                ["state", "belief", "action"],
                [("next", "prior_logits"), ("next", "state"), ("next", "belief")],
            ),
            TensorDictModule(
                networks.posterior,
                [("next", "belief"), ("next", "encoded_latents")],
                [("next", "posterior_logits"), ("next", "state")],
            ),
        ),
        TensorDictModule(decoder, reads, [("next", key) for key in writes]),
        TensorDictModule(networks.reward, REPLAYED, [("next", "reward_logits")]),
        TensorDictModule(networks.mean, [("next", "reward_logits")], [("next", "reward")]),
        TensorDictModule(networks.ends, REPLAYED, [("next", "continue_pred")]),
    )
    model_loss = DreamerV3ModelLoss(
        world_model,
        lambda_continue=1.0,
        kl_mode="separate",
        unimix=recipe.unimix,
        free_bits=recipe.free_nats,
        num_reward_bins=recipe.bins,
        detach_output=False,
        # pixels are compared as they are, from 0 to 1
        reco_symlog=[isinstance(each, SymexpMLP) for each in decoders],
    )
    model_loss.set_keys(pixels=goals, reco_pixels=recos)
    return model_loss


class DreamerV3Player(WorldModelPlayer):
    """The prior makes the belief from the action before; the posterior then draws the state."""

    draws = staticmethod(torch.rand)

    def __init__(
        self,
        network: ActingNetwork,
        recipe: DreamerV3Config,
        spaces: Spaces,
        *,
        on_adoption: str | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(
            network,
            spaces,
            noise=(recipe.categoricals,),
            widths=(recipe.categoricals * recipe.classes, recipe.belief),
            window=recipe.window,
            on_adoption=on_adoption,
            deterministic=deterministic,
        )

    def seen(
        self, observation: Tensor, before: State, begins: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        encoder, model, _ = self.parts
        prior = model.prior
        posterior = model.posterior
        features = action_features(prior, before[PREVIOUS_ACTION])
        belief = next_belief(prior.rnn, before[STATE], before[BELIEF], features)
        encoded = encoder.module(observation)
        logits = posterior.obs_rnn_to_post_projector(torch.cat([belief, encoded], -1))
        if self.soft:
            probs = logits.unflatten(-1, (-1, posterior.num_classes)).softmax(-1)
            return probs.flatten(-2), belief
        return drawn_state(posterior, logits, noise), belief

    def chosen(self, state: Tensor, belief: Tensor, generator: Generator) -> Tensor:
        net, *spread, _ = self.parts[-1]
        outputs = net.module(state, belief)
        if isinstance(self.actions, BoxActions):
            loc, scale = spread[0].module(outputs)
            if self.deterministic:
                scale = None
            return squashed(loc, scale, self.actions, generator)
        if isinstance(self.head, MultiCategorical):
            if self.soft:
                return torch.cat(
                    [each.softmax(-1) for each in outputs.split(self.head.nvec, -1)], -1
                )
            if self.deterministic:
                indices = self.head.mode(outputs)
            else:
                indices, _ = self.head.act(outputs, generator)
            return self.head.encode(indices).to(state.dtype)
        if self.soft:
            return outputs.softmax(-1)
        if self.deterministic:
            choice = outputs.argmax(-1)
        else:
            choice = torch.multinomial(outputs.softmax(-1), 1, generator=generator).squeeze(-1)
        return self.head.encode(choice).to(state.dtype)


def make_eyes(
    recipe: DreamerV3Config, spaces: Spaces, features: int
) -> tuple[nn.Module, int, nn.Module]:
    """Encoder, width of its output, decoder. Pictures stay uint8 until TorchRL's own encoder and loss."""
    observations = spaces.observations
    encoders: list[nn.Module] = []
    decoders: list[nn.Module] = []
    width = 0
    if observations.features:
        encoders.append(SymlogMLP(observations.features, None, recipe.depth, recipe.cells))
        decoders.append(SymexpMLP(features, observations.features, recipe.depth, recipe.cells, 1.0))
        width += recipe.cells
    for part in observations.pictures:
        eye = modules.DreamerV3ImageEncoder(part.shape[0], recipe.channels)
        encoders.append(eye)
        decoders.append(PictureDecoder(features, part.shape, recipe.channels))
        width += eye.output_features(part.shape)
    if len(encoders) == 1:
        return encoders[0], width, decoders[0]
    return PartsEncoder(observations, encoders), width, PartsDecoder(observations, decoders)


def make_actor(
    recipe: DreamerV3Config, spaces: Spaces, features: int
) -> ProbabilisticTensorDictSequential:
    """What chooses an action from a state: one of n, several choices, or numbers within their bounds."""
    head = head_for(spaces.player_actions())
    if isinstance(head, MultiCategorical):
        chooses = ChoosingMLP(features, recipe, head)
        return ProbabilisticTensorDictSequential(
            TensorDictModule(chooses, IMAGINED, ["logits"]),
            ProbabilisticTensorDictModule(
                {"params": "logits"},
                ["action"],
                distribution_class=OneHotChoices,
                distribution_kwargs={"head": head},
                return_log_prob=True,
            ),
        )
    if spaces.discrete:
        return modules.DreamerV3DiscreteActor(
            features,
            spaces.actions,
            depth=recipe.depth,
            num_cells=recipe.cells,
            unimix=recipe.unimix,
        )
    low, high = spaces.bounds()
    net = modules.DreamerV3MLP(features, 2 * spaces.actions, recipe.depth, recipe.cells, 0.01)
    spread = NormalParamExtractor(scale_mapping="biased_softplus_1.0", scale_lb=0.1)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, IMAGINED, ["loc_and_scale"]),
        TensorDictModule(spread, ["loc_and_scale"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=modules.TanhNormal,
            distribution_kwargs={"low": low, "high": high, "tanh_loc": False},
            return_log_prob=True,
        ),
    )


def acting(run: parts.Run[DreamerV3Config], deterministic: bool) -> parts.Acting:
    """What plays one version, so nothing is adopted."""
    network = make_loss(run.recipe, run.spaces).actor_network
    return parts.Acting(
        network, DreamerV3Player(network, run.recipe, run.spaces, deterministic=deterministic)
    )


RECIPE = parts.Recipe("dreamer_v3", DreamerV3Config, parts.ANY.probe, build, acting)
