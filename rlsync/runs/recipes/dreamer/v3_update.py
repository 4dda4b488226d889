"""DreamerV3's update: TorchRL's losses and draws, on tensors; each head gets the rows of all steps at once.

Shapes: N imagined episodes, one from each replayed row, of H steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictSequential
from torch import Tensor
from torch.nn.functional import linear, one_hot
from torchrl.modules import RSSMRolloutV3
from torchrl.modules.distributions.utils import rsample_and_log_prob
from torchrl.objectives import DreamerV3Loss, SoftUpdate
from torchrl.objectives.utils import hold_out_net
from torchrl.trainers.algorithms import DreamerV3Optimizer

from rlsync.runs.recipes import pure


def pure_update(
    loss: DreamerV3Loss, optimizer: DreamerV3Optimizer, target: SoftUpdate
) -> pure.Update:
    """The update as a function of tensors: equations 4 to 11 of arXiv 2301.04104."""
    keys = ("state", "belief", "action", "is_init", "next")
    return pure.Update(
        (loss,), (pure.Phase(optimizer, _Losses(loss), clips=False),), keys, after=target.step
    )


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
        _, self.reward, self.mean, self.ends = (head.module for head in heads)
        self.value = self.actor.value_model[0].module
        self.policy, *self.spread, self.draw = self.actor.actor_model

    def __call__(self, b: pure.Batch, noise: Sequence[Tensor]) -> pure.Found:
        losses, after = self.model(TensorDict(dict(b), b["is_init"].shape[:2]))
        again = after["next"].select("state", "belief")
        begin = again.detach().flatten(0, 1)
        returns, found = self.of_imagined(begin["state"], begin["belief"])
        again["bootstrap"] = returns[0].view(again.shape)
        again["next"] = b["next"]
        horizon = self.loss.continuation_horizon
        lmbda = self.loss.lmbda
        missed = self.critic.replay_value_loss(again, horizon=horizon, lmbda=lmbda)[
            "loss_replay_value"
        ]
        found |= {
            "loss_replay_value": self.loss.replay_value_loss_weight * missed,
            "replay_value": missed,
        }
        return {name: loss.squeeze() for name, loss in losses.items()} | found

    def of_imagined(self, state: Tensor, belief: Tensor) -> tuple[Tensor, pure.Found]:
        """Returns ``[H, N, 1]`` of what begins in states ``[N, *]``, and the losses of actor and critic."""
        actor = self.actor
        critic = self.critic
        reinforce = self.actor.use_reinforce
        with hold_out_net(actor.model_based_env), hold_out_net(self.value), hold_out_net(self.ends):
            with torch.set_grad_enabled(not reinforce):
                states, beliefs, actions = self.imagined(state, belief)
                features = torch.cat([states, beliefs], -1)
                reward = self.mean(self.reward(features[1:]))
                goes_on = self.ends(features).sigmoid()
                values = None if reinforce else self.mean(self.value(features))
        features = features.detach()
        logits = self.value(features)
        values = self.mean(logits.detach()) if values is None else values
        by_time = (each[-len(reward) :].transpose(0, 1) for each in (reward, values, goes_on))
        gain = returns = actor.lambda_target(*by_time).transpose(0, 1)
        if actor.training:
            actor.retnorm.update(returns)
        scale = actor.retnorm.scale().squeeze(-1)
        gamma = actor.value_estimator.gamma
        weight = torch.cat([goes_on[:1], gamma * goes_on[1:-1]]).cumprod(0).detach()
        acting = self.acting(*(each[:-1].detach().transpose(0, 1) for each in (states, beliefs)))
        if reinforce:
            entropy = acting.entropy()
            log_prob = acting.log_prob(actions.transpose(0, 1))
            gain = log_prob.T.unsqueeze(-1) * (returns - values[:-1])
        else:
            entropy = -rsample_and_log_prob(acting)[1]
        entropy = (weight * entropy.T.unsqueeze(-1)).mean()
        net = critic.value_model
        params = critic.target_value_model_params
        with torch.no_grad(), params.to_module(net, preserve_module_state=False):
            slow = self.mean(net[0].module(features[:-1]))
        errors = self.errors(logits[:-1], torch.cat([returns.detach(), slow], -1))
        missed, missed_slow = (weight * errors).mean((0, 1))
        return returns.detach(), {
            "loss_actor": -(weight * gain / scale).mean() - actor.entropy_bonus * entropy,
            "actor_entropy": entropy,
            "return_low": actor.return_low.clone(),
            "return_high": actor.return_high.clone(),
            "return_scale": scale,
            "continuation_mean": goes_on[1:].mean(),
            "loss_value": missed + critic.slow_critic_regularization * missed_slow,
            "value_slow_loss": missed_slow,
        }

    def imagined(self, state: Tensor, belief: Tensor) -> list[Tensor]:
        """States and beliefs ``[H + 1, N, *]``, from the given ones on, and actions ``[H, N, *]``."""
        prior = self.prior
        states = [state]
        beliefs = [belief]
        actions = []
        for _ in range(self.actor.imagination_horizon):
            if self.actor.use_reinforce:  # as the distribution draws, which is slow to make
                probs = self.policy.module(state, belief).softmax(-1)
                chosen = torch.multinomial(probs, 1, True).squeeze(-1)
                actions.append(one_hot(chosen, probs.shape[-1]).to(state.dtype))
            else:
                actions.append(self.acting(state, belief).rsample())
            belief = next_belief(prior.rnn, state, belief, action_features(prior, actions[-1]))
            uniform = torch.rand(len(state), prior.num_categoricals, device=state.device)
            state = drawn_state(prior, prior.rnn_to_prior_projector(belief), uniform)
            states.append(state)
            beliefs.append(belief)
        return [torch.stack(each) for each in (states, beliefs, actions)]

    def acting(self, state: Tensor, belief: Tensor) -> Any:
        out = self.policy.module(state, belief)
        outputs = self.spread[0].module(out) if self.spread else (out,)
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
        seen = tensordict["next", "encoded_latents"]
        action = tensordict["action"]
        kept = (~tensordict["is_init"]).to(seen.dtype)
        of_actions = action_features(prior, action * kept).unbind(1)
        first, norm, activation, last = posterior.obs_rnn_to_post_projector
        of_belief, of_seen = first.weight.tensor_split([prior.rnn_hidden_dim], 1)
        of_seen = linear(seen, of_seen, first.bias).unbind(1)
        # The first of two is for a state of the prior, which TorchRL draws and throws away.
        uniform = torch.rand(
            len(of_seen), 2, len(seen), prior.num_categoricals, device=seen.device
        )[:, 1]
        state = tensordict["state"][:, 0]
        belief = tensordict["belief"][:, 0]
        steps = []
        for keep, of_action, share, draw in zip(
            kept.unbind(1), of_actions, of_seen, uniform, strict=True
        ):
            belief = next_belief(prior.rnn, state * keep, belief * keep, of_action)
            logits = last(activation(norm(torch.addmm(share, belief, of_belief.T))))
            state = drawn_state(posterior, logits, draw)
            steps.append((logits, state, belief))
        logits, state, belief = (torch.stack(each, 1) for each in zip(*steps, strict=True))
        made = {"posterior_logits": logits, "prior_logits": prior.rnn_to_prior_projector(belief)}
        made = {name: each.unflatten(-1, (-1, prior.num_classes)) for name, each in made.items()}
        tensordict["next"].update(made | {"state": state, "belief": belief})
        return tensordict


def action_features(prior: Any, action: Tensor) -> Tensor:
    scaled = prior.scaled(action)
    features: Tensor = prior.rnn.action_projection(scaled / scaled.detach().abs().clamp_min(1))
    return features


def next_belief(rnn: Any, state: Tensor, belief: Tensor, of_action: Tensor) -> Tensor:
    blocks, norm, activation = rnn.hidden_layers
    x = torch.cat(
        [belief, rnn.belief_projection(belief), rnn.state_projection(state), of_action], -1
    )
    x = activation(norm(torch.addmm(blocks.bias, x, blocks.weight[0])))
    reset, candidate, update = torch.addmm(rnn.gates.bias, x, rnn.gates.weight[0]).chunk(3, -1)
    return torch.lerp(belief, (reset.sigmoid() * candidate).tanh(), (update - 1).sigmoid())


def drawn_state(net: Any, logits: Tensor, uniform: Tensor) -> Tensor:
    """One-hot draws, with the gradient of their probabilities."""
    unimix = net.unimix
    classes = net.num_classes
    probs = (1 - unimix) * logits.unflatten(-1, (-1, classes)).softmax(-1) + unimix / classes
    sure = probs.detach()
    drawn = (uniform.unsqueeze(-1) > sure.cumsum(-1)).sum(-1).clamp_max(classes - 1)
    return (probs + (one_hot(drawn, classes) - sure)).flatten(-2)
