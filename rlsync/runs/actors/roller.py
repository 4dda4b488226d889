"""What a worker does between two adoptions: it steps its environments, straight into a slot of the ring."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlsync import ConfigError
from rlsync.runs.actors import frames as keys
from rlsync.runs.actors.envs.saving import pickled
from rlsync.runs.actors.envs.vectors import Envs, StepArrays
from rlsync.runs.actors.frames import RolloutShape
from rlsync.runs.actors.player import Acted, Seat, State
from rlsync.runs.actors.trail import Standing, packed, unpacked

Views = Mapping[str, Tensor]  #: the arrays of a slot, by name

#: The arrays of a slot that have an entry for each step, written by torch; and by numpy, whose operations on
#: few numbers take a fraction of the time.
_STEPPED = (keys.OBSERVATION, keys.IS_INIT, keys.ACTION, keys.REWARD)
_COUNTED = (keys.TERMINATED, keys.TRUNCATED, keys.EPISODE_RETURN, keys.EPISODE_LENGTH, keys.IS_INIT)

_SAMPLED_BYTES = 1 << 15  #: of observations in the proof of behaviour; see the notes of the board


@dataclass(frozen=True, slots=True)
class Row:
    """One step of a group in a slot: arrays [N, ...], as views that a step need not cut."""

    observation: Tensor
    is_init: Tensor
    action: Tensor
    records: tuple[tuple[str, Tensor], ...]  # what the player records at every step, by name
    answer: StepArrays  # its observation is the next row's; its reward is not the slot's
    reward: Tensor
    ended: NDArray[np.bool_]  # the next row's ``is_init``
    episode_return: NDArray[np.float32]
    episode_length: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rows:
    """A group's columns of a slot."""

    steps: Sequence[Row]
    once: Mapping[str, Tensor]  # what the player records where an unroll begins
    last_observation: Tensor  # that after the last step
    last_is_init: Tensor


class Group:
    """Environments that step together, in a slot from column ``first`` on, and their state between steps."""

    def __init__(self, envs: Envs, seat: Seat, first: int, *, clip_reward: bool = False) -> None:
        self.envs = envs
        self._clip_reward = clip_reward
        self.columns = range(first, first + envs.num_envs)
        self._seat = seat
        self._act = self._act_here
        if seat.device.type != "cpu":
            self._act = seat.act
        self._checked = False
        count = envs.num_envs
        shape = count, *envs.observation_shape
        self._observation = torch.empty(shape, dtype=envs.observation_dtype, device="cpu")
        self._is_init = torch.ones(count, dtype=torch.bool, device="cpu")
        self._state: State = {}
        self._reward = torch.zeros(count, device="cpu")
        # Sums are of what environments answer: the slot has the rewards in float32.
        self._earned = np.zeros(count)
        self._earned_tensor = torch.from_numpy(self._earned)
        self._returns = np.zeros(count)
        self._lengths = np.zeros(count, np.int64)

    def cut(self, slot: Views) -> Rows:
        """The group's columns of a slot, once for all rollouts that go there."""
        part = slice(self.columns.start, self.columns.stop)
        once: dict[str, Tensor] = {}
        by_step: list[str] = []
        for record in self._seat.player.records:
            if record.per == "step":
                by_step.append(record.name)
            else:
                once[record.name] = slot[record.name][part]
        tensors = {name: slot[name][:, part].unbind(0) for name in (*_STEPPED, *by_step)}
        arrays = {name: list(slot[name][:, part].numpy()) for name in _COUNTED}
        rows = []
        for step in range(len(tensors[keys.ACTION])):
            answer = StepArrays(
                observation=tensors[keys.OBSERVATION][step + 1],
                reward=self._earned,
                terminated=arrays[keys.TERMINATED][step],
                truncated=arrays[keys.TRUNCATED][step],
            )
            row = Row(
                observation=tensors[keys.OBSERVATION][step],
                is_init=tensors[keys.IS_INIT][step],
                action=tensors[keys.ACTION][step],
                records=tuple((name, tensors[name][step]) for name in by_step),
                answer=answer,
                reward=tensors[keys.REWARD][step],
                ended=arrays[keys.IS_INIT][step + 1],
                episode_return=arrays[keys.EPISODE_RETURN][step],
                episode_length=arrays[keys.EPISODE_LENGTH][step],
            )
            rows.append(row)
        return Rows(rows, once, tensors[keys.OBSERVATION][-1], tensors[keys.IS_INIT][-1])

    def reset(self, seed: int) -> None:
        """Begin an episode in every environment; ``seed`` is that of the environment in column 0."""
        self._observation.copy_(self.envs.reset(seed + self.columns.start))
        self._is_init.fill_(True)
        self._state = self._seat.begin(self.envs.num_envs)
        self._reward = torch.zeros_like(self._reward)
        self._returns[:] = 0.0
        self._lengths[:] = 0

    def saved(self) -> tuple[Any, ...] | None:
        """What the next step begins with, as :meth:`reset` sets it; None: the environments cannot be saved."""
        envs = self.envs.saved()
        if envs is None:
            return None
        state = {name: packed(tensor) for name, tensor in self._state.items()}
        return envs, state, [packed(tensor) for tensor in self._between_steps()]

    def load(self, saved: tuple[Any, ...]) -> None:
        """Go on from what :meth:`saved` has returned."""
        envs, state, between = saved
        self.envs.load(envs)
        self.state = {name: unpacked(tensor) for name, tensor in state.items()}
        for tensor, packed_tensor in zip(self._between_steps(), between, strict=True):
            tensor.copy_(unpacked(packed_tensor))

    def _between_steps(self) -> tuple[Tensor, ...]:
        returns, lengths = map(torch.from_numpy, (self._returns, self._lengths))
        return self._observation, self._is_init, self._reward, returns, lengths

    def adopted(self, version: int) -> None:
        """Let the player know the version that makes the rollout, before :meth:`begin` writes its state."""
        self._state = self._seat.player.adopted(self._state, version)

    def begin(self, slot: Views, rows: Rows) -> None:
        """Write what is known before a rollout's first step. The slot is written to until :meth:`end`."""
        self._slot = slot
        self._rows = rows
        self._steps = rows.steps
        rows.steps[0].observation.copy_(self._observation)
        rows.steps[0].is_init.copy_(self._is_init)
        if not rows.once:
            return
        before = {**self._state, keys.LAST_REWARD: self._reward}
        self._require("begin's state", rows.once, before)
        for name, view in rows.once.items():
            view.copy_(before[name])

    def act(self, step: int) -> None:
        row = self._steps[step]
        acted = self._act(row.observation, row.is_init, self._reward, self._state)
        if not self._checked:
            views = {keys.ACTION: row.action, **dict(row.records)}
            self._require("act", views, {keys.ACTION: acted.action, **acted.records})
            self._checked = True
        self.envs.send(acted.action)
        self._state = acted.state
        row.action.copy_(acted.action)
        for name, view in row.records:
            view.copy_(acted.records[name])

    def repeat(self, step: int) -> None:
        """Take the action that the slot has already; no player is asked."""
        self.envs.send(self._steps[step].action)

    @property
    def state(self) -> State:
        """The player's, between two rollouts."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = {name: tensor.to(self._seat.device) for name, tensor in state.items()}

    def _act_here(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State
    ) -> Acted:
        """As :meth:`Seat.act` on the CPU, where nothing needs to be moved."""
        seat = self._seat
        return seat.player.act(observation, is_init, reward, state, seat.generator)

    def _require(
        self, where: str, views: Mapping[str, Tensor], arrays: Mapping[str, Tensor]
    ) -> None:
        """Refuse what is missing for these views of a slot, and what copy_() would broadcast."""
        for name, view in views.items():
            if name not in arrays or arrays[name].shape != view.shape:
                if name in arrays:
                    has = f"is {list(arrays[name].shape)}"
                else:
                    has = "is missing"
                problem = f"{name!r} {has}; {list(view.shape)} is declared"
                cure = "give one entry for each environment, in the shape that actions and records declare"
                raise ConfigError(problem, f"{type(self._seat.player).__name__}, {where}", cure)

    def act_once_more(self, step: int) -> None:
        """Call the player on copies of what a step is chosen by, with random numbers of its own."""
        seat = replace(self._seat, generator=torch.Generator(self._seat.device).manual_seed(0))
        row = self._steps[step]
        few = slice(max(1, _SAMPLED_BYTES // row.observation[0].nbytes))
        state = {name: value[few].clone() for name, value in self._state.items()}
        seat.act(
            row.observation[few].clone(), row.is_init[few].clone(), self._reward[few].clone(), state
        )

    def finish(self, step: int) -> None:
        """Wait for the environments, and write what came of a step."""
        row = self._steps[step]
        answer = row.answer
        finals, game_over = self.envs.recv_into(answer)
        # By torch: numpy warns of a reward that float32 cannot hold.
        self._reward = row.reward.copy_(self._earned_tensor)
        if self._clip_reward:
            self._reward.clamp_(-1.0, 1.0)
        ended = np.logical_or(answer.terminated, answer.truncated, out=row.ended)
        for env, observation in finals:
            self._keep_final(step, env, observation)
        self._returns += self._earned
        self._lengths += 1
        # a game ends with an episode, but not every episode with a game
        if np.count_nonzero(ended):
            over = ended
            if game_over is not None:
                over = game_over.numpy()
            row.episode_return[over] = self._returns[over]
            row.episode_length[over] = self._lengths[over]
            self._returns[over] = 0.0
            self._lengths[over] = 0

    def _keep_final(self, step: int, env: int, observation: Tensor) -> None:
        count = int(self._slot[keys.FINAL_COUNT])
        self._slot[keys.FINAL_OBSERVATION][count].copy_(observation)
        self._slot[keys.FINAL_INDEX][count].copy_(
            torch.tensor([step, self.columns[env]], device="cpu")
        )
        self._slot[keys.FINAL_COUNT].fill_(count + 1)

    def end(self) -> None:
        """Copy what the next rollout begins with; after this the slot is the learner's."""
        self._observation.copy_(self._rows.last_observation)
        self._is_init.copy_(self._rows.last_is_init)
        self._reward = self._reward.clone()


class Roller:
    """Makes rollouts of T steps in the environments of a worker, which ``make_envs(n)`` makes as one vector.

    With ``overlap`` there are two groups: one steps while the other is acted in. With ``clip_reward`` the
    rewards of a slot, and those that players get, are clipped to [-1, 1]; returns are not.
    """

    def __init__(
        self,
        seat: Seat,
        make_envs: Callable[[int], Envs],
        shape: RolloutShape,
        *,
        overlap: bool,
        clip_reward: bool = False,
    ) -> None:
        count = shape.num_envs
        sizes = [count]
        if overlap:
            sizes = [count // 2, count - count // 2]
        self._groups: list[Group] = []
        first = 0
        for size in sizes:
            self._groups.append(Group(make_envs(size), seat, first, clip_reward=clip_reward))
            first += size
        self._steps = shape.steps
        self._rows: dict[int, list[Rows]] = {}  # of each group, by the number of the slot
        self._step = 0
        self._seat = seat
        self._before_act: Callable[[], None] | None = None

    @torch.inference_mode()
    def reset(self, seed: int) -> None:
        for group in self._groups:
            group.reset(seed)

    def saved(self) -> bytes | None:
        """What the next rollout begins with, but random numbers; None: the environments cannot be saved.

        ConfigError: the state of one raises, or cannot be pickled.
        """
        groups = [group.saved() for group in self._groups]
        if None in groups:
            return None
        return pickled(groups)

    @torch.inference_mode()
    def load(self, saved: bytes) -> None:
        """Go on from what :meth:`saved` of a worker with the same environments has returned."""
        for group, of_group in zip(self._groups, pickle.loads(saved), strict=True):
            group.load(of_group)

    @torch.inference_mode()
    def roll(self, number: int, slot: Views, version: int, stop: Callable[[], bool]) -> bool:
        """Fill a slot by the version that acts; False if ``stop()``, asked at every step, breaks it off."""
        slot[keys.POLICY_VERSION].fill_(version)
        for group in self._groups:
            group.adopted(version)
        return self._roll(number, slot, self._act, stop)

    @torch.inference_mode()
    def repeat(self, number: int, slot: Views, stop: Callable[[], bool]) -> bool:
        """Fill a slot by the actions that it has already; False if ``stop()``, asked at every step."""
        return self._roll(number, slot, Group.repeat, stop)

    def _roll(
        self,
        number: int,
        slot: Views,
        act: Callable[[Group, int], None],
        stop: Callable[[], bool],
    ) -> bool:
        groups = self._groups
        if number not in self._rows:
            self._rows[number] = [group.cut(slot) for group in groups]
        slot[keys.FINAL_COUNT].zero_()
        slot[keys.EPISODE_RETURN].zero_()
        slot[keys.EPISODE_LENGTH].zero_()
        for group, rows in zip(groups, self._rows[number], strict=True):
            group.begin(slot, rows)
            act(group, 0)
        for step in range(1, self._steps):
            if stop():
                return False
            for group in groups:
                group.finish(step - 1)
                act(group, step)
        for group in groups:
            group.finish(self._steps - 1)
            group.end()
        return True

    @property
    def standing(self) -> Standing:
        """What the next rollout begins with, beside the environments."""
        return Standing([group.state for group in self._groups], self._seat.generator.get_state())

    @standing.setter
    def standing(self, standing: Standing) -> None:
        for group, state in zip(self._groups, standing.states, strict=True):
            group.state = state
        self._seat.generator.set_state(standing.randomness)

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
