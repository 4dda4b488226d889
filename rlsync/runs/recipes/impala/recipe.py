"""The recipes impala and laser: workers that act all the time, and a learner that never waits for them.

Source: IMPALA, arXiv 1802.01561; LASER, arXiv 1909.11583; torchrl.trainers.Trainer runs the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import optim
from torchrl.trainers import LRSchedulerHook, Trainer

from rlsync import ConfigError, LogPolicyLag
from rlsync.runs.actors.frames import RolloutShape
from rlsync.runs.actors.player import in_dtype
from rlsync.runs.actors.replay.mixing import ReplayMix
from rlsync.runs.actors.replay.shared import SharedReplay, SharedReplayHandle, made_replay
from rlsync.runs.actors.replay.unrolls import UnrollReplay
from rlsync.runs.actors.rollout_collector import RolloutCollector
from rlsync.runs.actors.supervision import Restarts
from rlsync.runs.recipes import parts
from rlsync.runs.recipes.hooks.steering import EpisodeReturns, MixReplayed
from rlsync.runs.recipes.impala.heads import head_for
from rlsync.runs.recipes.impala.loss import ImpalaLoss
from rlsync.runs.recipes.impala.network import ImpalaNet, ImpalaPlayer
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.normalize import NormalizeUnrolls
from rlsync.runs.recipes.place import collect_settings
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.settings import BFLOAT16, Config
from rlsync.seams import shared_file


def build(run: Run[ImpalaConfig]) -> Trainer:
    recipe = run.recipe
    if recipe.evaluation.every_frames and run.folder is None:
        problem = "an evaluation needs a run folder to write to"
        raise ConfigError(
            problem, "recipe.evaluation.every_frames, run_dir", "give run_dir, or every_frames=0"
        )
    if recipe.agents > 1:
        problem = f"a trainer trains one agent, and recipe.agents is {recipe.agents}"
        raise ConfigError(problem, "recipe.agents", "give 1; rlsync train starts populations")

    # Workers act with the network of the loss: there is no copy that could be left behind.
    network = make_network(recipe, run.spaces)
    loss = make_loss(recipe, network).to(run.device)
    optimizer: optim.Optimizer
    if recipe.optimizer == "adam":
        optimizer = optim.Adam(loss.parameters(), recipe.lr, eps=recipe.adam_eps)
    else:
        optimizer = optim.RMSprop(loss.parameters(), recipe.lr, recipe.rms_alpha, recipe.rms_eps)
    settings = parts.trainer_settings(run)

    # From here on workers run, so whatever fails has to end them.
    collector = make_collector(run, network)
    try:
        trainer = Trainer(
            **settings,
            collector=collector,
            loss_module=loss,
            optimizer=optimizer,
            optim_steps_per_batch=1,
        )
        scheduler = parts.annealing(run, optimizer)
        if scheduler is not None:
            LRSchedulerHook(scheduler).register(trainer)
        normalize(trainer, run, loss)
        register_hooks(trainer, run, collector, network)
    except BaseException:
        collector.shutdown()
        raise
    return trainer


def make_network(recipe: ImpalaConfig, spaces: parts.Spaces) -> ImpalaNet:
    return ImpalaNet(
        spaces.observations,
        head_for(spaces.player_actions()),
        clip=recipe.normalize.clip_of_observations,
        bfloat16=recipe.update_dtype == BFLOAT16,
        **vars(recipe.model),
    )


def make_loss(recipe: ImpalaConfig, network: ImpalaNet) -> ImpalaLoss:
    return ImpalaLoss(network, **vars(recipe.loss_settings()))


def workers_player(recipe: ImpalaConfig, network: ImpalaNet) -> ImpalaPlayer:
    """It records what a trust region reads, if there is one."""
    return network.player(store_params=recipe.loss_settings().trust_region is not None)


def make_collector(run: Run[ImpalaConfig], network: ImpalaNet) -> RolloutCollector:
    recipe = run.recipe
    settings = replace(
        collect_settings(run),
        overlap=recipe.overlap,
        slots=recipe.slots,
        dtype=parts.workers_dtype(run.config.sync),
        storing_device=run.device,
        restarts=Restarts(recipe.max_restarts),
    )
    return run.place.collector(workers_player(recipe, network), settings)


def normalize(trainer: Trainer, run: Run[ImpalaConfig], loss: ImpalaLoss) -> None:
    """Register what counts numbers and returns, if they are normalised; the network counts pixels itself."""
    recipe = run.recipe
    observations = run.spaces.observations
    has_numbers = recipe.normalize.observations and bool(observations.features)
    if not (has_numbers or recipe.normalize.rewards):
        return
    statistics = NormalizeUnrolls(recipe.normalize, observations, recipe.gamma, pictures=False)
    statistics.register(trainer)
    loss.scaled = statistics.scaled


def register_hooks(
    trainer: Trainer, run: Run[ImpalaConfig], collector: RolloutCollector, network: ImpalaNet
) -> None:
    recipe = run.recipe
    replay = run.recipe.replay
    if replay.ratio:
        seed = run.config.seed
        shared = run.shared
        unrolls: UnrollReplay | SharedReplay
        if shared is None:
            agent = 0
            unrolls = UnrollReplay(replay.capacity_steps, path=replay.path, seed=seed)
        else:
            agent = shared.agent
            unrolls = SharedReplay(
                shared, collector.player.records, lambda: collector.last_workers, seed
            )
        mix = ReplayMix(unrolls, replay.ratio, min_steps=replay.min_steps, agent=agent)
        MixReplayed(mix, keep_contents=replay.checkpointed).register(trainer)
    LogPolicyLag(parts.register_sync(trainer, run)).register(trainer)
    EpisodeReturns(recipe.target_return, recipe.target_episodes).register(trainer)
    if recipe.evaluation.every_frames:
        greedy = in_dtype(network.player(deterministic=True), parts.workers_dtype(run.config.sync))
        parts.make_evaluator(run, collector, greedy).register(trainer)
    run.place.watch(trainer)


def shared_replay(
    configs: Sequence[Config], spaces: parts.Spaces
) -> tuple[shared_file.SharedFile, SharedReplayHandle]:
    """The replay of agents with these configs; ConfigError if their rollouts differ, or it is too large."""
    recipes = list(map(ImpalaConfig.of, configs))
    envs = configs[0].env.num_envs
    layouts = set()
    capacity = 0
    for recipe in recipes:
        player = workers_player(recipe, make_network(recipe, spaces))
        shape = RolloutShape(recipe.unroll_length, envs)
        layouts.add(shape.layout(player))
        capacity += recipe.replay.capacity_steps
    if len(layouts) > 1:
        problem = "the rollouts of these agents differ, and one replay cannot hold them"
        raise ConfigError(
            problem, "recipe.vary", "vary no lengths of unrolls, and nothing that rollouts record"
        )
    # All lay their rollouts out alike, so the last player and shape are as good as any.
    return made_replay(player, shape, capacity, recipes[0].replay.max_bytes, len(configs))


def acting(run: Run[ImpalaConfig], deterministic: bool) -> parts.Acting:
    network = make_network(run.recipe, run.spaces)
    return parts.Acting(network, network.player(deterministic=deterministic))


RECIPE = parts.Recipe("impala", ImpalaConfig, parts.ON_POLICY.probe, build, acting)
