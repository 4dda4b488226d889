"""The player: what a worker acts with. Algorithms bring their own; workers know only this protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from rlsync import ConfigError
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.actions import ActionSpec
from rlsync.runs.actors.envs.observations import Observations, like
from rlsync.runs.actors.envs.vectors import Envs
from rlsync.seams import acts, sendable, target

_ROWS = 4  #: environments of a call that looks whether a player's parameters act

State = dict[str, Tensor]  #: what a player remembers of N environments: tensors [N, ...] by name


@dataclass(frozen=True, slots=True)
class Record:
    """One array that a player adds to the frames.

    Example:
        >>> Record("behaviour_log_prob", (), torch.float32).per
        'step'
    """

    name: str  #: its key in the batch
    shape: tuple[int, ...]  #: of one environment's entry, without time and environments
    dtype: torch.dtype  #: how it is stored
    #: ``"step"``: :meth:`Player.act` returns it at every step. ``"unroll"``: it is the entry ``name`` of the
    #: state before the unroll's first step. The worker itself knows ``last_reward``: it is not taken from the
    #: state.
    per: Literal["step", "unroll"] = "step"
    #: True stores it under ``"collector"`` in the batch: something to look at, which no loss reads and no
    #: replay keeps.
    beside: bool = False


class Acted(NamedTuple):
    """What a player did in one step of N environments."""

    action: Tensor  #: ``[N, *action]``, in the form of :attr:`Player.actions`
    records: Mapping[str, Tensor]  #: [N, ...] for each record per step, by its name
    state: State  #: what to pass to the next :meth:`Player.act`


class Player(ABC):
    """Chooses actions in N environments, step after step. The learner makes one; each worker gets a copy.

    The laws that players and workers keep:

    - **Weights.** All tensors that a publish changes are in :attr:`modules`. A publish brings all modules as
      one version, and a worker adopts it between two rollouts: one version makes all steps of a rollout. A
      worker's copy arrives without memory (parameters and buffers on the meta device); the worker allocates
      it and adopts. So a player must be picklable, hold no tensor outside its modules and read weights from
      the modules at every call: parameters are re-pointed at shared, read-only memory.
    - **Memory between steps** is in the state alone, not in the player: one player may act in several groups
      of environments in turn. The worker passes each state back once. The player may reuse its tensors.
    - **Episodes.** Where ``is_init`` is true, nothing that the state or the reward say of earlier steps may
      influence the action.
    - **Arguments** of :meth:`act` are the worker's memory, valid until it returns: read them, do not write to
      them, keep no reference. What :meth:`act` returns is not written to by the worker.
    - **Device.** The modules, the state, the arguments of :meth:`act` and the generator are on one device.
      The state that :meth:`begin` returns is moved there; the state that :meth:`act` returns must be there.
    - **Randomness** comes from the generator that is passed in: the same seed, weights and observations give
      the same actions.
    - **Calls** come from one thread, under ``torch.inference_mode()``.

    What a player acts with, and what it stores, is given to this constructor, or stands in the subclass, as
    attributes or as properties.

    Example:
        >>> from rlsync.runs.actors.envs.actions import DiscreteActions
        >>> from rlsync.runs.actors.players.uniform import UniformPlayer
        >>> player: Player = UniformPlayer(DiscreteActions(3), observation_shape=(4,))
        >>> generator = torch.Generator().manual_seed(0)
        >>> state = player.begin(5, generator)
        >>> is_init, reward = torch.ones(5, dtype=torch.bool), torch.zeros(5)
        >>> player.act(torch.zeros(5, 4), is_init, reward, state, generator).action.shape
        torch.Size([5])
    """

    #: The modules that act, by destination. Empty for a player without weights: nothing is published, and its
    #: frames carry version 0.
    modules: Mapping[str, nn.Module]
    actions: ActionSpec  #: what actions it chooses; bounds are not looked at
    observation_shape: tuple[int, ...]  #: of one observation
    observation_dtype: torch.dtype  #: in which observations are stored, and passed to :meth:`act`
    #: What is stored besides observations, actions, rewards, ends and versions.
    records: Sequence[Record] = ()
    #: Whether the last observation of an episode that terminates is stored, too: what learns a model of the
    #: environment reads it. That of a truncated one is stored in any case.
    keeps_last: bool = False
    _observations: Observations | None = None

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        actions: ActionSpec,
        observation_shape: Sequence[int] | Observations,
        observation_dtype: torch.dtype = torch.float32,
        records: Sequence[Record] = (),
    ) -> None:
        self.modules = dict(modules)
        self.actions = actions
        self.records = tuple(records)
        if isinstance(observation_shape, Observations):
            self._observations = observation_shape
            self.observation_shape = observation_shape.shape
            self.observation_dtype = observation_shape.dtype
        else:
            self.observation_shape = tuple(observation_shape)
            self.observation_dtype = observation_dtype

    @property
    def observations(self) -> Observations:
        """What a row of an observation is made of; by default one vector or one picture."""
        return self._observations or like(self.observation_shape, self.observation_dtype)

    def allowed(self, observation: Tensor) -> Tensor | None:
        """Which choices an action may be, ``[N, n]`` bool; None where observations have no mask.

        Args:
            observation: ``[N, *obs]``.
        """
        if self._observations is None:
            return None
        return self._observations.allowed(observation)

    @abstractmethod
    def begin(
        self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1
    ) -> State:
        """The state before the first step of N environments, which were just reset.

        Args:
            num_envs: N.
            generator: seeded for this worker.
            worker: the number of the worker, from 0.
            num_workers: how many there are. An evaluation is worker 0 of 1.
        """

    @abstractmethod
    def act(
        self,
        observation: Tensor,
        is_init: Tensor,
        reward: Tensor,
        state: State,
        generator: Generator,
    ) -> Acted:
        """Choose the next action of every environment.

        Args:
            observation: ``[N, *obs]``; to prove behaviour with large ones, N is less than in :meth:`begin`.
            is_init: [N] bool, whether it is the first observation of an episode.
            reward: [N], what the action before has brought; 0 before the first one.
            state: what :meth:`begin` or the last call returned.
            generator: the source of all random numbers.
        """

    def adopted(self, state: State, version: int) -> State:
        """What a state becomes when a rollout begins with a version; by default it stays as it is.

        A worker calls it before the first step of every rollout, after it has adopted, also where the version
        is the one before: once for each group of its environments. It may act with the modules, which have
        the weights of this version. Evaluations play one version, and do not call it.

        Args:
            state: what :meth:`begin` or the last call of :meth:`act` returned.
            version: the version that makes the rollout.
        """
        return state

    def instead(self, acted: Acted, action: Tensor) -> Acted:
        """What a step becomes if somebody else chooses the action, such as a random one.

        Args:
            acted: what :meth:`act` has just returned.
            action: ``[N, *action]``, what is done in place of its action.
        """
        return acted._replace(action=action)

    def by_weights(self) -> Player:
        """What chooses by its weights: this player, or the one in it, if something else may decide."""
        return self


@runtime_checkable
class Playable(Protocol):
    """A network that knows its player, such as ``rlsync.runs.recipes.impala.ImpalaNet``."""

    def player(self, *, deterministic: bool = False) -> Player:
        """A player that acts with this network."""


def player_of(acting: Player | Playable) -> Player:
    if isinstance(acting, Player):
        return acting
    return acting.player()


def in_dtype(player: Player, dtype: torch.dtype | None) -> Player:
    """A copy of a player, with its own memory, its floating weights in this dtype; ``None`` keeps theirs."""
    clone = sendable.copied(player, "the player", player.modules, type(player).__name__)
    if dtype is not None:
        for module in clone.modules.values():
            module.to(dtype=dtype)
    return clone


def without_memory(player: Player) -> Player:
    """A copy of a player whose modules are on the meta device: small to pickle. See :func:`materialised`."""
    blank = sendable.copied(player, "the player", player.modules, type(player).__name__)
    for module in blank.modules.values():
        target.forget_memory(module)
    return blank


def check_player(player: Player, start_method: str, where: str) -> None:
    """Refuse (ConfigError) a player that cannot be sent to worker processes."""
    sendable.check_sendable(
        player,
        "the player",
        player.modules,
        where=where,
        start_method=start_method,
        way_out="give start_method='fork'",
    )


def materialised(player: Player, device: torch.device = CPU) -> Player:
    """Give this player's modules memory, with arbitrary values, and let them need no gradient."""
    for module in player.modules.values():
        target.materialise(module.requires_grad_(False))
        module.to(device)
    return player


def player_call(player: Player, device: torch.device) -> acts.Call:
    """What calls a player on an input of its own, with the same random numbers each time."""
    player = player.by_weights()

    def call(plain: bool) -> list[Tensor]:
        generator = torch.Generator(device).manual_seed(0)
        observation = _example(player, plain=plain).to(device)
        reward = torch.zeros(_ROWS, device=device)
        state = {name: value.to(device) for name, value in player.begin(_ROWS, generator).items()}
        if not plain:
            reward = acts.mid_episode(reward, 1)
            state = {
                name: acts.mid_episode(state[name], number) for number, name in enumerate(state, 2)
            }
        is_init = torch.full((_ROWS,), plain, device=device)
        acted = player.act(observation, is_init, reward, state, generator)
        return [acted.action, *acted.records.values(), *acted.state.values()]

    return call


def _example(player: Player, *, plain: bool) -> Tensor:
    """Observations ``[_ROWS, *shape]`` that allow every action: zeros, or numbers of all sizes."""
    observations = player.observations
    if observations.dtype != player.observation_dtype:  # a player of somebody else's, for one array
        shape = (_ROWS, *player.observation_shape)
        zeros = torch.zeros(shape, dtype=player.observation_dtype, device="cpu")
        return zeros if plain else acts.mid_episode(zeros)
    parts = {}
    for number, part in enumerate(observations.parts):
        zeros = torch.zeros((_ROWS, *part.shape), dtype=part.dtype, device="cpu")
        if part.kind == "mask":
            parts[part.name] = torch.ones_like(zeros)
        elif plain:
            parts[part.name] = zeros
        else:
            parts[part.name] = acts.mid_episode(zeros, number)
    return observations.join(parts)


def check_fits(player: Player, envs: Envs, where: str) -> None:
    """Refuse a player whose observations or actions are not those of the environments, named by ``where``."""
    takes = f"{list(player.observation_shape)} of {player.observation_dtype}"
    gives = f"{list(envs.observation_shape)} of {envs.observation_dtype}"
    if takes != gives:
        problem = f"the player takes observations {takes}, the environment gives {gives}"
        raise ConfigError(
            problem, where, "build the network with the observation shape of the environment"
        )
    if player.actions != envs.actions:
        problem = f"the player chooses from {player.actions}, the environment takes {envs.actions}"
        raise ConfigError(problem, where, "build the network with the actions of the environment")


@dataclass(frozen=True, slots=True)
class Seat:
    """A player on its device, for callers in host memory: only actions come back. A CPU copies nothing."""

    player: Player
    generator: Generator
    device: torch.device = CPU
    worker: int = 0  # an evaluation is worker 0 of 1
    num_workers: int = 1

    @classmethod
    def taken(
        cls,
        player: Player,
        seed: int,
        device: torch.device = CPU,
        worker: int = 0,
        num_workers: int = 1,
    ) -> Seat:
        """Move a player's modules to a device, and give it random numbers there."""
        for module in player.modules.values():
            module.to(device)
        return cls(player, torch.Generator(device).manual_seed(seed), device, worker, num_workers)

    def begin(self, num_envs: int) -> State:
        state = self.player.begin(num_envs, self.generator, self.worker, self.num_workers)
        return {name: tensor.to(self.device) for name, tensor in state.items()}

    def act(self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State) -> Acted:
        device = self.device
        acted = self.player.act(
            observation.to(device), is_init.to(device), reward.to(device), state, self.generator
        )
        if acted.action.is_cpu:
            return acted
        return acted._replace(action=acted.action.cpu())
