"""A run's policy as a module for other programs: it acts as the workers did, and knows its version."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.envs.actions import ActionSpec
from rlsync.runs.actors.envs.observations import OutsideSpace
from rlsync.runs.actors.player import State
from rlsync.runs.evaluation.checkpoint import CheckpointPlayer, Trained
from rlsync.runs.evaluation.process import digest_of_weights


class Policy(nn.Module):
    """Acts with one version of a run's weights. :func:`rlsync.load_policy` makes it.

    It takes observations as the run's environment gives them, those of Atari games stacked, pictures with
    their channels first, and normalises them itself. Those of several parts it takes by the environment's
    keys, or as rows (:mod:`rlsync.runs.actors.envs.observations`); a file of it takes their parts by name.
    Actions are members of the environment's space: one of the numbers that it calls its choices, or numbers
    within their bounds, in its dtype.

    A policy with a :attr:`memory` takes a state, and returns the next one with the action. In the state are
    ``is_init`` (where an episode begins), ``reward`` if the network reads the last one, and what the player
    carries. It says of the next step that no episode begins and nothing was earned: write there what did.
    """

    _place: Tensor

    def __init__(
        self,
        acting: CheckpointPlayer,
        trained: Trained,
        actions: ActionSpec,
        *,
        greedy: bool = True,
        origin: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.player = acting.player
        self.trained = trained
        self.actions = actions
        self.greedy = greedy
        self.env = acting.env  #: in which it was trained
        self.network = acting.weights
        others = [part for part in self.player.modules.values() if part is not self.network]
        self.others = nn.ModuleList(others)
        self.requires_grad_(False)
        self._origin = dict(origin or {})
        # it moves with the weights
        self.register_buffer("_place", torch.empty(0), persistent=False)
        #: The state of one environment before its first step; empty if it needs none.
        self.memory = self.begin()

    @property
    def version(self) -> int:
        """The version that acts. ``trained.unpublished_steps`` optimizer steps may have followed it."""
        return self.trained.version

    @property
    def takes_parts(self) -> bool:
        """Whether a file of it takes an observation as its parts by name: it has several."""
        return len(self.player.observations.parts) > 1

    @property
    def device(self) -> torch.device:
        """Where it acts; move it with ``to``."""
        return self._place.device

    def weights(self) -> dict[str, Tensor]:
        """The tensors of the network, in host memory, by their names in its state dict."""
        weights = {}
        for name, leaf in self.network.state_dict().items():
            if isinstance(leaf, Tensor):
                weights[name] = leaf.detach().cpu().clone().contiguous()
        return weights

    def digest(self) -> str:
        """BLAKE2b of the names, dtypes, shapes and bytes of its weights, 40 hexadecimal digits."""
        return digest_of_weights(self.weights())

    def begin(self, num_envs: int = 1) -> State:
        """The state before the first step of N environments."""
        devices = []
        if self.device.type == "cuda":
            devices = [self.device]
        with torch.random.fork_rng(devices):
            # which seeds torch for TorchRL's policies
            state = self.player.begin(num_envs, torch.Generator())
        if any(record.name == keys.LAST_REWARD for record in self.player.records):
            state[keys.REWARD] = torch.zeros(num_envs, device="cpu")
        if state:
            state[keys.IS_INIT] = torch.ones(num_envs, dtype=torch.bool, device="cpu")
        return {name: value.to(self.device) for name, value in state.items()}

    @torch.no_grad()
    def forward(
        self, observation: Any, state: State | None = None
    ) -> Tensor | tuple[Tensor, State]:
        """Choose the next action of N environments. What is drawn comes from torch's random numbers.

        Args:
            observation: what becomes ``[N, *obs]``, or ``[*obs]`` of one environment; or what one environment,
                or N of them, give by the keys of their space; else ConfigError.
            state: ``[N, ...]`` by name; None where all episodes begin.
        """
        batch, alone = self._batch(observation)
        action, after = self.act(batch, batch.shape[0], state)
        if alone:
            action = action.squeeze(0)
        if not self.memory:
            return action
        return action, after

    def act(
        self, observation: Any, num_envs: int, state: State | None = None
    ) -> tuple[Tensor, State]:
        """The next action of N environments, and the state after it, which is empty without a memory.

        Args:
            observation: rows ``[N, *obs]``, or their parts by name, ``[N, *part]``.
            num_envs: N.
            state: ``[N, ...]`` by name; None where all episodes begin.
        """
        if state is None:
            state = {}
            if self.memory:
                state = self.begin(num_envs)
        place = self._place
        is_init = state.get(keys.IS_INIT, place.new_ones((num_envs,), dtype=torch.bool))
        reward = state.get(keys.REWARD, place.new_zeros((num_envs,)))

        # The player's part of the state, and the two that the caller may write: no end, no reward.
        ours = {keys.IS_INIT: torch.zeros_like(is_init), keys.REWARD: torch.zeros_like(reward)}
        carried = {name: value for name, value in state.items() if name not in ours}
        acted = self.player.act(observation, is_init, reward, carried, self._generator())
        after = acted.state | ours
        return self.actions.sent(acted.action), {name: after[name] for name in self.memory}

    def _batch(self, observation: Any) -> tuple[Tensor, bool]:
        """Observations ``[N, *obs]``, and whether one environment's stood alone; else ConfigError."""
        if isinstance(observation, Mapping | tuple):
            return self._nested(observation)
        shape = self.player.observation_shape
        dtype = self.player.observation_dtype
        batch = torch.as_tensor(observation, dtype=dtype, device=self.device)
        alone = batch.ndim == len(shape)
        rows = batch
        if alone:
            rows = batch.unsqueeze(0)
        if rows.shape[1:] != shape:
            problem = (
                f"an observation is of shape {[*shape]}, or [N] and these; got {[*batch.shape]}"
            )
            cure = "give it as the environment does, and a picture with its channels first"
            raise ConfigError(problem, "policy(observation)", cure)
        return rows, alone

    def _nested(self, answer: Any) -> tuple[Tensor, bool]:
        """As :meth:`_batch`, of what one environment gives by the keys of its space, or several of them."""
        observations = self.player.observations
        try:
            lead = observations.lead_of(answer)
            rows = torch.from_numpy(observations.row(answer, lead)).to(self.device)
        except OutsideSpace as error:
            cure = "give it as the environment does"
            problem = f"an observation is outside its space: {error}"
            raise ConfigError(problem, "policy(observation)", cure) from None
        if lead:
            return rows, False
        return rows.unsqueeze(0), True

    def _generator(self) -> torch.Generator:
        """Of all that is drawn, also by a greedy player, such as a model's state."""
        if self.device.type == "cpu":
            return torch.default_generator
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        return torch.Generator(self.device).manual_seed(seed)

    def metadata(self) -> dict[str, str]:
        """What a file of it says of itself: version, digest, spaces, state, and the run's config."""
        state = {}
        for name, value in self.memory.items():
            state[name] = [str(value.dtype), *value.shape[1:]]
        actions = {"kind": type(self.actions).__name__, **asdict(self.actions)}
        for name in actions.keys() & {"low", "high"}:
            actions[name] = list(map(_finite, actions[name]))
        trained = asdict(self.trained)
        return {
            **self._origin,
            **dict(zip(trained, map(str, trained.values()), strict=True)),
            "digest": self.digest(),
            "greedy": json.dumps(self.greedy),
            "observation": json.dumps(self._inputs()),
            "actions": json.dumps(actions),
            "state": json.dumps(state),
        }

    def _inputs(self) -> list[Any] | dict[str, list[Any]]:
        """Dtype and shape of what a file of it takes: observations, or each of their parts by name."""
        player = self.player
        if not self.takes_parts:
            return [str(player.observation_dtype), *player.observation_shape]
        inputs = {}
        for part in player.observations.parts:
            inputs[part.name] = [str(part.dtype), *part.shape]
        return inputs


def _finite(bound: float) -> float | None:
    """JSON has no infinity."""
    if math.isfinite(bound):
        return bound
    return None
