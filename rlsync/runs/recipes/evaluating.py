"""The evaluating process of a run, the end by its results, and what plays a checkpoint.

And a trial of a run's environment, before the run.
"""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor
from torchrl.collectors import BaseCollector
from torchrl.trainers import Trainer

from rlsync import ConfigError, RlsyncError, RlsyncWarning
from rlsync.runs.actors.envs.actions import BoxActions
from rlsync.runs.actors.envs.observations import MASK, WHOLE, Observations, Part
from rlsync.runs.actors.envs.saving import pickled
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.actors.envs.vectors import Envs, ListedEnvs
from rlsync.runs.actors.player import Player, check_fits
from rlsync.runs.evaluation.checkpoint import CheckpointPlayer
from rlsync.runs.evaluation.evaluator import Evaluator, board_of
from rlsync.runs.evaluation.play import Patience, filmed, play
from rlsync.runs.evaluation.process import EvaluationJob, Filming, best_in
from rlsync.runs.evaluation.try_out import random_steps
from rlsync.runs.recipes.checks import VIDEO_KEY
from rlsync.runs.recipes.env_settings import AtariConfig, EnvConfig
from rlsync.runs.recipes.networks import workers_player
from rlsync.runs.recipes.registry import Recipe, recipe_of
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.run_files import BEST, BEST_VIDEO, EVALUATIONS, VIDEOS
from rlsync.runs.recipes.settings import Config, EvaluationConfig, RecipeConfig
from rlsync.runs.recipes.spaces import MASKING, digested, first_difference, played
from rlsync.runs.recipes.trainer import register_hooks
from rlsync.seams import POLICY, endpoint_of, first_line, warn

#: Between the seed of a run and that of its evaluations: they begin as no worker's first episodes do.
APART = 2**30


def register_with_evaluations(
    trainer: Trainer, run: Run[RecipeConfig], greedy: Player, learned: str = ""
) -> None:
    """Register what publishes, logs and watches, and the evaluating process if the config wants one.

    Its returns then decide on ``recipe.target_return``. It plays with ``greedy``, whose modules are those of
    the workers; the names of the learned leaves begin with ``learned``. ConfigError: there is no run folder.
    """
    evaluates = run.recipe.evaluations().every_frames > 0 and run.folder is not None
    returns = register_hooks(trainer, run, stop_at_return=not evaluates)
    if evaluates:
        player = workers_player(run.config.sync, greedy, run.device)
        evaluator = make_evaluator(run, trainer.collector, player, learned)
        evaluator.target = run.recipe.target_return
        evaluator.stop = returns.stop
        evaluator.register(trainer)


def make_evaluator(
    run: Run[RecipeConfig], collector: BaseCollector, player: Player, learned: str = ""
) -> Evaluator:
    """The process that plays on the workers' board, once it has made its first step.

    ConfigError: there is no board or no run folder. WorkerLost, AdoptionTimeout: the process did not start.
    """
    board = board_of(collector)
    config = run.config
    evaluation = run.recipe.evaluations()
    folder = run.folder
    if board is None or folder is None:
        problem = "an evaluation needs a board to read and a run folder to write to"
        raise ConfigError(
            problem, "recipe.evaluation.every_frames, run_dir", "give run_dir, or every_frames=0"
        )
    best_in(folder / BEST, trusted=True)  # a damaged one is told here, not by the process

    numbers = endpoint_of(collector).publisher.ledger
    # The process gets all that it needs in one picklable object; what it must not change comes from the run.
    filming = None
    if evaluation.video_every is not None:
        filming = Filming(folder / VIDEOS, evaluation.video_every, folder / BEST_VIDEO)
    job = EvaluationJob(
        board=board,
        player=player,
        env=config.env.spec(),
        episodes=evaluation.episodes,
        file=folder / EVALUATIONS,
        seed=config.seed + APART,
        adopt=config.collector.adopt,  # type: ignore[arg-type]
        device=run.evaluation_device,
        best=folder / BEST,
        kept=f"{POLICY}.{learned}",
        filming=filming,
        run_id=numbers.run_id,
        patience=patience_of(evaluation),
    )
    settings = config.collector
    return Evaluator(
        job,
        numbers,
        every_frames=evaluation.every_frames,
        in_order=run.life_length is not None,
        start_timeout_s=settings.start_timeout_s,
        silent_timeout_s=settings.silent_timeout_s,
    )


def patience_of(evaluation: EvaluationConfig) -> Patience:
    return Patience(evaluation.give_up_after_steps, evaluation.give_up_after_s)


def require_screen(config: Config) -> None:
    """Raise ConfigError if a run is to be filmed and its environment, which is made here, cannot be drawn."""
    if config.recipe.evaluations().video_every is None:
        return
    try:
        filmed(config.env.spec(), config.seed, leave_out=f"{VIDEO_KEY}=null").close()
    except ConfigError as error:
        raise ConfigError(error.what, f"{VIDEO_KEY}; {error.where}", error.cure) from error


def acting_of(config: Config, *, deterministic: bool = False) -> CheckpointPlayer:
    """What acts with a checkpoint's weights, once loaded; ``deterministic`` takes the likeliest action."""
    recipe = recipe_of(config)
    return recipe.player(config, recipe.probe(config.env), deterministic)


#: A trial takes so many steps in a way of playing, and takes no longer than so many seconds.
TRIAL_STEPS = 100
TRIAL_S = 10.0


@dataclass(frozen=True, slots=True)
class Trial:
    """The first steps in a run's environment, before the run: how many were taken, and ended an episode."""

    way: str
    steps: int
    episodes: int

    def __str__(self) -> str:
        return f"{self.steps} steps as {self.way}"


def tried_by_workers(config: Config) -> Trial:
    """Take random steps in the environments of one worker.

    ConfigError: they raise, or answer what a run cannot use.
    """
    return _trial(config, "workers step it", _steps_of_workers(config))


def tried_by_evaluations(config: Config, recipe: Recipe, spaces: Any) -> Trial:
    """Take steps as an evaluation does, with the policy as it is made; ConfigError as before.

    ``spaces`` is what ``recipe.probe`` returned.
    """
    return _trial(config, "evaluations play it", _steps_of_evaluations(config, recipe, spaces))


def _trial(config: Config, way: str, ended_in_each_step: Iterator[int]) -> Trial:
    began = time.monotonic()
    steps = 0
    episodes = 0
    try:
        for ended in ended_in_each_step:
            steps += 1
            episodes += ended
            if time.monotonic() - began > TRIAL_S:
                break
    except RlsyncError:
        raise
    except Exception as error:  # it is foreign code, which may raise anything
        last = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{config.env.name!r} raises {type(error).__name__}: {first_line(error)}"
        where = f"{config.env.word}, as {way}, after {steps} steps; {Path(last.filename).name}, line {last.lineno}"
        cure = "mend the environment, or give another one: a run would end there"
        raise ConfigError(problem, where, cure) from error
    return Trial(way, steps, episodes)


def warn_if_not_decided(config: Config) -> None:
    """Warn of an environment that answers the same actions otherwise, in a run that its seed is to decide."""
    if config.life_length is None:
        return
    # Seeded alike, as a worker and who takes its place are.
    plays = [
        islice(played(config.env, config.seed, config.seed), TRIAL_STEPS + 1) for _ in range(2)
    ]
    if difference := first_difference(*map(list, plays)):
        key, moment = difference
        problem = f"the same actions had another {key} in {moment}: the seed does not decide this "
        problem += "environment, and a run with a lag is not the same each time, nor after a crash"
        cure = "draw from self.np_random alone, which reset(seed=...) seeds; or give collector.lag=null"
        warn(RlsyncWarning(problem, config.env.word, cure))


def whether_episodes_go_on(config: Config) -> str:
    """In words, that episodes go on at the end of a life; empty where none ends, or episodes end with it.

    ConfigError: the environment cannot be saved although it has the methods for that. A warning: it answers
    otherwise once it was loaded.
    """
    if config.life_length is None:
        return ""
    spec = config.env.spec()
    generator = torch.Generator().manual_seed(config.seed)
    with closing(make_venv(spec, 1)) as envs:
        *_, last = random_steps(envs, generator, TRIAL_STEPS // 4, envs.reset(config.seed))
        states = envs.saved()
        if states is None:
            return ""
        saved = pickled(states)
        plays = [_played_from(envs, config.seed, last.observation)]
    with closing(make_venv(spec, 1)) as envs:
        envs.reset(config.seed + 1)
        envs.load(pickle.loads(saved))
        plays.append(_played_from(envs, config.seed, last.observation))
    if difference := first_difference(*plays):
        key, moment = difference
        problem = (
            f"the same actions had another {key} in {moment} than in the environment that was saved"
        )
        cure = "let state() return all that decides it, also self.np_random.bit_generator.state"
        warn(RlsyncWarning(problem, config.env.word, cure))
    return "episodes go on at the end of a life"


def _played_from(envs: Envs, seed: int, observation: Tensor) -> list[tuple[str, dict[str, int]]]:
    generator = torch.Generator().manual_seed(seed)
    return list(digested(random_steps(envs, generator, TRIAL_STEPS, observation), "load(state)"))


def whether_episodes_end(config: Config, trials: Sequence[Trial]) -> str:
    """In words, what trials have told of the ends of episodes."""
    if episodes := sum(each.episodes for each in trials):
        return f"{episodes} episodes ended"
    if _limits_episodes(config.env):
        return "no episode ended in these"
    limit = f"{config.recipe.evaluations().give_up_after_steps:,}"
    return (
        "no episode ended, and nothing limits them: without an end there are no returns, and evaluations "
        f"give up after {limit} steps; env.max_episode_steps=1000 limits them"
    )


def _limits_episodes(env: EnvConfig) -> bool:
    if isinstance(env, AtariConfig):
        return True
    if env.max_episode_steps is not None:
        return True
    if "max_episode_steps" in env.kwargs:
        return env.kwargs["max_episode_steps"] is not None
    registered = gymnasium.registry.get(env.name.rpartition(":")[2])
    return registered is not None and registered.max_episode_steps is not None


def _steps_of_workers(config: Config) -> Iterator[int]:
    """Yields how many episodes ended in each step."""
    env = config.env
    generator = torch.Generator().manual_seed(config.seed)
    with closing(make_venv(env.spec(), env.num_envs)) as envs:
        _warn_of_mask(env, envs)
        first = envs.reset(config.seed)
        warns = _require_numbers(env, envs.observations, "reset", first, warns=True)
        for answer in random_steps(envs, generator, TRIAL_STEPS, first):
            _require_rewards(env, answer.reward)
            warns = _require_numbers(
                env, envs.observations, "step", answer.observation, warns=warns
            )
            yield int(answer.over.sum())


def _warn_of_mask(env: EnvConfig, envs: Envs) -> None:
    """Warn of a mask of actions in the info that nothing applies."""
    # Masks in the infos of a vector environment, and those of TorchRL's, are never read.
    if not isinstance(envs, ListedEnvs) or isinstance(envs.actions, BoxActions):
        return
    if envs.observations.mask is not None:
        return
    _, info = envs.envs[0].reset(seed=0)
    if MASK in info:
        problem = f"the info of {env.name!r} has a mask of actions, {MASK}, which is not applied"
        where = f"env.action_mask={env.action_mask}; {env.word}"
        cure = f"give env.action_mask=info, with a recipe that can leave out actions: {MASKING}"
        warn(RlsyncWarning(problem, where, cure))


def _steps_of_evaluations(config: Config, recipe: Recipe, spaces: Any) -> Iterator[int]:
    """Yields how many episodes ended in each step."""
    acting = recipe.player(config, spaces, deterministic=True)
    with closing(make_venv(acting.env, 1)) as envs:
        check_fits(acting.player, envs, str(acting.env))
        patience = patience_of(config.recipe.evaluations())
        playing = play(acting.player, envs, TRIAL_STEPS, config.seed + APART, patience=patience)
        next(playing)
        for ended in islice(playing, TRIAL_STEPS):
            yield len(ended)


def _require_rewards(env: EnvConfig, reward: Tensor) -> None:
    """Refuse rewards that would end a run at its first update."""
    if not bool(torch.isfinite(reward).all()):
        raise _not_finite(env, "step", "a reward that is", reward)


def _require_numbers(
    env: EnvConfig, observations: Observations, method: str, rows: Tensor, *, warns: bool
) -> bool:
    """Refuse numbers that would end a run at its first update, and warn of those outside their box.

    Args:
        env: which environment answered.
        observations: what a row is made of.
        method: what it answered.
        rows: ``[N, *shape]``.
        warns: whether numbers outside their bounds are looked for.

    Returns:
        whether they are looked for in the answers that follow: one warning is enough.

    Raises:
        ConfigError: a number is infinite, or none; it names the part.
    """
    parts = observations.split(rows)
    for part in observations.parts:
        numbers = parts[part.name]
        if part.kind != "numbers":
            continue
        if not bool(torch.isfinite(numbers).all()):
            field = f"an observation whose part {part.name!r} is"
            if part.name == WHOLE:
                field = "an observation that is"
            raise _not_finite(env, method, field, numbers)
        if warns and (outside := _outside(part, numbers)):
            problem = (
                f"{env.name!r} answers {method}() with {part.name!r} outside its space: {outside}"
            )
            cure = "networks see it as it is; give the space the bounds of its answers, so that others know them"
            warn(RlsyncWarning(problem, env.word, cure))
            warns = False
    return warns


def _not_finite(env: EnvConfig, method: str, field: str, numbers: Tensor) -> ConfigError:
    problem = f"{env.name!r} answers {method}() with {field} infinite or not a number"
    cure = "let it answer with finite numbers: nothing can be learned from others, and the run would end"
    return ConfigError(problem, f"{env.word}; {numbers.flatten().tolist()[:8]}", cure)


def _outside(part: Part, numbers: Tensor) -> str:
    """The first number of a box that is outside its bounds, in words; empty if none is.

    Args:
        part: whose space has the bounds.
        numbers: ``[N, n]``.
    """
    # A stack of observations has more numbers than the space of one.
    if not isinstance(part.space, Box) or part.space.low.size != part.size:
        return ""
    # Rounded as the numbers are, which then cannot seem to be outside.
    low = torch.from_numpy(part.space.low.astype(np.float32).reshape(-1))
    high = torch.from_numpy(part.space.high.astype(np.float32).reshape(-1))
    wrong = ((numbers < low) | (numbers > high)).nonzero()
    if not len(wrong):
        return ""
    row, number = wrong[0].tolist()
    span = f"{low[number]:g} to {high[number]:g}"
    return f"number {number} is {numbers[row, number]:g}, and its bounds are {span}"
