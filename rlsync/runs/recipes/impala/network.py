"""The network of an IMPALA agent, policy and value from one torso, and the player that acts with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.envs.observations import Observations, like
from rlsync.runs.actors.player import Acted, Player, Record, State
from rlsync.runs.recipes.encoder import (
    HIDDEN,
    Encoder,
    Pixels,
    linear,
    make_torso,
    only_allowed,
    torso_for,
)
from rlsync.runs.recipes.impala.heads import PolicyHead
from rlsync.runs.recipes.impala.layers import EpisodicLSTM, split_pass
from rlsync.runs.recipes.normalize import Standardized
from rlsync.seams import POLICY

_NOTHING = nullcontext()


class Stepped(NamedTuple):
    """One step of N environments: policy ``params`` [N, P], ``value`` [N], ``state`` after the step."""

    params: Tensor
    value: Tensor
    state: Tensor


class Unrolled(NamedTuple):
    """An unroll: policy ``params`` [S, B, P], ``value`` [S, B], ``final_value`` [K] (None without finals)."""

    params: Tensor
    value: Tensor
    final_value: Tensor | None


class Finals(NamedTuple):
    """The observations that truncations hid: each followed step ``time`` of environment ``env``.

    Args:
        time, env: [K] int64.

    Example:
        >>> finals = Finals(torch.zeros(1, 4), time=torch.tensor([7]), env=torch.tensor([0]))
        >>> finals.last_action is None
        True
    """

    observation: Tensor  #: [K, ...]
    time: Tensor
    env: Tensor
    #: [K, ...], the action of that step; None for a network that does not take it.
    last_action: Tensor | None = None
    last_reward: Tensor | None = None  #: [K], its reward; None likewise


class ImpalaNet(nn.Module):
    """Policy and value from one torso, with or without an LSTM between.

    ``forward`` takes an unroll (the learner), ``step`` one observation of each environment (workers). A loop
    of steps gives the same as an unroll. Where an episode begins, the network zeroes state, last action and
    last reward itself: callers pass on what they have.

    Args:
        observation_shape: of one observation: [features], or [C, H, W] for pixels (uint8 means x / 255); or
            what its rows are made of. Their mask, if they have one, is applied to the policy's outputs.
        head: what the policy's outputs mean.
        torso: ``"mlp"``, ``"nature"`` or ``"impala"``, see :func:`make_torso`; ``"auto"`` is one that fits.
        hidden: widths of the torso's dense layers; by default (64, 64), (512,) or (256,) by torso.
        numbers: widths of the layers that numbers beside pictures go through.
        lstm: units of the LSTM; 0 for none.
        last_action, last_reward: whether these are inputs, after the torso; rewards are clipped to [-1, 1].
        channels_last: whether convolutions run channels-last.
        clip: where normalised observations are cut: each number loses its mean, and is divided by its
            deviation. Those of pixels are of all observations that :meth:`follow` saw; those of other numbers
            are written by whoever trains the network, as
            :class:`~rlsync.runs.recipes.normalize.NormalizeUnrolls` does. None: nothing is normalised.
        bfloat16: whether the torso runs under autocast; LSTM and heads keep the precision of their weights.
        torso_threads: threads that share the torso's passes over unrolls, forward and backward, on a CPU;
            ``step`` runs in one.

    Raises:
        ConfigError: torso, observation shape or a width do not fit.

    Source: IMPALA, arXiv 1802.01561, figure 3.

    Example:
        >>> from rlsync.runs.recipes.impala import Categorical
        >>> net = ImpalaNet((4,), Categorical(2), lstm=8)
        >>> is_init = torch.ones(3, dtype=torch.bool)
        >>> out = net.step(torch.zeros(3, 4), is_init, net.initial_state(3))
        >>> out.params.shape, out.value.shape, out.state.shape
        (torch.Size([3, 2]), torch.Size([3]), torch.Size([3, 2, 8]))
        >>> net(torch.zeros(21, 3, 4), is_init.expand(21, 3), net.initial_state(3)).value.shape
        torch.Size([21, 3])
    """

    def __init__(
        self,
        observation_shape: Sequence[int] | Observations,
        head: PolicyHead,
        *,
        torso: str = "mlp",
        hidden: Sequence[int] | None = None,
        numbers: Sequence[int] = HIDDEN["mlp"],
        lstm: int = 0,
        last_action: bool = False,
        last_reward: bool = False,
        channels_last: bool = False,
        clip: float | None = None,
        bfloat16: bool = False,
        torso_threads: int = 1,
    ) -> None:
        super().__init__()
        for name, number, least in (("lstm", lstm, 0), ("torso_threads", torso_threads, 1)):
            if number < least:
                raise ConfigError(
                    f"a network cannot have {name}={number}", name, f"give {least} or more"
                )
        if isinstance(observation_shape, Observations):
            self.observations = observation_shape
        else:
            self.observations = like(tuple(observation_shape))
        self.observation_shape = self.observations.shape
        self.head = head
        self.takes_last_action = last_action
        self.takes_last_reward = last_reward
        self.in_bfloat16 = bfloat16
        self.torso_threads = torso_threads
        self.pixels: Pixels | None = None
        features = self._make_torso(
            torso, hidden, numbers=numbers, channels_last=channels_last, clip=clip
        )

        # Between torso and outputs: the last action and reward, and an LSTM.
        features += last_action * head.features + last_reward
        self.lstm = None
        if lstm:
            self.lstm = EpisodicLSTM(features, lstm)
        self.policy = linear(lstm or features, head.width, gain=0.01)
        self.value = linear(lstm or features, 1, gain=1.0)

    def _make_torso(
        self,
        name: str,
        hidden: Sequence[int] | None,
        *,
        numbers: Sequence[int],
        channels_last: bool,
        clip: float | None,
    ) -> int:
        """Make what sees the observations; returns how many features it has."""
        observations = self.observations
        pictures = observations.pictures
        if name == "auto":
            name = torso_for(pictures[0].shape) if pictures else "mlp"
        widths = HIDDEN.get(name, ()) if hidden is None else tuple(hidden)
        if pictures and len(observations.parts) > 1:
            self.torso: nn.Module = Encoder(
                observations,
                torso=name,
                hidden=widths,
                numbers=numbers,
                channels_last=channels_last,
                clip=clip,
            )
            return self.torso.features

        before: list[nn.Module] = []
        shape = self.observation_shape
        if len(observations.parts) > 1:
            before = [Encoder(observations)]  # the numbers in a row, without a mask
            shape = (observations.features,)
        self.torso = make_torso(name, shape, widths)
        if name != "mlp":
            self.pixels = Pixels(shape, clip, channels_last)
        elif clip is not None:
            self.torso = nn.Sequential(*before, Standardized(self.torso, shape[0], clip))
        elif before:
            self.torso = nn.Sequential(*before, self.torso)
        return widths[-1]

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Shape of one environment's recurrent state: (2, units); (0,), no bytes, without an LSTM."""
        if self.lstm is None:
            return (0,)
        return (2, self.lstm.units)

    def initial_state(self, num_envs: int) -> Tensor:
        """The state before anything was seen: zeros ``[N, *state_shape]``.

        Args:
            num_envs: N.
        """
        return self.value.weight.new_zeros(num_envs, *self.state_shape)

    def player(
        self, *, store_params: bool = False, store_value: bool = False, deterministic: bool = False
    ) -> ImpalaPlayer:
        """What workers and evaluations act with: this network, not a copy.

        Args:
            store_params: record ``behaviour_params``, which a trust region reads.
            store_value: record the value.
            deterministic: take the likeliest action; otherwise draw one.
        """
        return ImpalaPlayer(
            self, store_params=store_params, store_value=store_value, deterministic=deterministic
        )

    def step(
        self,
        observation: Tensor,
        is_init: Tensor,
        state: Tensor | None = None,
        last_action: Tensor | None = None,
        last_reward: Tensor | None = None,
    ) -> Stepped:
        """One step of N environments, for acting: no gradient flows through the state.

        Args:
            observation: ``[N, *observation_shape]``.
            is_init: [N] bool, whether this is the first observation of an episode.
            state: ``[N, *state_shape]``, what the step before returned; not needed without an LSTM.
            last_action: [N, ...], the action that led here, where the network takes it.
            last_reward: [N], and its reward.

        Raises:
            ConfigError: the network takes a last action or reward, and none is given.
        """
        params, value, after = self.lean_step(observation, is_init, state, last_action, last_reward)
        if after is None:
            after = self.initial_state(observation.shape[0])
        return Stepped(params, value, after)

    def lean_step(
        self,
        observation: Tensor,
        is_init: Tensor,
        state: Tensor | None,
        last_action: Tensor | None,
        last_reward: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As :meth:`step`; what is given for the state of a network without an LSTM comes back as it is.

        Args:
            observation: ``[N, *observation_shape]``.
            is_init: [N] bool.
            state: ``[N, *state_shape]``, or None.
            last_action: [N, ...], where the network takes it.
            last_reward: [N].
        """
        features = self._features(observation)
        # A context that changes nothing takes as long as a layer of few units.
        context: AbstractContextManager[object] = _NOTHING
        if torch.is_autocast_enabled(features.device.type):
            context = _no_autocast(features)
        with context:
            features = self._with_last(features, is_init, last_action, last_reward)
            if self.lstm is not None:
                if state is None:
                    before = self.initial_state(observation.shape[0])
                else:
                    before = state
                features, state = self.lstm.step(features, is_init, before)
            params = only_allowed(self.policy(features), self.observations, observation)
            return params, self.value(features).squeeze(-1), state

    def forward(
        self,
        observation: Tensor,
        is_init: Tensor,
        state: Tensor,
        last_action: Tensor | None = None,
        last_reward: Tensor | None = None,
        *,
        finals: Finals | None = None,
    ) -> Unrolled:
        """An unroll of S steps of B environments: one pass of the torso over S * B observations.

        Args:
            observation: ``[S, B, *observation_shape]``.
            is_init: [S, B] bool, whether this is the first observation of an episode.
            state: ``[B, *state_shape]``, before the first step.
            last_action: [S, B, ...], the action that led here, where the network takes it.
            last_reward: [S, B], and its reward.
            finals: K observations that truncations hid; valued in a second, small pass without gradient.

        Raises:
            ConfigError: the network takes a last action or reward, and none is given.
        """
        features = self._features(observation.flatten(0, 1)).unflatten(0, is_init.shape)
        states = None
        with _no_autocast(features):
            features = self._with_last(features, is_init, last_action, last_reward)
            if self.lstm is not None:
                features, states = self.lstm(features, is_init, state)
            params = only_allowed(self.policy(features), self.observations, observation)
            value = self.value(features).squeeze(-1)
        final_value = None
        if finals is not None:
            final_value = self._final_value(finals, states)
        return Unrolled(params, value, final_value)

    def follow(self, observation: Tensor) -> None:
        """Take unrolls into account, where pictures are normalised by what was seen.

        Args:
            observation: ``[S, B, *observation_shape]``.
        """
        if self.pixels is not None and self.pixels.normalizes:
            self.pixels.follow(observation)
        elif isinstance(self.torso, Encoder):
            self.torso.follow(observation)

    @torch.no_grad()
    def _final_value(self, finals: Finals, states: Tensor | None) -> Tensor:
        is_init = torch.zeros_like(finals.time, dtype=torch.bool)
        if states is None:
            state = self.initial_state(len(is_init))
        else:
            state = states[finals.time, finals.env]
        return self.step(
            finals.observation, is_init, state, finals.last_action, finals.last_reward
        ).value

    def _features(self, observation: Tensor) -> Tensor:
        """Features of observations; an unroll that is trained on is split between the threads."""
        if self.torso_threads == 1 or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self._features_here(observation)
        parameters = [p for p in self.torso.parameters() if p.requires_grad]
        return split_pass(self._features_here, parameters, observation, self.torso_threads)

    def _features_here(self, observation: Tensor) -> Tensor:
        if self.pixels is not None:
            observation = self.pixels(observation)
        dtype = self.value.weight.dtype
        # rows of several parts are taken apart by the torso
        if len(self.observations.parts) == 1 and observation.dtype != dtype:
            observation = observation.to(dtype)
        context: AbstractContextManager[object] = _NOTHING
        if self.in_bfloat16:
            context = torch.autocast(observation.device.type, torch.bfloat16)
        with context:
            features: Tensor = self.torso(observation)
        if features.dtype == dtype:
            return features
        return features.to(dtype)

    def _with_last(
        self,
        features: Tensor,
        is_init: Tensor,
        last_action: Tensor | None,
        last_reward: Tensor | None,
    ) -> Tensor:
        if not (self.takes_last_action or self.takes_last_reward):
            return features
        inputs = [features]
        begins = is_init.unsqueeze(-1)
        if self.takes_last_action:
            encoded = self.head.encode(_given(last_action, "action")).to(features.dtype)
            inputs.append(encoded.masked_fill(begins, 0.0))
        if self.takes_last_reward:
            clipped = _given(last_reward, "reward").to(features.dtype).clamp(-1.0, 1.0)
            inputs.append(clipped.unsqueeze(-1).masked_fill(begins, 0.0))
        return torch.cat(inputs, -1)


def _no_autocast(features: Tensor) -> torch.autocast:
    """Switches a caller's autocast off, too: bfloat16 logits are too coarse for a ratio of probabilities."""
    return torch.autocast(features.device.type, enabled=False)


def _given(tensor: Tensor | None, what: str) -> Tensor:
    if tensor is None:
        cure = f"pass last_{what}, or build the network with last_{what}=False"
        raise ConfigError(
            f"this network takes the last {what}, and none was given", f"last_{what}", cure
        )
    return tensor


class ImpalaPlayer(Player):
    """Acts with an :class:`ImpalaNet`: one step of the network for all environments, one draw of the actions.

    It records ``behaviour_log_prob``; where an unroll begins ``recurrent_state``, ``last_action`` and
    ``last_reward``, if the network takes them; and what the options say. Its destination is ``"policy"``.

    Args:
        network: what acts.
        store_params: record the policy's outputs as ``behaviour_params``, which a trust region reads.
        store_value: record the value as ``("collector", "value")``.
        deterministic: take the likeliest action; otherwise draw one.

    Example:
        >>> from rlsync.runs.recipes.impala import Categorical, ImpalaNet
        >>> player = ImpalaPlayer(ImpalaNet((4,), Categorical(2), lstm=8), deterministic=True)
        >>> [record.name for record in player.records]
        ['behaviour_log_prob', 'recurrent_state']
        >>> generator = torch.Generator().manual_seed(0)
        >>> state = player.begin(3, generator)
        >>> seen = torch.zeros(3, 4), torch.ones(3, dtype=torch.bool), torch.zeros(3)
        >>> player.act(*seen, state, generator).action.shape
        torch.Size([3])
    """

    def __init__(
        self,
        network: ImpalaNet,
        *,
        store_params: bool = False,
        store_value: bool = False,
        deterministic: bool = False,
    ) -> None:
        head = network.head
        records = [Record(keys.BEHAVIOUR_LOG_PROB, (), torch.float32)]
        if store_params:
            records.append(Record(keys.BEHAVIOUR_PARAMS, (head.width,), torch.float32))
        if store_value:
            records.append(Record(keys.VALUE, (), torch.float32, beside=True))
        if network.lstm is not None:
            records.append(
                Record(keys.RECURRENT_STATE, network.state_shape, torch.float32, "unroll")
            )
        if network.takes_last_action:
            records.append(Record(keys.LAST_ACTION, head.action_shape, head.action_dtype, "unroll"))
        if network.takes_last_reward:
            records.append(Record(keys.LAST_REWARD, (), torch.float32, "unroll"))
        super().__init__(
            {POLICY: network}, head.player_actions(), network.observations, records=records
        )
        self.network = network
        self._deterministic = deterministic

    def begin(
        self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1
    ) -> State:
        network = self.network
        head = self.network.head
        if network.lstm is None:
            state = {}
        else:
            state = {keys.RECURRENT_STATE: network.initial_state(num_envs)}
        if network.takes_last_action:
            shape = num_envs, *head.action_shape
            state[keys.LAST_ACTION] = torch.zeros(shape, dtype=head.action_dtype, device="cpu")
        return state

    def act(
        self,
        observation: Tensor,
        is_init: Tensor,
        reward: Tensor,
        state: State,
        generator: Generator,
    ) -> Acted:
        network = self.network
        head = self.network.head
        before = state.get(keys.RECURRENT_STATE)
        last_action = state.get(keys.LAST_ACTION)
        params, value, state_after = network.lean_step(
            observation, is_init, before, last_action, reward
        )
        if self._deterministic:
            action = head.mode(params)
            log_prob = head.score(params, action)[0]
        else:
            action, log_prob = head.act(params, generator)
        records = {
            keys.BEHAVIOUR_LOG_PROB: log_prob,
            keys.BEHAVIOUR_PARAMS: params,
            keys.VALUE: value,
        }
        after: State = {}
        if state_after is not None:
            after[keys.RECURRENT_STATE] = state_after
        if last_action is not None:
            after[keys.LAST_ACTION] = action
        return Acted(action, records, after)
