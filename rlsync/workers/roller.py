"""What a worker does between two adoptions: it steps its environments, straight into a slot of the ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlsync.core.errors import ConfigError
from rlsync.workers import frames as keys
from rlsync.workers.envs.vectors import Envs
from rlsync.workers.frames import RolloutShape
from rlsync.workers.player import Player, Seat, State

Views = Mapping[str, Tensor]  #: the arrays of a slot, by name

_SAMPLED_BYTES = 1 << 15  #: of observations in the proof of behaviour; see the notes of the board


@dataclass(frozen=True, slots=True)
class Rows:
    """A group's columns of a slot, cut once into one view for each step: a step itself cuts nothing."""

    steps: Mapping[str, Sequence[Tensor]]  # the arrays that have one entry for each step, by name
    records: Mapping[str, Sequence[Tensor]]  # those of them that the player records
    once: Mapping[str, Tensor]  # what it records where an unroll begins

    @classmethod
    def cut(cls, slot: Views, columns: range, player: Player) -> Rows:
        part = slice(columns.start, columns.stop)
        once = {record.name: slot[record.name][part] for record in player.records if record.per == "unroll"}
        others = (keys.FINAL_COUNT, *keys.FINAL, *once)
        steps = {name: array[:, part].unbind(0) for name, array in slot.items() if name not in others}
        records = {record.name: steps[record.name] for record in player.records if record.per == "step"}
        return cls(steps, records, once)


class Group:
    """Environments that step together, in a slot from column ``first`` on, and their state between steps."""

    def __init__(self, envs: Envs, seat: Seat, first: int) -> None:
        self.envs = envs
        self.columns = range(first, first + envs.num_envs)
        self._seat = seat
        self._checked = False
        count = envs.num_envs
        shape = count, *envs.observation_shape
        self._observation = torch.empty(shape, dtype=envs.observation_dtype, device="cpu")
        self._is_init = torch.ones(count, dtype=torch.bool, device="cpu")
        self._state: State = {}
        self._reward = torch.zeros(count, device="cpu")
        self._returns = torch.zeros(count, dtype=torch.float64, device="cpu")
        self._lengths = torch.zeros(count, dtype=torch.int64, device="cpu")

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
        rows.steps[keys.OBSERVATION][0].copy_(self._observation)
        rows.steps[keys.IS_INIT][0].copy_(self._is_init)
        before = {**self._state, keys.LAST_REWARD: self._reward}
        self._require("begin's state", {name: view.shape for name, view in rows.once.items()}, before)
        for name, view in rows.once.items():
            view.copy_(before[name])

    def act(self, step: int) -> None:
        rows = self._rows.steps
        seen, is_init = rows[keys.OBSERVATION][step], rows[keys.IS_INIT][step]
        acted = self._seat.act(seen, is_init, self._reward, self._state)
        if not self._checked:
            wanted = {name: steps[0].shape for name, steps in self._rows.records.items()}
            wanted = {keys.ACTION: rows[keys.ACTION][0].shape, **wanted}
            self._require("act", wanted, {keys.ACTION: acted.action, **acted.records})
            self._checked = True
        self.envs.send(acted.action)
        self._state = acted.state
        rows[keys.ACTION][step].copy_(acted.action)
        for name, steps in self._rows.records.items():
            steps[step].copy_(acted.records[name])

    def _require(self, where: str, wanted: Mapping[str, torch.Size], given: Mapping[str, Tensor]) -> None:
        """Refuse what is missing, and what copy_() would broadcast."""
        for name, shape in wanted.items():
            if name not in given or given[name].shape != shape:
                has = f"is {list(given[name].shape)}" if name in given else "is missing"
                what = f"{name!r} {has}; {list(shape)} is declared"
                cure = "give one entry for each environment, in the shape that actions and records declare"
                raise ConfigError(what, f"{type(self._seat.player).__name__}, {where}", cure)

    def act_once_more(self, step: int) -> None:
        """Call the player on copies of what a step is chosen by, with random numbers of its own."""
        seat = replace(self._seat, generator=torch.Generator(self._seat.device).manual_seed(0))
        rows = self._rows.steps
        seen, begins = rows[keys.OBSERVATION][step], rows[keys.IS_INIT][step]
        few = slice(max(1, _SAMPLED_BYTES // seen[0].nbytes))
        state = {name: value[few].clone() for name, value in self._state.items()}
        seat.act(seen[few].clone(), begins[few].clone(), self._reward[few].clone(), state)

    def finish(self, step: int) -> None:
        """Wait for the environments, and write what came of a step."""
        rows, answer = self._rows.steps, self.envs.recv()
        rows[keys.OBSERVATION][step + 1].copy_(answer.observation)
        self._reward = rows[keys.REWARD][step].copy_(answer.reward)
        rows[keys.TERMINATED][step].copy_(answer.terminated)
        rows[keys.TRUNCATED][step].copy_(answer.truncated)
        ended = torch.logical_or(answer.terminated, answer.truncated, out=rows[keys.IS_INIT][step + 1])
        for env, observation in answer.finals:
            count = int(self._slot[keys.FINAL_COUNT])
            self._slot[keys.FINAL_OBSERVATION][count].copy_(observation)
            self._slot[keys.FINAL_INDEX][count].copy_(torch.tensor([step, self.columns[env]], device="cpu"))
            self._slot[keys.FINAL_COUNT].fill_(count + 1)
        self._returns += answer.reward
        self._lengths += 1
        if ended.any():  # a game ends with an episode, but not every episode with a game
            over = answer.over
            goes_on = ~over
            rows[keys.EPISODE_RETURN][step].copy_(self._returns.masked_fill(goes_on, 0.0))
            rows[keys.EPISODE_LENGTH][step].copy_(self._lengths.masked_fill(goes_on, 0))
            self._returns.masked_fill_(over, 0.0)
            self._lengths.masked_fill_(over, 0)

    def end(self) -> None:
        """Copy what the next rollout begins with; after this the slot is the learner's."""
        self._observation.copy_(self._rows.steps[keys.OBSERVATION][-1])
        self._is_init.copy_(self._rows.steps[keys.IS_INIT][-1])
        self._reward = self._reward.clone()


class Roller:
    """Makes rollouts of T steps in the environments of a worker, which ``make_envs(n)`` makes as one vector.
    With ``overlap`` there are two groups: one steps while the other is acted in.
    """

    def __init__(
        self, seat: Seat, make_envs: Callable[[int], Envs], shape: RolloutShape, *, overlap: bool
    ) -> None:
        count = shape.num_envs
        sizes = [count // 2, count - count // 2] if overlap else [count]
        self._groups = [Group(make_envs(n), seat, sum(sizes[:number])) for number, n in enumerate(sizes)]
        self._player = seat.player
        self._steps = shape.steps
        self._rows: dict[int, list[Rows]] = {}  # of each group, by the number of the slot
        self._step = 0
        self._before_act: Callable[[], None] | None = None

    @torch.inference_mode()
    def reset(self, seed: int) -> None:
        for group in self._groups:
            group.reset(seed)

    @torch.inference_mode()
    def roll(self, number: int, slot: Views, version: int, stop: Callable[[], bool]) -> bool:
        """Fill a slot by the version that acts; False if ``stop()``, asked at every step, breaks it off."""
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
