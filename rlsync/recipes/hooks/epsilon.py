"""The exploration rate of a Q network."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.modules import EGreedyModule
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.torchrl_plugin.hooks.misuse import no_trainer, refuse_arguments


class EpsilonDecay(TrainerHookBase):
    """Lowers the exploration rate of an EGreedyModule as frames are collected.

    DQNTrainer does this too, but its checkpoints do not say for how many frames the rate has fallen. They
    carry the module itself as ``trainer.greedy_module``.

    Logs ``exploration/epsilon``, the rate of the worker that explores most, and ``exploration/epsilon_last``,
    that of the one that explores least: the rate to the power ``last_exponent``.
    """

    def __init__(self, greedy: EGreedyModule, last_exponent: float = 1.0) -> None:
        self.greedy = greedy
        self._last_exponent = last_exponent
        self._frames = 0
        self._trainer: Trainer | None = None

    def __call__(self, *given: object) -> None:
        if self._trainer is None:
            raise no_trainer(self)
        refuse_arguments(self, given)
        if self._trainer.collected_frames > self._frames:
            self.greedy.step(self._trainer.collected_frames - self._frames)
            self._frames = self._trainer.collected_frames

    def register(self, trainer: Trainer, name: str = "epsilon_decay") -> None:
        """Step after every batch; register before the hook that publishes the rate."""
        self._trainer = trainer
        trainer.register_op("post_steps", self)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, float]:
        rate = float(self.greedy.eps)
        return {"exploration/epsilon": rate, "exploration/epsilon_last": rate**self._last_exponent}

    def state_dict(self) -> dict[str, Any]:
        return {"frames": self._frames}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._frames = state_dict["frames"]
