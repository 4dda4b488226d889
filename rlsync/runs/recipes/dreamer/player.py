"""What acts with a world model: it carries a recurrent state, and knows which version made it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torch import Generator, Tensor, nn
from torchrl.modules.distributions.utils import safetanh_noeps

from rlsync.runs.actors.envs.actions import BoxActions
from rlsync.runs.actors.player import Acted, Player, Record, State
from rlsync.runs.recipes.impala.heads import head_for
from rlsync.runs.recipes.spaces import Spaces
from rlsync.seams import POLICY, ledger

STATE = "state"  #: what is drawn, given the belief and an observation
BELIEF = "belief"  #: what is computed of all steps before
PREVIOUS_ACTION = "previous_action"  #: one-hot, each choice behind the other, or numbers

#: In the state of a player that adopts: the version that acts now.
_VERSION = "acting_version"

#: In the state of a player that recomputes: the last steps of each environment's episode, ``[N, window, *]``,
#: all written at one place, which goes round; that place, and how many steps are kept, ``[N]``.
_OBSERVED = "past_observation"
_NOISE = "past_noise"
_ACTED = "past_action"
_PLACE = "past_place"
_STEPS = "past_steps"


class ActingNetwork(nn.Module):
    """What acts, of the parts of a loss: checkpoints and sync maps have its leaves by these names."""

    def __init__(self, player: TensorDictSequential) -> None:
        super().__init__()
        self.player = player


class WorldModelPlayer(Player):
    """Acts with parts of a world model and an actor, on plain tensors; a subclass knows how they are used.

    A recurrent state outlives the weights that made it. ``on_adoption`` says what becomes of it when a
    rollout begins with new weights in the middle of an episode, and each step records, as ``state_version``,
    which version made the state that it began with: -1 where it began with zeros.

    - ``"keep"`` uses the state as it is.
    - ``"reset"`` begins with zeros, as at the first step of an episode.
    - ``"recompute"`` makes the state again, with the new weights, from the last ``window`` steps of the
      episode: the same observations, actions and random numbers, which are kept in the state. So weights that
      did not change make the state that was there, if the episode is not longer than that.

    All random numbers come from the generator, but in ``torch.export``, where torch's own take its place.

    Args:
        network: what acts.
        spaces: of the environment.
        noise: the shape of the random numbers that one state is drawn with.
        widths: of what is drawn for a state, and of the belief.
        window: how many steps ``"recompute"`` keeps.
        on_adoption: what becomes of the state at an adoption; None: one version plays, and none is recorded.
        deterministic: take the likeliest action, without noise. The state of the model is drawn in any case.
    """

    keeps_last = True
    #: torch.rand or torch.randn: the random numbers that :meth:`seen` is given
    draws: Callable[..., Tensor]

    def __init__(
        self,
        network: ActingNetwork,
        spaces: Spaces,
        *,
        noise: tuple[int, ...],
        widths: tuple[int, int],
        window: int,
        on_adoption: str | None = None,
        deterministic: bool = False,
    ) -> None:
        if on_adoption is None:
            records = []
        else:
            records = [Record(ledger.STATE_VERSION, (), torch.int64)]
        super().__init__(
            {POLICY: network},
            spaces.player_actions(),
            spaces.observations,
            records=records,
        )
        self.head = head_for(self.actions)
        acting: Any = network.player.module
        self.parts: list[Any] = list(acting)  #: TorchRL's, in order
        #: of what the model makes in each step
        self.widths = dict(zip((STATE, BELIEF), widths, strict=True))
        self.deterministic = deterministic
        #: probabilities take the place of what is drawn by them; see :meth:`by_weights`
        self.soft = False
        self._on_adoption = on_adoption
        self._window = window
        self._noise = noise
        self._carried = self.widths | {PREVIOUS_ACTION: spaces.actions}

    @abstractmethod
    def seen(
        self, observation: Tensor, before: State, begins: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        """State and belief ``[N, *]``, from an observation and the step before.

        Of that step it takes state, belief and action, which are zeros where ``begins``, ``[N, 1]``.
        """

    @abstractmethod
    def chosen(self, state: Tensor, belief: Tensor, generator: Generator) -> Tensor:
        """The actions ``[N, actions]``, one-hot or numbers; if :attr:`deterministic` the likeliest ones."""

    def begin(
        self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1
    ) -> State:
        begun = {
            key: torch.zeros(num_envs, width, device="cpu") for key, width in self._carried.items()
        }
        if self._on_adoption is None:
            return begun
        none = torch.full((num_envs,), ledger.NO_VERSION, device="cpu")
        begun |= {ledger.STATE_VERSION: none, _VERSION: none.clone()}
        if self._on_adoption == "recompute":
            past = (num_envs, self._window)
            dtype = self.observation_dtype
            begun |= {
                _OBSERVED: torch.zeros(*past, *self.observation_shape, dtype=dtype, device="cpu"),
                _NOISE: torch.zeros(*past, *self._noise, device="cpu"),
                _ACTED: torch.zeros(*past, self._carried[PREVIOUS_ACTION], device="cpu"),
                _PLACE: torch.zeros(num_envs, dtype=torch.int64, device="cpu"),
                _STEPS: torch.zeros(num_envs, dtype=torch.int64, device="cpu"),
            }
        return begun

    def adopted(self, state: State, version: int) -> State:
        if self._on_adoption is None:
            return state
        made_by = state[ledger.STATE_VERSION]
        stale = (made_by != ledger.NO_VERSION) & (made_by != version)
        state = {**state, _VERSION: torch.full_like(made_by, version)}
        if self._on_adoption == "keep" or not bool(stale.any()):
            return state
        if self._on_adoption == "reset":
            return state | {ledger.STATE_VERSION: made_by.masked_fill(stale, ledger.NO_VERSION)}
        again = self._recomputed(state)
        for key in self._carried:
            state[key] = torch.where(stale.unsqueeze(-1), again[key], state[key])
        state[ledger.STATE_VERSION] = made_by.masked_fill(stale, version)
        return state

    def act(
        self,
        observation: Tensor,
        is_init: Tensor,
        reward: Tensor,
        state: State,
        generator: Generator,
    ) -> Acted:
        begins = is_init
        if self._on_adoption is not None:
            made_by = state[ledger.STATE_VERSION].masked_fill(is_init, ledger.NO_VERSION)
            begins = made_by == ledger.NO_VERSION

        # Not len(is_init): torch.export would take the number of environments for a constant.
        shape = (is_init.shape[0], *self._noise)
        if torch.compiler.is_exporting():
            noise = self.draws(shape, device=is_init.device)
        else:
            noise = self.draws(shape, device=is_init.device, generator=generator)
        latent, belief = self._seen(observation, state, begins, noise)
        action = self.chosen(latent, belief, generator)

        after = {STATE: latent, BELIEF: belief, PREVIOUS_ACTION: action}
        if isinstance(self.actions, BoxActions):
            choice = action
        else:
            choice = self.head.mode(action)
        if self._on_adoption is None:
            return Acted(choice, {}, after)
        after |= {ledger.STATE_VERSION: state[_VERSION], _VERSION: state[_VERSION]}
        if self._on_adoption == "recompute":
            after |= self._remembered(state, observation, noise, action, is_init)
        return Acted(choice, {ledger.STATE_VERSION: made_by}, after)

    def instead(self, acted: Acted, action: Tensor) -> Acted:
        """The model learns of the action that is done: it is the one that the next step begins with."""
        numbers = self.head.encode(action)
        state = acted.state | {PREVIOUS_ACTION: numbers}
        if self._on_adoption == "recompute":
            state[_ACTED][:, int(state[_PLACE][0]) - 1] = numbers
        return acted._replace(action=action, state=state)

    def by_weights(self) -> Player:
        """A player of the same modules that carries probabilities, and adopts nothing.

        They tell weights apart where choices often agree. Where no version made a state, an episode begins.
        """
        other = copy.copy(self)
        other._on_adoption = None
        other.deterministic = True
        other.soft = True
        return other

    def _seen(
        self, observation: Tensor, state: State, begins: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor]:
        begins = begins.unsqueeze(-1)
        before = {key: state[key].masked_fill(begins, 0.0) for key in self._carried}
        return self.seen(observation, before, begins, noise)

    def _remembered(
        self, state: State, observation: Tensor, noise: Tensor, action: Tensor, is_init: Tensor
    ) -> State:
        """The past with one more step. A state is passed back once, so it is written where it lies."""
        place = int(state[_PLACE][0])
        for key, value in ((_OBSERVED, observation), (_NOISE, noise), (_ACTED, action)):
            state[key][:, place] = value
        return {
            _OBSERVED: state[_OBSERVED],
            _NOISE: state[_NOISE],
            _ACTED: state[_ACTED],
            _PLACE: (state[_PLACE] + 1) % self._window,
            _STEPS: (state[_STEPS].masked_fill(is_init, 0) + 1).clamp_max(self._window),
        }

    def _recomputed(self, state: State) -> State:
        """What the next step begins with, as the present weights make it of the steps that are kept."""
        place = int(state[_PLACE][0])
        steps = state[_STEPS]
        again = {key: torch.zeros_like(state[key]) for key in self._carried}
        for back in range(int(steps.max()), 0, -1):
            at = (place - back) % self._window
            # Where an episode is shorter this makes what its first step does not read.
            latent, belief = self._seen(
                state[_OBSERVED][:, at], again, steps <= back, state[_NOISE][:, at]
            )
            again = {STATE: latent, BELIEF: belief, PREVIOUS_ACTION: state[_ACTED][:, at]}
        return again


def squashed(
    loc: Tensor, scale: Tensor | None, actions: BoxActions, generator: Generator
) -> Tensor:
    """What torchrl.modules.TanhNormal draws within the bounds, or without a scale its squashed mean."""
    low, high = bounds_of(actions, loc)
    if scale is not None:
        loc = loc + scale * torch.randn(loc.shape, generator=generator, device=loc.device)
    return (high + low) / 2 + (high - low) / 2 * safetanh_noeps(loc)


def bounds_of(actions: BoxActions, like: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value of each number in an action, ``[actions]``."""
    return like.new_tensor(actions.low), like.new_tensor(actions.high)
