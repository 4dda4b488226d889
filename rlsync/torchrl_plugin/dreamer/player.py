"""DreamerPlayer: a Dreamer policy that carries its state, and knows which version made it."""

from __future__ import annotations

from collections import deque
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer

from rlsync.core.errors import ConfigError
from rlsync.core.ledger import NO_VERSION, STATE_VERSION
from rlsync.core.user_input import check_choice, check_count
from rlsync.torchrl_plugin.compat.stamps import STAMP
from rlsync.torchrl_plugin.dreamer.map import parts_of_player, state_shapes

OnAdoption = Literal["keep", "reset", "recompute"]


class DreamerPlayer(TensorDictModuleBase):
    """Acts with a Dreamer policy, and carries its recurrent state from step to step.

    A recurrent state outlives the weights that made it. When a worker adopts a version in the middle of an
    episode, the next step begins with a state that older weights made. This module declares what happens
    then. It also writes on each frame, under ``"state_version"``, which version made the state that the step
    began with: -1 where it began with zeros.

    It also carries what TorchRL's primer leaves at zero: DreamerV3 reads the previous action.

    - ``"keep"`` uses the state as it is. This is what TorchRL's collectors do.
    - ``"reset"`` begins with zeros, as at the first step of an episode.
    - ``"recompute"`` makes the state again, with the new weights, from the observations and actions of the
      episode so far, at most ``window`` of them. It is exact when the episode is not longer than that, apart
      from what the posterior draws at random.

    Args:
        player: the policy: of DreamerV3 a TensorDictSequential of encoder, ``RSSMStateEstimatorV3(prior,
            posterior)`` and actor; of either version one of encoder, posterior, actor and prior. What
            explores belongs into it: the action that it writes is the one that is carried.
        on_adoption: what happens to the state at an adoption in the middle of an episode.
        window: how many steps ``"recompute"`` keeps, in the memory of the worker.

    Raises:
        ConfigError: the player is not made of TorchRL's parts, or an argument is wrong. At a step: the
            frames are not stamped, so that an adoption cannot be seen; ``"keep"`` does not need the stamps.

    Example:
        >>> from tensordict.nn import TensorDictModule, TensorDictSequential
        >>> from torch import nn
        >>> from torchrl.modules import DreamerV3DiscreteActor, RSSMPosteriorV3, RSSMPriorV3
        >>> from torchrl.modules import RSSMStateEstimatorV3
        >>> encoder = TensorDictModule(nn.Linear(4, 8), ["observation"], ["encoded_latents"])
        >>> sizes = {"hidden_dim": 8, "rnn_hidden_dim": 8, "num_categoricals": 2, "num_classes": 4}
        >>> prior = RSSMPriorV3(action_shape=(2,), action_dim=2, **sizes)
        >>> posterior = RSSMPosteriorV3(obs_embed_dim=8, **sizes)
        >>> actor = DreamerV3DiscreteActor(16, 2, num_cells=8)
        >>> policy = TensorDictSequential(encoder, RSSMStateEstimatorV3(prior, posterior), actor)
        >>> player = DreamerPlayer(policy, on_adoption="reset")
        >>> sorted(player.primer().primers.keys())
        ['belief', 'previous_action', 'state', 'state_version']
    """

    def __init__(
        self, player: TensorDictModuleBase, *, on_adoption: OnAdoption = "keep", window: int = 64
    ) -> None:
        super().__init__()
        where = f"DreamerPlayer(on_adoption={on_adoption!r}, window={window!r})"
        check_choice("way to adopt", on_adoption, get_args(OnAdoption), where)
        check_count("a window of steps", window, 1, where, "for example window=64")
        parts = parts_of_player(player)
        self.player = player
        self.on_adoption: OnAdoption = on_adoption
        self.window = window
        #: What each step brought, where it began an episode, and its action, to make the state again.
        self._history: deque[tuple[TensorDictBase, Tensor, Tensor]] = deque(maxlen=window)
        self._shapes = state_shapes(parts)
        carried = [("next", key) for key in (*self._shapes, STATE_VERSION)]
        self.in_keys = list(dict.fromkeys([*player.in_keys, *self._shapes, STATE_VERSION]))
        self.out_keys = list(dict.fromkeys([*player.out_keys, STATE_VERSION, *carried]))

    def primer(self) -> TensorDictPrimer:
        """The transform that an environment needs: it begins each episode with a state of zeros.

        DreamerV3 also needs ``torchrl.envs.InitTracker()``.
        """
        begins = self.begins()
        specs = {
            key: Unbounded(shape=value.shape, dtype=value.dtype) for key, value in begins.items()
        }
        values = {**dict.fromkeys(self._shapes, 0.0), STATE_VERSION: NO_VERSION}
        return TensorDictPrimer(specs, default_value=values, expand_specs=True)

    def begins(self) -> dict[str, Tensor]:
        """What is carried, by key, as it is at the first step of an episode in one environment."""
        zeros = {key: torch.zeros(shape, device="cpu") for key, shape in self._shapes.items()}
        return {**zeros, STATE_VERSION: torch.tensor([NO_VERSION], device="cpu")}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act once in each environment, and say what the next step begins with.

        Args:
            tensordict: of one step, with what an environment with :meth:`primer` gives.
        """
        made_by, version = self._versions(tensordict)
        begins = made_by == NO_VERSION
        stale = ~begins & (made_by != version)
        if self.on_adoption != "keep" and bool(stale.any()):
            if self.on_adoption == "recompute":
                again = self._recomputed(stale)
            else:
                again = None
            for key in self._shapes:
                value = tensordict.get(key)
                if again is None:
                    fresh = torch.zeros_like(value)
                else:
                    fresh = again[key].to(value.dtype)
                tensordict.set(key, _where(stale, fresh, value))
            made_by = torch.where(stale, NO_VERSION if again is None else version, made_by)
        if self.on_adoption == "recompute":
            observed = tensordict.select(*self._observed(), strict=False)
        else:
            observed = None
        self.player(tensordict)
        tensordict.set(STATE_VERSION, made_by)
        self._carry(tensordict, version)
        if observed is not None:
            self._history.append((observed.clone(), begins, tensordict.get("action").clone()))
        return tensordict

    def _versions(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        made_by = tensordict.get(STATE_VERSION, None)
        stamp = tensordict.get(STAMP, None)
        if made_by is None:
            problem = f"the environment does not carry {STATE_VERSION!r}"
            cure = "TransformedEnv(env, Compose(InitTracker(), player.primer()))"
            raise ConfigError(problem, "DreamerPlayer, at a step", cure)
        if stamp is None and self.on_adoption != "keep":
            problem = f"the frames do not carry {STAMP!r}, so an adoption cannot be seen"
            cure = "pass track_policy_version=True to the collector, or give it a BoardScheme"
            raise ConfigError(
                problem, f"DreamerPlayer(on_adoption={self.on_adoption!r}), at a step", cure
            )
        if stamp is None:
            return made_by, torch.full_like(made_by, NO_VERSION)
        return made_by, stamp.reshape(made_by.shape)

    def _observed(self) -> list[NestedKey]:
        """What the modules before the posterior read."""
        return [
            key for unit in parts_of_player(self.player).encoders for key in unit.module.in_keys
        ]

    def _carry(self, tensordict: TensorDictBase, version: Tensor) -> None:
        """Write what the next step begins with. The primer keeps what stands there already."""
        for key in self._shapes:
            # a prior at the end writes the next belief
            if ("next", key) not in tensordict.keys(True):
                value = tensordict.get("action" if key == "previous_action" else key)
                tensordict.set(("next", key), value.float())
        tensordict.set(("next", STATE_VERSION), version.clone())

    @torch.no_grad()
    def _recomputed(self, stale: Tensor) -> dict[str, Tensor]:
        """The state that the present weights make of the steps so far."""
        parts = parts_of_player(self.player)
        batch = stale.shape[:-1]
        carried = {
            k: torch.zeros(*batch, *shape, device=stale.device) for k, shape in self._shapes.items()
        }
        for observed, begins, action in self._history:
            if begins.shape != stale.shape:  # other environments than now
                continue
            begun = {key: _where(begins, torch.zeros_like(v), v) for key, v in carried.items()}
            past = observed.copy().update({**begun, "is_init": begins})
            for unit in (*parts.encoders, parts.posterior):
                unit.module(past)
            if not parts.estimates:
                parts.prior.module(past.set("action", action))
                past.set("belief", past.get(("next", "belief")))
            carried = {
                key: action.float() if key == "previous_action" else past.get(key).float()
                for key in carried
            }
        return carried


def _where(chosen: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """``one`` where chosen and ``other`` elsewhere; ``chosen`` is [*batch, 1]."""
    return torch.where(
        chosen.reshape(*chosen.shape[:-1], *[1] * (one.ndim - chosen.ndim + 1)), one, other
    )
