"""The hook that holds a trainer to a pace."""

from __future__ import annotations

import warnings
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.core.errors import RlsyncWarning
from rlsync.torchrl_plugin.hooks.misuse import no_trainer
from rlsync.workers.replay.pacing import Pace, PaceFrom


class KeepPace(TrainerHookBase):
    """Lets a trainer do as many optimizer steps after each batch as its frames allow, and logs the ratio.

    Whichever side is ahead waits. The learner does no update that no frame has allowed: it waits for the next
    batch. Workers collect one rollout ahead at most, and begin the next one when the learner takes it.

    With ``refills`` checkpoints have no replay buffer: a resumed run collects as many frames as the prefill
    has before its next update, and the ratio holds from there on.

    Logs ``pace/ratio``, the updates for each frame that were really done, and ``pace/updates``.
    """

    def __init__(self, pace: Pace, *, refills: bool = False) -> None:
        self._refills = refills
        self.pace = PaceFrom(pace)
        self.updates = 0
        self._trainer: Trainer | None = None

    def __call__(self, *_: object) -> None:
        trainer = self._present()
        trainer.optim_steps_per_batch = self.pace.due(trainer.collected_frames, self.updates)

    def register(self, trainer: Trainer, name: str = "keep_pace") -> None:
        """Pace this trainer; its own ``optim_steps_per_batch`` has no effect any more."""
        self._trainer = trainer
        trainer.register_op("pre_optim_steps", self)
        trainer.register_op("post_optim", self._updated)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        return {
            "ratio": self.pace.pace.ratio,
            "frames": 0 if self._trainer is None else self._trainer.collected_frames,
            "updates": self.updates,
            "from_frames": self.pace.frames,
            "from_updates": self.pace.updates,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the count. If the ratio is another one now, it holds from here on, and that is said."""
        self.updates = int(state_dict["updates"])
        if self._trainer is not None and int(state_dict["frames"]) >= self.pace.pace.prefill:
            # A collector with another number of workers does not load its state, and would begin anew.
            self._trainer.collector.init_random_frames = 0
        before, now = float(state_dict["ratio"]), self.pace.pace.ratio
        begun = int(state_dict["frames"]), self.updates
        if self._refills and begun[0]:
            begun = begun[0] + self.pace.pace.prefill, self.updates
        elif before == now:
            begun = int(state_dict["from_frames"]), int(state_dict["from_updates"])
        if before != now:
            warnings.warn(
                RlsyncWarning(
                    f"the replay ratio was {before:g} and is {now:g} from here on",
                    f"a resumed run, after {int(state_dict['frames']):,} frames and {self.updates:,} updates",
                    "give the ratio of the run before to go on as it did",
                ),
                stacklevel=2,
            )
        self.pace = PaceFrom(self.pace.pace, *begun)

    def _updated(self) -> None:
        self.updates += 1

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, float]:
        ratio = self.pace.measured(self._present().collected_frames, self.updates)
        return {"pace/updates": self.updates} | ({"pace/ratio": ratio} if ratio == ratio else {})

    def _present(self) -> Trainer:
        if self._trainer is None:
            raise no_trainer(self)
        return self._trainer
