"""One rollout: environments and player in turn, straight into a slot of the ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.workers import frames as keys
from rlsync.workers.envs.base import Envs
from rlsync.workers.frames import RolloutShape
from rlsync.workers.player import Acted, Player, Seat, State

#: The arrays of a slot, by name.
Views = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Rows:
    """A group's columns of a slot, cut once into one view for each step: a step itself cuts nothing.

    ``records`` has what the player records at every step, ``once`` what it records where an unroll begins.
    """

    observation: Sequence[Tensor]
    is_init: Sequence[Tensor]
    action: Sequence[Tensor]
    reward: Sequence[Tensor]
    terminated: Sequence[Tensor]
    truncated: Sequence[Tensor]
    episode_return: Sequence[Tensor]
    episode_length: Sequence[Tensor]
    records: Mapping[str, Sequence[Tensor]]
    once: Mapping[str, Tensor]

    @classmethod
    def cut(cls, slot: Views, columns: range, player: Player) -> Rows:
        part = slice(columns.start, columns.stop)

        def steps(name: str) -> Sequence[Tensor]:
            return slot[name][:, part].unbind(0)

        return cls(
            observation=steps(keys.OBSERVATION),
            is_init=steps(keys.IS_INIT),
            action=steps(keys.ACTION),
            reward=steps(keys.REWARD),
            terminated=steps(keys.TERMINATED),
            truncated=steps(keys.TRUNCATED),
            episode_return=steps(keys.EPISODE_RETURN),
            episode_length=steps(keys.EPISODE_LENGTH),
            records={r.name: steps(r.name) for r in player.records if r.per == "step"},
            once={
                record.name: slot[record.name][part] for record in player.records if record.per == "unroll"
            },
        )


def add_final(slot: Views, step: int, column: int, observation: Tensor) -> None:
    """Keep the last observation of the episode that was truncated at this step, in this column."""
    count = int(slot[keys.FINAL_COUNT])
    slot[keys.FINAL_OBSERVATION][count].copy_(observation)
    slot[keys.FINAL_INDEX][count].copy_(torch.tensor([step, column]))
    slot[keys.FINAL_COUNT].fill_(count + 1)


class Group:
    """Environments that step together, and what is known of them between steps.

    ``first`` is its first column in a slot. All groups of a worker draw from the seat's random numbers.
    """

    def __init__(self, envs: Envs, seat: Seat, first: int) -> None:
        self.envs = envs
        self.columns = range(first, first + envs.num_envs)
        self._seat = seat
        self._checked = False
        count = envs.num_envs
        self._observation = torch.empty(count, *envs.observation_shape, dtype=envs.observation_dtype)
        self._is_init = torch.ones(count, dtype=torch.bool)
        self._state: State = {}
        self._reward = torch.zeros(count)
        self._returns = torch.zeros(count, dtype=torch.float64)
        self._lengths = torch.zeros(count, dtype=torch.int64)

    def reset(self, seed: int) -> None:
        """Begin an episode in every environment; ``seed`` is that of the environment in column 0."""
        self._observation.copy_(self.envs.reset(seed + self.columns.start))
        self._is_init.fill_(True)
        self._state = self._seat.begin(self.envs.num_envs)
        self._reward = torch.zeros_like(self._reward)
        for sums in (self._returns, self._lengths):
            sums.zero_()

    def begin(self, slot: Views, rows: Rows) -> None:
        """Write what is known before a rollout's first step. The slot is written to until :meth:`end`."""
        self._slot, self._rows = slot, rows
        rows.observation[0].copy_(self._observation)
        rows.is_init[0].copy_(self._is_init)
        before = {**self._state, keys.LAST_REWARD: self._reward}
        self._require("begin's state", {name: view.shape for name, view in rows.once.items()}, before)
        for name, view in rows.once.items():
            view.copy_(before[name])

    def act(self, step: int) -> None:
        """Choose the actions of a step, and let the environments begin it."""
        rows = self._rows
        acted = self._seat.act(rows.observation[step], rows.is_init[step], self._reward, self._state)
        if not self._checked:
            self._check_records(acted)
        self.envs.send(acted.action)
        self._state = acted.state
        rows.action[step].copy_(acted.action)
        for name, steps in rows.records.items():
            steps[step].copy_(acted.records[name])

    def _check_records(self, acted: Acted) -> None:
        wanted = {name: steps[0].shape for name, steps in self._rows.records.items()}
        wanted = {keys.ACTION: self._rows.action[0].shape, **wanted}
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

    def act_once_more(self, step: int) -> None:
        """Call the player on copies of what a step is chosen by, with random numbers of its own."""
        seat = replace(self._seat, generator=torch.Generator(self._seat.device).manual_seed(0))
        state = {name: value.clone() for name, value in self._state.items()}
        rows = self._rows
        seat.act(rows.observation[step].clone(), rows.is_init[step].clone(), self._reward.clone(), state)

    def finish(self, step: int) -> None:
        """Wait for the environments, and write what came of a step."""
        rows, answer = self._rows, self.envs.recv()
        rows.observation[step + 1].copy_(answer.observation)
        self._reward = rows.reward[step].copy_(answer.reward)
        rows.terminated[step].copy_(answer.terminated)
        rows.truncated[step].copy_(answer.truncated)
        ended = torch.logical_or(answer.terminated, answer.truncated, out=rows.is_init[step + 1])
        for env, observation in answer.finals:
            add_final(self._slot, step, self.columns[env], observation)
        self._returns += answer.reward
        self._lengths += 1
        if ended.any():  # a game ends with an episode, but not every episode with a game
            over = answer.over
            goes_on = ~over
            rows.episode_return[step].copy_(self._returns.masked_fill(goes_on, 0.0))
            rows.episode_length[step].copy_(self._lengths.masked_fill(goes_on, 0))
            self._returns.masked_fill_(over, 0.0)
            self._lengths.masked_fill_(over, 0)

    def end(self) -> None:
        """Copy what the next rollout begins with; after this the slot is the learner's."""
        self._observation.copy_(self._rows.observation[-1])
        self._is_init.copy_(self._rows.is_init[-1])
        self._reward = self._reward.clone()


class Roller:
    """Makes rollouts of T steps with one group of environments, or two: one steps while the player acts in
    the other."""

    def __init__(self, groups: Sequence[Group], player: Player, steps: int) -> None:
        self._groups = groups
        self._player = player
        self._steps = steps
        self._rows: dict[int, list[Rows]] = {}  # of each group, by the number of the slot
        self._step = 0
        self._before_act: Callable[[], None] | None = None

    @torch.inference_mode()
    def reset(self, seed: int) -> None:
        """Begin an episode in every environment; ``seed`` is that of the first one."""
        for group in self._groups:
            group.reset(seed)

    @torch.inference_mode()
    def roll(self, number: int, slot: Views, version: int, stop: Callable[[], bool]) -> bool:
        """Fill the slot of this number, with the version that acts; whether the rollout is complete.

        ``stop`` is asked at every step; True breaks the rollout off.
        """
        groups = self._groups
        if number not in self._rows:
            self._rows[number] = [Rows.cut(slot, group.columns, self._player) for group in groups]
        slot[keys.FINAL_COUNT].zero_()
        slot[keys.EPISODE_RETURN].zero_()
        slot[keys.EPISODE_LENGTH].zero_()
        slot[keys.POLICY_VERSION].fill_(version)
        for group, rows in zip(groups, self._rows[number], strict=True):
            group.begin(slot, rows)
            self._act(group, 0)
        for step in range(1, self._steps):
            if stop():
                return False
            for group in groups:
                group.finish(step - 1)
                self._act(group, step)
        for group in groups:
            group.finish(self._steps - 1)
            group.end()
        return True

    def _act(self, group: Group, step: int) -> None:
        self._step = step
        if self._before_act is not None and group is self._groups[0]:
            self._before_act()
        group.act(step)

    @contextmanager
    def before_acts(self, call: Callable[[], None]) -> Iterator[None]:
        """Call ``call()`` before each action of the first group in the block."""
        self._before_act = call
        try:
            yield
        finally:
            self._before_act = None

    @torch.inference_mode()
    def act_once_more(self) -> None:
        """Call the player on copies of what its next action answers, with random numbers of its own."""
        self._groups[0].act_once_more(self._step)

    def close(self) -> None:
        for group in self._groups:
            group.envs.close()


def make_roller(
    seat: Seat, make_envs: Callable[[int], Envs], shape: RolloutShape, *, overlap: bool
) -> Roller:
    """One worker's environments, in two groups with ``overlap``. ``make_envs(n)`` makes n as one vector."""
    count = shape.num_envs
    sizes = [count // 2, count - count // 2] if overlap else [count]
    groups = [Group(make_envs(size), seat, sum(sizes[:number])) for number, size in enumerate(sizes)]
    return Roller(groups, seat.player, shape.steps)
