"""A run's policy as a module for other programs: it acts as the workers did, and knows its version."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from rlsync.evaluation.checkpoint import CheckpointPlayer, Trained
from rlsync.evaluation.process import digest_of_weights
from rlsync.workers import frames as keys
from rlsync.workers.devices import CPU
from rlsync.workers.envs.actions import ActionSpec, BoxActions
from rlsync.workers.player import State


class Policy(nn.Module):
    """Acts with one version of a run's weights. :func:`rlsync.load_policy` makes it.

    It takes observations as the run's environment gives them. What normalises them is a part of it. Atari
    games give stacks of pictures, and so must you. Actions are those that the environment is sent: the
    index of a choice, or numbers, within their bounds.

    A policy with a memory takes its ``state`` and returns it with the action. :attr:`has_state` says so.

    Example:
        >>> policy = rlsync.load_policy("runs/pong")  # doctest: +SKIP
        >>> state = None  # at the first step of an episode
        >>> action, state = policy(observation, state)  # doctest: +SKIP
    """

    low: Tensor
    high: Tensor

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
        self.player, self.trained, self.actions, self.greedy = acting.player, trained, actions, greedy
        self.network = acting.weights
        self.others = nn.ModuleList(m for m in self.player.modules.values() if m is not self.network)
        self.requires_grad_(False)
        #: The environments that it was trained in.
        self.env = acting.env
        self._origin = dict(origin or {})
        self._generator = torch.Generator()
        if isinstance(actions, BoxActions) and actions.low:
            for name, bound in (("low", actions.low), ("high", actions.high)):
                self.register_buffer(name, torch.tensor(bound), persistent=False)
        #: What it carries from step to step, by name: ``[N, ...]`` of N environments.
        self.memory = self.begin()
        #: Whether the reward of the step before is an input.
        self.takes_reward = any(record.name == keys.LAST_REWARD for record in self.player.records)

    @property
    def version(self) -> int:
        """The version that acts. ``trained.unpublished_steps`` optimizer steps may have followed it."""
        return self.trained.version

    @property
    def has_state(self) -> bool:
        """Whether it carries something from step to step."""
        return bool(self.memory) or self.takes_reward

    @property
    def device(self) -> torch.device:
        """Where it acts; move it with ``to``."""
        return next((leaf.device for leaf in (*self.parameters(), *self.buffers())), CPU)

    def digest(self) -> str:
        """BLAKE2b of the names, dtypes, shapes and bytes of its weights, 40 hexadecimal digits."""
        return digest_of_weights(self.weights())

    def weights(self) -> dict[str, Tensor]:
        """The tensors of the network, in host memory, by their names in its state dict."""
        held = self.network.state_dict().items()
        return {
            name: leaf.detach().cpu().clone().contiguous() for name, leaf in held if isinstance(leaf, Tensor)
        }

    def begin(self, num_envs: int = 1) -> State:
        """The state before the first step of N environments; empty without a memory."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices):  # TorchRL's policies are seeded here
            state = self.player.begin(num_envs, self._generator)
        return {name: value.to(self.device) for name, value in state.items()}

    @torch.no_grad()
    def forward(
        self,
        observation: Any,
        state: State | None = None,
        reward: Any = None,
        is_init: Any = None,
    ) -> Tensor | tuple[Tensor, State]:
        """Choose the next action, and with :attr:`has_state` also return the state after it.

        What is drawn comes from torch's random numbers: ``torch.manual_seed`` repeats it.

        Args:
            observation: ``[N, *obs]`` of N environments, or ``[*obs]``: a tensor, or what becomes one.
            state: what the step before returned; None at the first step of an episode.
            reward: [N], what the action before has brought; only with ``takes_reward``.
            is_init: [N] bool, in which environments an episode begins. None: with no state in all, else in
                none.
        """
        seen = torch.as_tensor(observation, dtype=self.player.observation_dtype, device=self.device)
        alone = seen.ndim == len(self.player.observation_shape)
        seen = seen.unsqueeze(0) if alone else seen
        count = len(seen)
        if is_init is None:
            is_init = torch.full((count,), state is None)
        if reward is None:
            reward = torch.zeros(count)
        begins = torch.as_tensor(is_init, device=self.device).reshape(count)
        brought = torch.as_tensor(reward, dtype=torch.float32, device=self.device).reshape(count)
        if not self.greedy:
            seed = int(torch.empty((), dtype=torch.int64).random_())
            self._generator = torch.Generator(self.device).manual_seed(seed)
        action, state = self.step(seen, begins, brought, self.begin(count) if state is None else state)
        action = action.squeeze(0) if alone else action
        return (action, state) if self.has_state else action

    def step(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """The same with tensors of N environments on its device alone; this is what is exported."""
        acted = self.player.act(observation, is_init, reward, state, self._generator)
        bounded = isinstance(self.actions, BoxActions) and self.actions.low
        action = acted.action.clamp(self.low, self.high) if bounded else acted.action
        return action, {name: acted.state[name] for name in state}

    def metadata(self) -> dict[str, str]:
        """What a file of it says of itself: version, digest, spaces, state, and the run's config."""
        shapes = {name: [str(value.dtype), *value.shape[1:]] for name, value in self.memory.items()}
        actions = {"kind": type(self.actions).__name__, **asdict(self.actions)}
        return {
            **self._origin,
            "version": str(self.version),
            "unpublished_steps": str(self.trained.unpublished_steps),
            "frames": str(self.trained.frames),
            "digest": self.digest(),
            "greedy": json.dumps(self.greedy),
            "observation": json.dumps([str(self.player.observation_dtype), *self.player.observation_shape]),
            "actions": json.dumps(actions),
            "state": json.dumps(shapes),
            "takes_reward": json.dumps(self.takes_reward),
        }
