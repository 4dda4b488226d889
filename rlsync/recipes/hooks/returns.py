"""Returns of the newest episodes, and the end of a run that has reached its goal."""

from __future__ import annotations

from collections import deque
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.torchrl_plugin.hooks.misuse import no_trainer
from rlsync.workers.frames import COLLECTOR, EPISODE_LENGTH, EPISODE_RETURN


class EpisodeReturns(TrainerHookBase):
    """The mean return of the newest finished episodes; stops the trainer when it reaches ``target``.

    Reads ``("next", "reward_sum")`` where ``("next", "done")``; logs ``return`` and ``episodes``. The mean is
    of up to ``episodes`` episodes; the trainer is stopped only when there are as many.
    """

    def __init__(self, target: float | None = None, episodes: int = 20) -> None:
        self.target = target
        self.newest: deque[float] = deque(maxlen=episodes)
        self.finished = 0
        self.reached = False
        self._trainer: Trainer | None = None

    @property
    def mean(self) -> float:
        """The mean return of the newest episodes; not a number before the first one ends."""
        return sum(self.newest) / len(self.newest) if self.newest else float("nan")

    def __call__(self, batch: TensorDictBase | None) -> dict[str, Any] | None:
        if self._trainer is None:
            raise no_trainer(self)
        if batch is None:
            return None
        ended = self.ended(batch)
        self.newest.extend(ended)
        self.finished += len(ended)
        full = len(self.newest) == self.newest.maxlen
        if self.target is not None and full and self.mean >= self.target:
            self.stop(f"return {self.mean:.0f} reached {self.target:g}")
        return {"return": self.mean, "episodes": self.finished} if self.newest else None

    def stop(self, why: str) -> None:
        if self._trainer is None:
            raise no_trainer(self)
        self.reached = True
        self._trainer.request_stop(why)

    def ended(self, batch: TensorDictBase) -> list[float]:
        """The returns of the episodes that ended in this batch."""
        returns: list[float] = batch["next", "reward_sum"][batch["next", "done"]].flatten().tolist()
        return returns

    def register(self, trainer: Trainer, name: str = "episode_returns") -> None:
        """Watch every batch of this trainer."""
        self._trainer = trainer
        trainer.register_op("post_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        return {"newest": list(self.newest), "finished": self.finished}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.newest.clear()
        self.newest.extend(state_dict["newest"])
        self.finished = state_dict["finished"]


class UnrollReturns(EpisodeReturns):
    """The mean return of the newest finished episodes of unrolls; where lost lives end episodes, of games."""

    def ended(self, batch: TensorDictBase) -> list[float]:
        over = batch.get((COLLECTOR, EPISODE_LENGTH)) > 0
        returns: list[float] = batch.get((COLLECTOR, EPISODE_RETURN))[over].tolist()
        return returns
