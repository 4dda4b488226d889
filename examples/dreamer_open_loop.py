"""The open loop of a Dreamer: what its world model imagines, beside what really happened.

    python examples/dreamer_open_loop.py runs/dreamer [recipe=dreamer_v3 recipe.total_frames=2000 ...]

The folder is that of a finished run of ``dreamer_v3`` or ``dreamer_v1``; where there is none, one is trained
there first, with the keys of ``rlsync train`` that follow. The world model sees the first five observations of
16 stored sequences. Then it is told the actions alone, and imagines the next ten observations.

The script prints the error of each imagined step, in units of the observations' spread, beside the error of
saying that nothing changes. It writes one sequence into the folder: ``open_loop.csv``, or where observations
are pictures ``open_loop.png``, the real ones above the imagined ones. Of pictures beside other parts it shows
nothing.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.modules import RSSMRollout, RSSMRolloutV3
from torchrl.objectives import LossModule
from torchrl.trainers import Trainer

from rlsync.runs.cli.main import main as rlsync
from rlsync.runs.recipes import parts
from rlsync.runs.recipes.dreamer import v1, v3
from rlsync.runs.recipes.env_settings import RenderedConfig

RECIPES = {"dreamer_v1": v1.RECIPE, "dreamer_v3": v3.RECIPE}
SEQUENCES = 16
SEEN = 5
AHEAD = 10


def load(run: Path) -> Trainer:
    """A trainer with the weights and the replay buffer of a run. It starts no process and writes nothing."""
    saved = OmegaConf.load(run / "config.yaml")
    recipe = RECIPES[saved.recipe.name]
    env = RenderedConfig() if "img_height" in saved.env else parts.EnvConfig()
    keys = OmegaConf.structured(parts.Config(env=env, recipe=recipe.settings()))
    config = OmegaConf.to_object(OmegaConf.merge(keys, saved))
    config.run_dir = None
    config.collector.num_workers = 0
    trainer = recipe.build(config)
    trainer.load_from_file(run / "checkpoint")
    return trainer


def drawn(trainer: Trainer) -> TensorDictBase:
    """Stored rows ``[SEQUENCES, SEEN + AHEAD]``: in each sequence they follow each other in one environment.

    A sequence of ``dreamer_v3`` may cross the end of an episode, which nobody can tell from actions alone.
    """
    length = trainer.replay_buffer.sampler.length  # recipe.sequence_length
    rows = SEEN + AHEAD
    if length < rows:
        sys.exit(f"the run learns from sequences of {length} rows, and this needs {rows}")
    count = 0
    batches = []
    while count < SEQUENCES:
        batch = trainer.replay_buffer.sample().reshape(-1, length)
        batches.append(batch[:, :rows])
        count += len(batch)
    return torch.cat(batches)[:SEQUENCES]


def observations(rows: TensorDictBase) -> Tensor:
    """What was really observed, ``[sequences, rows, *observation]``; pixels from 0 to 1."""
    real = rows["next", "observation"]
    if real.dtype == torch.uint8:
        return real / 255
    return real.float()


@torch.no_grad()
def imagined(loss: LossModule, rows: TensorDictBase) -> Tensor:
    """The observations ``[sequences, AHEAD, *observation]`` that the model expects after ``SEEN`` rows."""
    world_model = loss.model_loss.world_model
    modules = [part for part in world_model.modules() if isinstance(part, TensorDictModuleBase)]
    (rollout,) = [part for part in modules if isinstance(part, RSSMRollout | RSSMRolloutV3)]
    decoders = [part for part in modules if list(part.out_keys) == [("next", "reco_pixels")]]
    if not decoders:
        sys.exit("the run observes pictures beside other parts, and this shows one thing alone")
    (decoder,) = decoders
    prior = rollout.rssm_prior.module

    # The posterior makes state and belief of what is observed; a sequence begins with zeros, as an episode.
    shown = rows[:, :SEEN].clone()
    shown["is_init"][:, 0] = True
    shown.update(loss.actor_loss.model_based_env.state_spec.zero(shown.shape))
    known = world_model(shown)
    state = known["next", "state"][:, -1]
    belief = known["next", "belief"][:, -1]

    # From here on the prior goes on alone: it is told what is done, and not what comes of it.
    steps = []
    for row in range(SEEN, SEEN + AHEAD):
        *_, state, belief = prior(state, belief, rows["action"][:, row])
        after = TensorDict({"state": state, "belief": belief}, len(state))
        decoded = decoder(TensorDict({"next": after}, len(state)))
        steps.append(decoded["next", "reco_pixels"])
    observed = rows["next", "observation"]
    return torch.stack(steps, 1).reshape(observed[:, SEEN:].shape)


def errors(real: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Root mean squares ``[AHEAD]`` of what is expected, and of the last observation that was seen.

    In units of the observations' spread; saying their mean would have an error of 1. Pixels have one spread.
    """
    variance = real.flatten(0, 1).var(0)
    if real.ndim > 3:
        variance = variance.mean()
    spread = variance.sqrt().clamp_min(1e-6)
    to_come = real[:, SEEN:]
    last_seen = real[:, SEEN - 1 : SEEN]
    of_step = []
    for answer in (expected, last_seen):
        squares = ((answer - to_come) / spread).square()
        of_step.append(squares.transpose(0, 1).flatten(1).mean(1).sqrt())
    return of_step[0], of_step[1]


def write_numbers(file: Path, real: Tensor, expected: Tensor) -> None:
    """A line for each step and each number of an observation; both are ``[AHEAD, features]``."""
    with file.open("w", newline="") as opened:
        lines = csv.writer(opened)
        lines.writerow(["step", "number", "real", "imagined"])
        for step in range(len(real)):
            for number in range(real.shape[1]):
                pair = (float(real[step, number]), float(expected[step, number]))
                lines.writerow([step + 1, number, *pair])


def draw_pictures(file: Path, real: Tensor, expected: Tensor) -> None:
    """The real steps side by side, above the imagined ones; both are ``[AHEAD, 3, height, width]``."""
    from PIL import Image

    rows = [torch.cat([*pictures], dim=-1) for pictures in (real, expected)]
    pixels = torch.cat(rows, dim=-2).clamp(0, 1).mul(255).round().to(torch.uint8)
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(file)


def main(folder: str, *keys: str) -> tuple[list[float], list[float]]:
    """Return the errors of the imagined steps, and of saying that nothing changes."""
    run = Path(folder)
    if not (run / "checkpoint").is_dir():
        # Of two words for one key the later one counts.
        status = rlsync(["train", "recipe=dreamer_v3", *keys, f"run_dir={run}"])
        if status:
            sys.exit(status)
    trainer = load(run)
    rows = drawn(trainer)
    real = observations(rows)
    expected = imagined(trainer.loss_module, rows)
    trainer.collector.shutdown()

    of_model, of_standstill = errors(real, expected)
    for step in range(AHEAD):
        print(f"step {step + 1:2}  error {of_model[step]:.3f}  no change {of_standstill[step]:.3f}")
    if real.ndim > 3:
        file = run / "open_loop.png"
        draw_pictures(file, real[0, SEEN:], expected[0])
    else:
        file = run / "open_loop.csv"
        write_numbers(file, real[0, SEEN:], expected[0])
    print(file)
    return of_model.tolist(), of_standstill.tolist()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
