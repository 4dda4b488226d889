"""One rollout: environments and player in turn, straight into a slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.workers import frames as keys
from rlsync.workers.envs.base import Envs
from rlsync.workers.player import Acted, Player, State
from rlsync.workers.seat import Seat
from rlsync.workers.slot import Slot
from rlsync.workers.unrolls import EPISODE_LENGTH, EPISODE_RETURN, FINAL_COUNT, RolloutShape


class Group:
    """Environments that step together, and what is known of them between steps.

    Args:
        envs: the environments.
        seat: who acts in them; all groups of a worker draw from its random numbers.
        number: of this group.
        first: its first column in a slot.
    """

    def __init__(self, envs: Envs, seat: Seat, number: int, first: int) -> None:
        self.envs = envs
        self.columns = range(first, first + envs.num_envs)
        self._seat = seat
        self._number = number
        self._recorded = tuple(record.name for record in seat.player.records if record.per == "step")
        self._checked = False
        count = envs.num_envs
        self._observation = torch.empty(count, *envs.observation_shape, dtype=envs.observation_dtype)
        self._is_init = torch.ones(count, dtype=torch.bool)
        self._state: State = {}
        self._reward = torch.zeros(count)
        self._returns = torch.zeros(count, dtype=torch.float64)
        self._lengths = torch.zeros(count, dtype=torch.int64)

    def reset(self, seed: int) -> None:
        """Begin an episode in every environment.

        Args:
            seed: of the environment in column 0.
        """
        self._observation.copy_(self.envs.reset(seed + self.columns.start))
        self._is_init.fill_(True)
        self._state = self._seat.begin(self.envs.num_envs)
        self._reward = torch.zeros_like(self._reward)
        for sums in (self._returns, self._lengths):
            sums.zero_()

    def begin(self, slot: Slot) -> None:
        """Write what is known before the first step of a rollout.

        Args:
            slot: to write to, until :meth:`end`.
        """
        self._slot, self._rows = slot, slot.timed[self._number]
        self._rows[keys.OBSERVATION][0].copy_(self._observation)
        self._rows[keys.IS_INIT][0].copy_(self._is_init)
        before = {**self._state, keys.LAST_REWARD: self._reward}
        once = slot.per_unroll[self._number]
        self._require("begin's state", {name: view.shape for name, view in once.items()}, before)
        for name, view in once.items():
            view.copy_(before[name])

    def act(self, step: int) -> None:
        """Choose the actions of a step, and let the environments begin it."""
        rows = self._rows
        acted = self._seat.act(
            rows[keys.OBSERVATION][step], rows[keys.IS_INIT][step], self._reward, self._state
        )
        if not self._checked:
            self._check_records(acted)
        self.envs.send(acted.action)
        self._state = acted.state
        rows[keys.ACTION][step].copy_(acted.action)
        for name in self._recorded:
            rows[name][step].copy_(acted.records[name])

    def _check_records(self, acted: Acted) -> None:
        wanted = {name: self._rows[name][0].shape for name in (keys.ACTION, *self._recorded)}
        self._require("act", wanted, {keys.ACTION: acted.action, **acted.records})
        self._checked = True

    def _require(self, where: str, wanted: Mapping[str, torch.Size], given: Mapping[str, Tensor]) -> None:
        """Refuse what is missing, and what copy_() would broadcast."""
        for name, shape in wanted.items():
            if name not in given or given[name].shape != shape:
                has = f"is {list(given[name].shape)}" if name in given else "is missing"
                raise ConfigError(
                    f"{name!r} {has}; {list(shape)} is declared",
                    f"{type(self._seat.player).__name__}, {where}",
                    "give one entry for each environment, in the shape that actions and records declare",
                )

    def finish(self, step: int) -> None:
        """Wait for the environments, and write what came of a step."""
        rows, answer = self._rows, self.envs.recv()
        rows[keys.OBSERVATION][step + 1].copy_(answer.observation)
        self._reward = rows[keys.REWARD][step].copy_(answer.reward)
        rows[keys.TERMINATED][step].copy_(answer.terminated)
        rows[keys.TRUNCATED][step].copy_(answer.truncated)
        ended = torch.logical_or(answer.terminated, answer.truncated, out=rows[keys.IS_INIT][step + 1])
        for env, observation in answer.finals:
            self._slot.add_final(step, self.columns[env], observation)
        self._returns += answer.reward
        self._lengths += 1
        if ended.any():  # a game ends with an episode, but not every episode with a game
            over = answer.over
            goes_on = ~over
            rows[EPISODE_RETURN][step].copy_(self._returns.masked_fill(goes_on, 0.0))
            rows[EPISODE_LENGTH][step].copy_(self._lengths.masked_fill(goes_on, 0))
            self._returns.masked_fill_(over, 0.0)
            self._lengths.masked_fill_(over, 0)

    def end(self) -> None:
        """Copy what the next rollout begins with; after this the slot is the learner's."""
        self._observation.copy_(self._rows[keys.OBSERVATION][-1])
        self._is_init.copy_(self._rows[keys.IS_INIT][-1])
        self._reward = self._reward.clone()


class Roller:
    """Makes rollouts with one group of environments, or two: one steps while the player acts in the other.

    Args:
        groups: the groups.
        player: what acts in them.
        steps: T of a rollout.
    """

    def __init__(self, groups: Sequence[Group], player: Player, steps: int) -> None:
        self._groups = groups
        self._player = player
        self._steps = steps
        self._slots: dict[int, Slot] = {}

    @torch.inference_mode()
    def reset(self, seed: int) -> None:
        """Begin an episode in every environment.

        Args:
            seed: of the first environment.
        """
        for group in self._groups:
            group.reset(seed)

    @torch.inference_mode()
    def roll(self, number: int, views: Mapping[str, Tensor], version: int, stop: Callable[[], bool]) -> bool:
        """Fill a slot.

        Args:
            number: of the slot.
            views: its arrays.
            version: the version that acts.
            stop: asked at every step; True breaks the rollout off.

        Returns:
            Whether the rollout is complete.
        """
        if number not in self._slots:
            self._slots[number] = Slot.cut(views, [group.columns for group in self._groups], self._player)
        slot, groups = self._slots[number], self._groups
        views[FINAL_COUNT].zero_()
        views[EPISODE_RETURN].zero_()
        views[EPISODE_LENGTH].zero_()
        views[keys.POLICY_VERSION].fill_(version)
        for group in groups:
            group.begin(slot)
            group.act(0)
        for step in range(1, self._steps):
            if stop():
                return False
            for group in groups:
                group.finish(step - 1)
                group.act(step)
        for group in groups:
            group.finish(self._steps - 1)
            group.end()
        return True

    def close(self) -> None:
        """Close the environments."""
        for group in self._groups:
            group.envs.close()


def make_roller(
    seat: Seat, make_envs: Callable[[int], Envs], shape: RolloutShape, *, overlap: bool
) -> Roller:
    """The groups of environments of one worker, and the player that acts in them.

    Args:
        seat: who acts.
        make_envs: makes so many environments as one vector.
        shape: of a rollout.
        overlap: whether the environments are two groups.
    """
    count = shape.num_envs
    sizes = [count // 2, count - count // 2] if overlap else [count]
    groups = [Group(make_envs(size), seat, number, sum(sizes[:number])) for number, size in enumerate(sizes)]
    return Roller(groups, seat.player, shape.steps)
