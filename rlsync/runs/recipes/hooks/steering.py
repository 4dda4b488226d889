"""Hooks that steer a run: its pace, its end, its exploration, and the frames it learns from."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules import EGreedyModule
from torchrl.trainers import Trainer, TrainerHookBase

from rlsync.runs.actors.frames import COLLECTOR, EPISODE_LENGTH, EPISODE_RETURN
from rlsync.runs.actors.replay.mixing import ReplayMix
from rlsync.runs.actors.replay.pacing import Pace
from rlsync.seams import misuse


class KeepPace(misuse.RegistersItself):
    """Lets a trainer do as many optimizer steps as its frames allow; logs ``pace/ratio``, ``pace/updates``.

    With ``refills`` a resumed run, whose checkpoint has no frames, first collects those of the prefill.
    """

    def __init__(self, pace: Pace, *, refills: bool = False) -> None:
        self._refills = refills
        self.pace = pace
        self.updates = 0
        self._trainer: Trainer | None = None

    def register(self, trainer: Trainer, name: str = "keep_pace") -> None:
        """Pace this trainer; its own ``optim_steps_per_batch`` has no effect any more."""
        self._trainer = trainer
        trainer.register_op("pre_optim_steps", partial(self._plan, trainer))
        trainer.register_op("post_optim", self._updated)
        trainer.register_op("post_steps_log", partial(self._report, trainer))
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, float]:
        frames = 0
        if self._trainer is not None:
            frames = self._trainer.collected_frames
        return {
            "ratio": self.pace.ratio,
            "frames": frames,
            "updates": self.updates,
            "from_frames": self.pace.from_frames,
            "from_updates": self.pace.from_updates,
        }

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        """Go on with the count. If the ratio is another one now, it holds from here on."""
        self.updates = int(state_dict["updates"])
        if self._trainer is not None and int(state_dict["frames"]) >= self.pace.prefill:
            # A collector with another number of workers does not load its state, and would begin anew.
            self._trainer.collector.init_random_frames = 0
        before = float(state_dict["ratio"])
        now = self.pace.ratio
        frames = int(state_dict["frames"])
        updates = self.updates
        if self._refills and frames:
            frames += self.pace.prefill
        elif before == now:
            frames = int(state_dict["from_frames"])
            updates = int(state_dict["from_updates"])
        self.pace = replace(self.pace, from_frames=frames, from_updates=updates)

    def _plan(self, trainer: Trainer, *_: object) -> None:
        trainer.optim_steps_per_batch = self.pace.due(trainer.collected_frames, self.updates)

    def _updated(self) -> None:
        self.updates += 1

    def _report(self, trainer: Trainer, batch: TensorDictBase | None = None) -> dict[str, float]:
        ratio = self.pace.measured(trainer.collected_frames, self.updates)
        logged: dict[str, float] = {"pace/updates": self.updates}
        if not math.isnan(ratio):
            logged["pace/ratio"] = ratio
        return logged


class EpisodeReturns(TrainerHookBase):
    """The mean return of the newest ``episodes`` finished episodes; if so many reach ``target`` it stops."""

    def __init__(self, target: float | None = None, episodes: int = 20) -> None:
        self.target = target
        self.newest: deque[float] = deque(maxlen=episodes)
        self.finished = 0
        self.reached = False
        self._trainer: Trainer | None = None

    @property
    def mean(self) -> float:
        """The mean return of the newest episodes; not a number before the first one ends."""
        if self.newest:
            return sum(self.newest) / len(self.newest)
        return float("nan")

    def __call__(self, batch: TensorDictBase | None) -> dict[str, float] | None:
        if self._trainer is None:
            raise misuse.no_trainer(self)
        if batch is None:
            return None
        ended = self.ended(batch)
        self.newest.extend(ended)
        self.finished += len(ended)
        full = len(self.newest) == self.newest.maxlen
        if self.target is not None and full and self.target <= self.mean < math.inf:
            self.stop(f"return {self.mean:.0f} reached {self.target:g}")
        if self.newest:
            return {"return": self.mean, "episodes": self.finished}
        return None

    def stop(self, why: str) -> None:
        assert self._trainer is not None
        self.reached = True
        self._trainer.request_stop(why)

    def ended(self, batch: TensorDictBase) -> list[float]:
        """Returns of episodes that end in it; of unrolls, where lost lives end episodes, those of games."""
        lengths = batch.get((COLLECTOR, EPISODE_LENGTH), None)
        if lengths is None:
            over = batch["next", "done"]
            of_all = batch["next", "reward_sum"]
        else:
            over = lengths > 0
            of_all = batch.get((COLLECTOR, EPISODE_RETURN))
        returns: list[float] = of_all[over].flatten().tolist()
        return returns

    def register(self, trainer: Trainer, name: str = "episode_returns") -> None:
        self._trainer = trainer
        trainer.register_op("post_steps_log", self)
        trainer.register_module(name, self)

    def state_dict(self) -> dict[str, Any]:
        return {"newest": list(self.newest), "finished": self.finished}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.newest.clear()
        self.newest.extend(state_dict["newest"])
        self.finished = state_dict["finished"]


class EpsilonDecay(TrainerHookBase):
    """Lowers the rate of an EGreedyModule by frames; unlike DQNTrainer's, its checkpoints know how many."""

    def __init__(self, greedy: EGreedyModule, last_exponent: float = 1.0) -> None:
        self.greedy = greedy
        self._last_exponent = last_exponent
        self._frames = 0
        self._trainer: Trainer | None = None

    def __call__(self, *given: object) -> None:
        if self._trainer is None:
            raise misuse.no_trainer(self)
        misuse.refuse_arguments(self, given)
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

    def state_dict(self) -> dict[str, int]:
        return {"frames": self._frames}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._frames = state_dict["frames"]


class MixReplayed(TrainerHookBase):
    """Adds replayed unrolls to what a step uses; resumed runs begin empty without ``keep_contents``."""

    def __init__(self, mix: ReplayMix, *, keep_contents: bool = False) -> None:
        self.mix = mix
        self.keep_contents = keep_contents

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        return self.mix(batch.exclude(COLLECTOR))

    def register(self, trainer: Trainer, name: str = "replay") -> None:
        """Mix before each optimizer step; register it before hooks that count what is learned from."""
        trainer.register_op("process_optim_batch", self)
        trainer.register_op("post_steps_log", self._report)
        trainer.register_module(name, self)

    def _report(self, batch: TensorDictBase | None = None) -> dict[str, int]:
        counts = {
            "replay/steps": self.mix.replay.steps,
            "replay/replayed_unrolls": self.mix.total.replayed,
        }
        if self.mix.total.foreign:
            for agent, count in sorted(self.mix.taught.items()):
                counts[f"replay/from_agent_{agent}"] = count
        return counts

    def state_dict(self) -> dict[str, Any]:
        """The counts behind the ratio, the random state of the draws, and the unrolls if they are kept."""
        return {
            "mix": self.mix.state_dict(),
            "replay": self.mix.replay.state_dict(self.keep_contents),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mix.load_state_dict(state_dict["mix"])
        replay = dict(state_dict["replay"])
        if "contents" in replay:  # checkpoints give tensordicts back as mappings
            replay["contents"] = TensorDict(dict(replay["contents"]))
        self.mix.replay.load_state_dict(replay)


class ToLearner:
    """Moves each batch to the learner's device: the one place where frames leave host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        return batch.to(self.device)

    def register(self, trainer: Trainer) -> None:
        trainer.register_op("batch_process", self)
