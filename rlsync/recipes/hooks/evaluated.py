"""The end of a run whose greedy evaluations have reached its goal."""

from __future__ import annotations

from tensordict import TensorDictBase
from torchrl.trainers import Trainer

from rlsync.evaluation.evaluator import Evaluator
from rlsync.recipes.hooks.returns import EpisodeReturns


class StopOnEvaluation:
    """Stops a trainer when its newest evaluation has a mean return that is high enough.

    Returns of episodes that explore are lower than those of the policy that is learned.

    Args:
        evaluator: what evaluates.
        target: the mean return; None never stops.
        returns: the hook that ends the run.
    """

    def __init__(self, evaluator: Evaluator, target: float | None, returns: EpisodeReturns) -> None:
        self.evaluator = evaluator
        self.target = target
        self._returns = returns
        self._seen = 0

    def __call__(self, batch: TensorDictBase | None = None) -> None:
        found = self.evaluator.evaluations() if self.target is not None else []
        new, self._seen = found[self._seen :], len(found)
        for evaluated in new:
            if self.target is not None and evaluated.return_mean >= self.target:
                self._returns.stop(
                    f"greedy return {evaluated.return_mean:.0f} of version {evaluated.version} "
                    f"reached {self.target:g}"
                )

    def register(self, trainer: Trainer) -> None:
        """Look after every batch of this trainer."""
        trainer.register_op("post_steps_log", self)
