"""What the Dreamer recipes have in common: trainer, imagined environment, and a look at what is imagined."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn, optim
from torchrl.data import Composite, Unbounded
from torchrl.envs.model_based import DreamerEnv
from torchrl.modules import WorldModelWrapper
from torchrl.objectives import LossModule
from torchrl.trainers import OptimizationStepper, Trainer

from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.rollout_collector import RolloutCollector
from rlsync.runs.recipes import parts
from rlsync.runs.recipes.dreamer.config import DreamerConfig, OpenLoopConfig
from rlsync.runs.recipes.dreamer.player import ActingNetwork
from rlsync.runs.recipes.dreamer.sequences import REPLAYED, SequenceMemory, Sequences
from rlsync.runs.recipes.replay.building import paced_trainer, replay_buffer
from rlsync.runs.recipes.run_files import IMAGINATION, IMAGINED_PICTURES
from rlsync.torchrl_plugin.dreamer.map import parts_of_losses


def make_trainer(
    run: parts.Run[Any],
    collector: RolloutCollector,
    loss: LossModule,
    optimizer: optim.Optimizer,
    widths: Mapping[str, int],
    stepper: OptimizationStepper | None = None,
    *,
    within_episodes: bool = False,
) -> Trainer:
    """A trainer of sequences of all rows, at the config's pace; it has no hook that publishes yet.

    ``widths`` are those of the state that a sequence begins with.
    """
    recipe: DreamerConfig = run.recipe
    sequences = Sequences(recipe.sequence_length, within_episodes=within_episodes)
    buffer = replay_buffer(run, sequences)
    memory = SequenceMemory(buffer, sequences, widths, lambda: collector.last_rollouts)
    trainer = paced_trainer(run, collector, loss, memory, optimizer, stepper)
    if recipe.open_loop.every_frames:
        prior = parts_of_losses({"": loss}).rollout.module.rssm_prior.module
        model = loss.model_loss.world_model
        OpenLoop(recipe.open_loop, model, prior, memory.some, run.folder).register(trainer)
    return trainer


def imagined_env(
    transition: TensorDictModuleBase,
    reward: TensorDictModuleBase,
    state: int,
    recipe: DreamerConfig,
    spaces: parts.Spaces,
) -> DreamerEnv:
    """The environment in which an actor's steps are imagined; ``state`` is the width of what is drawn."""
    world = WorldModelWrapper(transition, reward)
    env = DreamerEnv(world, prior_shape=(state,), belief_shape=(recipe.belief,))
    env.observation_spec = Composite(state=Unbounded(state), belief=Unbounded(recipe.belief))
    env.state_spec = env.observation_spec.clone()
    env.action_spec = spaces.action_spec
    env.reward_spec = Unbounded((1,))
    return env


def let_act(loss: LossModule, policy: TensorDictSequential) -> None:
    """Let a loss have what acts, made of its own parts, as ``actor_network``, which TorchRL saves."""
    vars(loss)["actor_network"] = ActingNetwork(policy)


_SEQUENCES = 16


@dataclass
class OpenLoop:
    """Lets the world model imagine replayed sequences: it sees the first rows, then is told actions alone.

    Logs the errors of the first and the last imagined step, and that of saying that nothing changes, in units
    of the observations' spread (pictures have one); writes one sequence. Leaves random numbers as they were.
    """

    config: OpenLoopConfig
    world_model: TensorDictModuleBase
    prior: nn.Module  # of a state and an action; its last two results are state and belief
    draw: Callable[[int, int], TensorDictBase]  # so many sequences of so many rows
    run: Path | None  # gets the sequence

    def __post_init__(self) -> None:
        parts = [
            part for part in self.world_model.modules() if isinstance(part, TensorDictModuleBase)
        ]
        (self._decoder,) = [
            part for part in parts if list(part.out_keys) == [("next", "reco_pixels")]
        ]
        self._next = self.config.every_frames

    def register(self, trainer: Trainer) -> None:
        trainer.register_op("post_steps_log", partial(self._look, trainer))

    def _look(self, trainer: Trainer, batch: TensorDictBase | None = None) -> dict[str, float]:
        frames = trainer.collected_frames
        updates = trainer.optim_steps_per_batch
        if frames < self._next or not updates:  # in the prefill nothing has been learned
            return {}
        self._next = frames + self.config.every_frames
        device = next(self.prior.parameters()).device
        drawing = torch.random.fork_rng([] if device == CPU else [device], device_type=device.type)
        with torch.no_grad(), drawing:
            real, imagined = self.imagine()
        each = real.flatten(0, 1)
        drawn = each.ndim > 2
        spread = (each.var(0).mean() if drawn else each.var(0)).sqrt().clamp_min(1e-6)
        ahead = slice(self.config.seen, None)
        error = (
            ((imagined - real[:, ahead]) / spread)
            .square()
            .transpose(0, 1)
            .flatten(1)
            .mean(1)
            .sqrt()
        )
        still = (real[:, -1] - real[:, self.config.seen - 1]) / spread
        if self.run is not None:
            write = _draw if drawn else _write
            write(self.run, frames, real[0, ahead].cpu(), imagined[0].cpu())
        return {
            "imagination/error_first": float(error[0]),
            "imagination/error_last": float(error[-1]),
            "imagination/still": float(still.square().mean().sqrt()),
        }

    def imagine(self) -> tuple[Tensor, Tensor]:
        """Real observations ``[sequences, rows, *observation]`` and imagined ones; pixels from 0 to 1."""
        seen = self.config.seen
        ahead = self.config.ahead
        rows = self.draw(_SEQUENCES, seen + ahead)
        real = rows["next", "observation"]
        if real.dtype is torch.uint8:
            real = real.to(torch.float32) / 255
        known = self.world_model(rows[:, :seen].clone())
        state, belief = (known[key][:, -1] for key in REPLAYED)
        imagined = []
        for row in range(seen, seen + ahead):
            *_, state, belief = self.prior(state, belief, rows["action"][:, row])
            after = TensorDict({"state": state, "belief": belief}, state.shape[:1])
            expected = self._decoder(TensorDict({"next": after}, state.shape[:1]))
            imagined.append(expected["next", "reco_pixels"].reshape(real[:, row].shape))
        return real, torch.stack(imagined, 1)


def _write(run: Path, frames: int, real: Tensor, imagined: Tensor) -> None:
    """Append a sequence ``[rows, features]`` as numbers."""
    begins = not (run / IMAGINATION).exists()
    with (run / IMAGINATION).open("a", newline="") as file:
        lines = csv.writer(file)
        if begins:
            lines.writerow(["frames", "step", "number", "real", "imagined"])
        for step, (was, expected) in enumerate(
            zip(real.tolist(), imagined.tolist(), strict=True), 1
        ):
            for number, pair in enumerate(zip(was, expected, strict=True)):
                lines.writerow([frames, step, number, *(f"{value:.6g}" for value in pair)])


def _draw(run: Path, frames: int, real: Tensor, imagined: Tensor) -> None:
    """Write a sequence ``[rows, channels, height, width]`` as one picture: real above, imagined below."""
    from PIL import Image  # the settings of a recipe are refused where it is missing

    folder = run / IMAGINED_PICTURES
    folder.mkdir(exist_ok=True)
    both = torch.stack([real, imagined]).clamp(0, 1).mul(255).round().to(torch.uint8)
    # [2 x height, rows x width, channels]
    shown = both.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)
    Image.fromarray(shown.numpy()).save(folder / f"frames_{frames:08d}.png")
