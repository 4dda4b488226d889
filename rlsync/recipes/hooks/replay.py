"""Replayed unrolls beside the online ones."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.workers.frames import COLLECTOR
from rlsync.workers.replay.mixing import ReplayMix


class MixReplayed(TrainerHookBase):
    """Adds replayed unrolls to what an optimizer step is about to use.

    If checkpoints do not ``keep_contents``, a resumed run starts with an empty replay.
    """

    def __init__(self, mix: ReplayMix, *, keep_contents: bool = False) -> None:
        self.mix = mix
        self.keep_contents = keep_contents

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        return self.mix(batch.exclude(COLLECTOR))

    def register(self, trainer: Trainer, name: str = "replay") -> None:
        """Mix before each optimizer step; register after hooks that look at online unrolls alone."""
        trainer.register_op("process_optim_batch", self)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, Any]:
        return {"replay/steps": self.mix.replay.steps, "replay/replayed_unrolls": self.mix.total.replayed}

    def state_dict(self) -> dict[str, Any]:
        """The counts behind the ratio, the random state of the draws, and the unrolls if they are kept."""
        return {"mix": self.mix.state_dict(), "replay": self.mix.replay.state_dict(self.keep_contents)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mix.load_state_dict(state_dict["mix"])
        replay = dict(state_dict["replay"])
        if "contents" in replay:  # checkpoints give tensordicts back as mappings
            replay["contents"] = TensorDict(dict(replay["contents"]))
        self.mix.replay.load_state_dict(replay)
