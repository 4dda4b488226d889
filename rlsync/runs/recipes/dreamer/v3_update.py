"""DreamerV3's update: TorchRL's losses and draws, on tensors; each head gets the rows of all steps at once.

Shapes: N imagined episodes, one from each replayed row, of H steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.functional import linear, one_hot
from torchrl.modules import OneHotCategorical, RSSMPosteriorV3, RSSMPriorV3, RSSMRolloutV3
from torchrl.modules.distributions.utils import rsample_and_log_prob
from torchrl.objectives import DreamerV3Loss, SoftUpdate
from torchrl.objectives.utils import hold_out_net
from torchrl.trainers.algorithms import DreamerV3Optimizer

from rlsync.runs.compat.dreamer import ScaledPrior
from rlsync.runs.recipes import pure


def pure_update(
    loss: DreamerV3Loss, optimizer: DreamerV3Optimizer, target: SoftUpdate
) -> pure.Update:
    """The update as a function of tensors: equations 4 to 11 of arXiv 2301.04104."""
    keys = ("state", "belief", "action", "is_init", "next")
    return pure.Update(
        (loss,), (pure.Phase(optimizer, _Losses(loss), clips=False),), keys, after=target.step
    )


class Imagined(NamedTuple):
    """H steps of N episodes, each of which begins in a replayed state."""

    states: Tensor  # [H + 1, N, *]
    beliefs: Tensor  # [H + 1, N, *]
    actions: Tensor  # [H, N, *]


class _Losses:
    def __init__(self, loss: DreamerV3Loss) -> None:
        self.loss = loss
        self.actor = loss.actor_loss
        self.critic = loss.value_loss
        encoder, rollout, *heads = loss.model_loss.world_model.module
        model = TensorDictSequential(
            encoder, RSSMUnroll(rollout.rssm_prior, rollout.rssm_posterior), *heads
        )
        # which has the same parameters, and is no part of the loss
        self.model = copy.copy(loss.model_loss)
        self.model._modules = {**self.model._modules, "world_model": model}
        self.prior = rollout.rssm_prior.module
        _, reward, mean, ends = heads
        self.reward = reward.module
        self.mean = mean.module
        self.ends = ends.module
        self.value = self.actor.value_model[0].module
        self.policy, *self.spread, self.draw = self.actor.actor_model

    def __call__(self, b: pure.Batch, noise: Sequence[Tensor]) -> pure.Found:
        # The world model explains the replayed sequences.
        model_losses, after = self.model(TensorDict(dict(b), b["is_init"].shape[:2]))

        # From each state in them an episode is imagined, of which actor and critic learn.
        replayed = after["next"].select("state", "belief")
        begin = replayed.detach().flatten(0, 1)
        returns, losses = self.of_imagined(begin["state"], begin["belief"])

        # The critic learns of the replayed rewards, too; imagined returns stand where a sequence ends.
        replayed["bootstrap"] = returns[0].view(replayed.shape)
        replayed["next"] = b["next"]
        replay_value = self.critic.replay_value_loss(
            replayed, horizon=self.loss.continuation_horizon, lmbda=self.loss.lmbda
        )["loss_replay_value"]
        losses["loss_replay_value"] = self.loss.replay_value_loss_weight * replay_value
        losses["replay_value"] = replay_value
        return {name: loss.squeeze() for name, loss in model_losses.items()} | losses

    def of_imagined(self, state: Tensor, belief: Tensor) -> tuple[Tensor, pure.Found]:
        """Returns ``[H, N, 1]`` of what begins in states ``[N, *]``, and the losses of actor and critic."""
        actor = self.actor
        reinforce = actor.use_reinforce
        values = None
        with hold_out_net(actor.model_based_env), hold_out_net(self.value), hold_out_net(self.ends):
            # By REINFORCE no gradient goes through what is imagined.
            with torch.set_grad_enabled(not reinforce):
                steps = self.imagined(state, belief)
                features = torch.cat([steps.states, steps.beliefs], -1)
                reward = self.mean(self.reward(features[1:]))
                goes_on = self.ends(features).sigmoid()
                if not reinforce:
                    values = self.mean(self.value(features))
        features = features.detach()
        logits = self.value(features)
        if values is None:
            values = self.mean(logits.detach())

        # R[t] = r[t] + gamma c[t + 1] ((1 - lambda) v[t + 1] + lambda R[t + 1]), and R[H] = v[H]
        returns = actor.lambda_target(
            reward.transpose(0, 1),
            values[-len(reward) :].transpose(0, 1),
            goes_on[-len(reward) :].transpose(0, 1),
        ).transpose(0, 1)

        # A step counts as much as it is likely to be reached, discounted.
        gamma = actor.value_estimator.gamma
        weight = torch.cat([goes_on[:1], gamma * goes_on[1:-1]]).cumprod(0).detach()
        losses = self.actor_losses(steps, returns, values, weight)
        losses["continuation_mean"] = goes_on[1:].mean()
        losses |= self.critic_losses(features, logits, returns, weight)
        return returns.detach(), losses

    def actor_losses(
        self, steps: Imagined, returns: Tensor, values: Tensor, weight: Tensor
    ) -> pure.Found:
        """-w (sg((R - v) / S) ln pi(a|s) + eta H), or where the gradient goes through the model w (-R / S).

        S is the spread of returns, from the 5th to the 95th percentile.
        """
        actor = self.actor
        if actor.training:
            actor.retnorm.update(returns)
        scale = actor.retnorm.scale().squeeze(-1)
        chosen_from = self.acting(
            steps.states[:-1].detach().transpose(0, 1), steps.beliefs[:-1].detach().transpose(0, 1)
        )
        if actor.use_reinforce:
            entropy = chosen_from.entropy()
            log_prob = chosen_from.log_prob(steps.actions.transpose(0, 1))
            gain = log_prob.T.unsqueeze(-1) * (returns - values[:-1])
        else:
            entropy = -rsample_and_log_prob(chosen_from)[1]
            gain = returns
        entropy = (weight * entropy.T.unsqueeze(-1)).mean()
        return {
            "loss_actor": -(weight * gain / scale).mean() - actor.entropy_bonus * entropy,
            "actor_entropy": entropy,
            "return_low": actor.return_low.clone(),
            "return_high": actor.return_high.clone(),
            "return_scale": scale,
        }

    def critic_losses(
        self, features: Tensor, logits: Tensor, returns: Tensor, weight: Tensor
    ) -> pure.Found:
        """Cross entropies of the critic's bins and the returns, and of what the slow critic says."""
        net = self.critic.value_model
        params = self.critic.target_value_model_params
        with torch.no_grad(), params.to_module(net, preserve_module_state=False):
            slow = self.mean(net[0].module(features[:-1]))
        errors = self.errors(logits[:-1], torch.cat([returns.detach(), slow], -1))
        of_returns, of_slow = (weight * errors).mean((0, 1))
        return {
            "loss_value": of_returns + self.critic.slow_critic_regularization * of_slow,
            "value_slow_loss": of_slow,
        }

    def imagined(self, state: Tensor, belief: Tensor) -> Imagined:
        """What follows states ``[N, *]`` by the prior and the actor."""
        prior = self.prior
        states = [state]
        beliefs = [belief]
        actions = []
        for _ in range(self.actor.imagination_horizon):
            if self.draw.distribution_class is OneHotCategorical:  # as it draws; it is slow to make
                probs = self.policy.module(state, belief).softmax(-1)
                choice = torch.multinomial(probs, 1, True).squeeze(-1)
                actions.append(one_hot(choice, probs.shape[-1]).to(state.dtype))
            elif self.actor.use_reinforce:
                actions.append(self.acting(state, belief).sample())
            else:
                actions.append(self.acting(state, belief).rsample())
            belief = next_belief(prior.rnn, state, belief, action_features(prior, actions[-1]))
            uniform = torch.rand(len(state), prior.num_categoricals, device=state.device)
            state = drawn_state(prior, prior.rnn_to_prior_projector(belief), uniform)
            states.append(state)
            beliefs.append(belief)
        return Imagined(torch.stack(states), torch.stack(beliefs), torch.stack(actions))

    def acting(self, state: Tensor, belief: Tensor) -> Distribution:
        outputs: Any = (self.policy.module(state, belief),)
        if self.spread:
            outputs = self.spread[0].module(*outputs)
        return self.draw.distribution_class(*outputs, **self.draw.distribution_kwargs)

    def errors(self, logits: Tensor, goals: Tensor) -> Tensor:
        """Cross entropies ``[*, n]`` of logits and n goals, each of which is between two bins."""
        bins = self.mean.bins
        goals = goals.clamp(bins[0], bins[-1])
        low = (torch.searchsorted(bins, goals, right=True) - 1).clamp(0, len(bins) - 2)
        share = (goals - bins[low]) / (bins[low + 1] - bins[low])
        log_probs = logits.log_softmax(-1)
        return (share - 1) * log_probs.gather(-1, low) - share * log_probs.gather(-1, low + 1)


class RSSMUnroll(RSSMRolloutV3):
    """TorchRL's rollout; what does not depend on the step before is computed for all steps at once."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        prior = self.rssm_prior.module
        posterior = self.rssm_posterior.module
        # The posterior's first layer is a sum of two: of the belief, and of the observation.
        first, norm, activation, last = posterior.obs_rnn_to_post_projector
        of_belief, of_observation = first.weight.tensor_split([prior.rnn_hidden_dim], 1)

        state = tensordict["state"][:, 0]
        belief = tensordict["belief"][:, 0]
        steps = []
        by_step = self._by_step(tensordict, of_observation, first.bias)
        for share, carries, features, uniform in by_step:
            belief = next_belief(prior.rnn, state * carries, belief * carries, features)
            logits = last(activation(norm(torch.addmm(share, belief, of_belief.T))))
            state = drawn_state(posterior, logits, uniform)
            steps.append((logits, state, belief))
        return self._with_steps(tensordict, steps)

    def _by_step(
        self, tensordict: TensorDictBase, weight: Tensor, bias: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """What does not depend on the step before, of each step, ``[B, *]``.

        The observation's share, a mask that is 0 where an episode begins, features of the action, and random
        numbers.
        """
        prior = self.rssm_prior.module
        encoded = tensordict["next", "encoded_latents"]
        carries = (~tensordict["is_init"]).to(encoded.dtype)
        features = action_features(prior, tensordict["action"] * carries)
        shares = linear(encoded, weight, bias)
        batch, steps = shares.shape[:2]
        # The first of two is for a state of the prior, which TorchRL draws and throws away.
        uniform = torch.rand(steps, 2, batch, prior.num_categoricals, device=encoded.device)[:, 1]
        return zip(shares.unbind(1), carries.unbind(1), features.unbind(1), uniform, strict=True)

    def _with_steps(
        self, tensordict: TensorDictBase, steps: Sequence[tuple[Tensor, Tensor, Tensor]]
    ) -> TensorDictBase:
        prior = self.rssm_prior.module
        logits, state, belief = (torch.stack(part, 1) for part in zip(*steps, strict=True))
        shape = (-1, prior.num_classes)
        after = {
            "posterior_logits": logits.unflatten(-1, shape),
            "prior_logits": prior.rnn_to_prior_projector(belief).unflatten(-1, shape),
            "state": state,
            "belief": belief,
        }
        tensordict["next"].update(after)
        return tensordict


def action_features(prior: ScaledPrior, action: Tensor) -> Tensor:
    scaled = prior.scaled(action)
    features: Tensor = prior.rnn.action_projection(scaled / scaled.detach().abs().clamp_min(1))
    return features


def next_belief(rnn: Any, state: Tensor, belief: Tensor, of_action: Tensor) -> Tensor:
    blocks, norm, activation = rnn.hidden_layers
    inputs = torch.cat(
        [belief, rnn.belief_projection(belief), rnn.state_projection(state), of_action], -1
    )
    hidden = activation(norm(torch.addmm(blocks.bias, inputs, blocks.weight[0])))
    gates = torch.addmm(rnn.gates.bias, hidden, rnn.gates.weight[0])
    reset, candidate, update = gates.chunk(3, -1)
    return torch.lerp(belief, (reset.sigmoid() * candidate).tanh(), (update - 1).sigmoid())


def drawn_state(net: RSSMPriorV3 | RSSMPosteriorV3, logits: Tensor, uniform: Tensor) -> Tensor:
    """One-hot draws, with the gradient of their probabilities."""
    unimix = net.unimix
    classes = net.num_classes
    probs = (1 - unimix) * logits.unflatten(-1, (-1, classes)).softmax(-1) + unimix / classes
    sure = probs.detach()
    drawn = (uniform.unsqueeze(-1) > sure.cumsum(-1)).sum(-1).clamp_max(classes - 1)
    return (probs + (one_hot(drawn, classes) - sure)).flatten(-2)
