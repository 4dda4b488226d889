"""What a user's mistake is told: one sentence for each, by the page of the docs whose reader makes it.

Each error has three lines, what, where and cure. The words here are those that show the way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.trainers import Trainer

import rlsync
from rlsync import (
    BoardScheme,
    BoundStaleness,
    ConfigError,
    Every,
    Forkserver,
    LogPolicyLag,
    LogReceipts,
    RayBoardScheme,
    Source,
    StepsAhead,
    Stop,
    SyncWeights,
    UpdateWeights,
    VerifySync,
    WatchWorkers,
    WeightBoard,
)
from rlsync.core.errors import RlsyncError
from rlsync.runs.cli.main import main
from rlsync.torchrl_plugin.compat.stamps import _make_room_for_stamps
from tests.tools.parts import make_collector, make_counting_env, make_policy, make_ppo_trainer, make_workers
from tests.tools.running import ACTOR, in_three_lines, running

#: What is typed -> the words that are shown. The words of one group are checked together, by one command.
TYPED: dict[str, dict[str, str]] = {
    "words, from README and the quickstart": {
        "recipe:dqn": "it has no =",
        "recipe=pppo": "did you mean 'ppo'?",
        "env=HalfCheetah-v5": "for an environment by its id write env.id=HalfCheetah-v5",
        "seed=0,1": "add -m to run them all",
        "logger=wandbb": "did you mean 'wandb'?",
        "sync.map[0].source=x": "an entry of a list goes by its number: sync.map.0.source=",
    },
    "keys, from the pages about recipes, resuming, loggers and devices": {
        "lr=0.1": "did you mean 'recipe.lr'?",
        "collector.workers=4": "did you mean 'collector.num_workers'?",
        "sync.map.policy=loss_module.actor_network": "'sync.map=[{destination:policy,source:PATH}]'",
        "sync.map.actor=": "sync.map.0.source=PATH",
        "sync.when.unit=steps": "did you mean 'optim_steps'?",
        "sync.verify_every_s=0": "an interval is a positive number",
        "resume=nowhere": "give a run folder that has a checkpoint/ in it",
        "logger.kwargs.project=x": "write +logger.kwargs.project=x",
        "learner.device=gpu": "give cpu, or an accelerator, for example cuda or cuda:1",
        "recipe.evaluation.video_every=1": "give recipe.evaluation.every_frames, or video_every=null",
    },
    "a cluster": {
        "cluster=ray": "",
        "collector.lag=2": "or null, or cluster=none",
        "collector.kind=async": "collector.lag=null, with which nobody waits (async)",
        "cluster.address=10.0.0.1": "give HOST:PORT of its head node",
    },
    "actions of another kind": {
        "recipe=dqn": "",
        "env=pendulum": "any observation and one discrete action, like CartPole-v1",
    },
    "an environment of one's own": {"env.id=my_envs:Point-v0": "name the folder that holds it in PYTHONPATH"},
    "no trigger": {"sync.when.every=null": "give one of them, for example sync.when.every=1"},
    "keys below a value": {
        "recipe.evaluation=${seed}": "",
        "recipe.evaluation.every_frames=%": "rlsync train --cfg job prints all keys",
    },
    "what Hydra itself stumbles over": {"hydra/launcher=null": "rlsync train --cfg job prints all keys"},
    "no list for Hydra": {"hydra.searchpath=...": "hydra.searchpath must be a list of strings"},
    "a number for a list": {"recipe.hidden=64": "a list is written in brackets: recipe.hidden=[64]"},
    "a map in braces": {"sync.map={policy:x}": "'sync.map=[{destination:policy,source:PATH}]'"},
    "a path for a map": {"sync.map=loss_module.actor_network": "sync.map.0.source=PATH"},
    "an option that is a key": {"--seed=3": "keys have no dashes: seed=3"},
    "a key that looks like an option": {"--resume=x": "keys have no dashes: resume=x"},
    "an option with a typo": {"--config-dr": "did you mean '--config-dir'?"},
}

#: Other verbs than check.
VERBS = {
    "trian": "did you mean 'train'?",
    "plan recipe=dqn": "give rlsync check the same words",
    "bench": "rlsync doctor says what a publish costs here",
    "train –config-dir own": "begins with the dash of a text editor",
    "check –recipe=dqn": "write --recipe=dqn, or recipe=dqn if it is a key",
    "cp ppo": "did you mean 'recipe/ppo'?",
    "ls recipee": "did you mean 'recipe'?",
    "status nowhere": "name the folder that rlsync train printed as 'run'",
    "eval nowhere": "name the folder that rlsync train printed as 'run'",
    "plot nowhere": "name the folder that rlsync train printed as 'run'",
    "explain nofile.py:build": "no file 'nofile.py'",
    "doctor --trainer nofile.py": "give FILE.py:FUNCTION",
    "check recipe.total_frames=0": "give a number > 0",
}


def said_of(line: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(line) == 2
    said = "".join(capsys.readouterr())
    assert "  cure   " in said, said
    return said


@pytest.mark.seconds
@pytest.mark.parametrize("group", TYPED)
def test_what_is_typed_wrongly_is_told_with_its_cure(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = said_of(["check", *TYPED[group]], capsys)
    for typed, words in TYPED[group].items():
        assert words in said, f"{typed}:\n{said}"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("typed", VERBS)
def test_a_verb_that_is_given_something_wrong_tells_the_cure(
    typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert VERBS[typed] in said_of(typed.split(), capsys)
    assert list(tmp_path.iterdir()) == []


def in_process(**options: object) -> Trainer:
    actor = make_policy()
    acting = copy.deepcopy(actor)
    if options:
        return make_ppo_trainer(
            Collector(make_counting_env, acting, frames_per_batch=20, total_frames=-1), actor
        )
    return make_ppo_trainer(make_collector(acting), actor)


def with_map(destination: object, source: object) -> Callable[[Trainer], object]:
    return lambda trainer: SyncWeights({destination: source}).register(trainer)


def with_source(*given: object, **options: object) -> Callable[[Trainer], object]:
    return lambda trainer: SyncWeights({"policy": Source(*given, **options)}).register(trainer)


def lag_without_stamps(_: Trainer) -> None:
    trainer = in_process(stamped=False)
    sync = SyncWeights(ACTOR)
    sync.register(trainer)
    LogPolicyLag(sync).register(trainer)


def unbound(trainer: Trainer) -> None:
    SyncWeights(ACTOR)()


def at_a_stage_with_arguments(_: Trainer) -> None:
    trainer = in_process()
    SyncWeights(ACTOR, trainer=trainer)("a batch")


def twice(_: Trainer) -> None:
    trainer = in_process()
    SyncWeights(ACTOR).register(trainer)
    SyncWeights(ACTOR).register(trainer)


#: What is written in Python -> the words that are shown.
WRITTEN: dict[str, tuple[Callable[[Trainer], object], str]] = {
    # own trainer, several destinations
    "a loss in place of the trainer": (
        lambda t: SyncWeights(ACTOR).register(t.loss_module),
        "needs a Trainer, got a ClipPPOLoss",
    ),
    "a collector in place of the trainer": (
        lambda t: SyncWeights(ACTOR).register(t.collector),
        "without one, publish by collector.update_policy_weights_()",
    ),
    "a module in place of its path": (
        lambda t: with_map("policy", t.loss_module.actor_network)(t),
        "a path is a string, got ProbabilisticActor",
    ),
    "a source without the loss": (
        with_map("policy", "actor_network"),
        "did you mean 'loss_module.actor_network'?",
    ),
    "a part of a name": (with_map("policy", "actor"), "did you mean 'loss_module.actor_network'?"),
    "half of a name": (with_map("policy", "loss.actor_network"), "did you mean 'loss_module'?"),
    "a typo in the source": (with_map("policy", "loss_module.actor_netwrk"), "did you mean 'actor_network'?"),
    "a path that begins with the trainer": (
        with_map("policy", "trainer.loss_module.actor_network"),
        "leave out 'trainer'",
    ),
    "a path that begins with self": (
        with_map("policy", "self.loss_module.actor_network"),
        "leave out 'self'",
    ),
    "a destination that begins with the collector": (
        with_map("collector.policy", "loss_module.actor_network"),
        "leave out 'collector'",
    ),
    "a map the wrong way round": (
        with_map("loss_module.actor_network", "policy"),
        "write {'policy': 'loss_module.actor_network'}",
    ),
    "a destination that is called after the network": (
        with_map("actor", "loss_module.actor_network"),
        "the collector has: env, policy",
    ),
    "a map of one string": (lambda t: SyncWeights("policy").register(t), "write {'policy': "),
    "a network as the map": (
        lambda t: SyncWeights(t.loss_module.actor_network).register(t),
        "ProbabilisticActor(...)",
    ),
    "the critic as the source": (
        with_map("policy", "loss_module.critic_network"),
        "name the source that has it",
    ),
    "an optimizer as the source": (with_map("policy", "optimizer"), "name an nn.Module"),
    "a call in a path": (with_map("policy", "loss_module.actor_network()"), "character 26, at '('"),
    "a slash in a path": (with_map("policy", "loss_module/actor_network"), "write '.' before a name"),
    "a second hook": (twice, "put all destinations of one collector into one map"),
    "a hook without a trainer": (unbound, "call hook.register(trainer)"),
    "a stage with arguments": (at_a_stage_with_arguments, "post_steps, post_optim or post_epoch"),
    # half precision, exclusions
    "one pattern that is no tuple": (
        with_source("loss_module.actor_network", exclude="*.bias"),
        "write exclude=('*.bias',)",
    ),
    "no patterns": (with_source("loss_module.actor_network", idle=None), "idle takes several patterns"),
    "a number as a pattern": (
        with_source("loss_module.actor_network", exclude=[3]),
        "write exclude=('*.bias',)",
    ),
    "a pattern with a typo": (
        with_source("loss_module.actor_network", exclude=("*.wieght",)),
        "no leaf is named like '*.wieght'",
    ),
    "a dtype with a typo": (with_source("loss_module.actor_network", "bfloat61"), "dtype='bfloat16'"),
    # triggers
    "a number as the trigger": (lambda _: SyncWeights(ACTOR, when=4), "for example when=Every(4, "),
    "a unit that is none": (lambda _: Every(4, "optim_step"), "did you mean 'optim_steps'?"),
    "an interval of zero": (lambda _: Every(0), "for example Every(1, 'batches')"),
    "a trigger and a number": (lambda _: Every(4) & 3, "combine triggers with triggers"),
    "a negative number of steps": (lambda _: StepsAhead(-1), "for example StepsAhead(50)"),
    # asynchronous collection, metrics, verification
    "a trainer in place of the hook": (lambda t: LogReceipts(t), "needs a SyncWeights, got a PPOTrainer"),
    "a hook that is registered nowhere": (
        lambda t: LogReceipts(SyncWeights(ACTOR)).register(t),
        "register it on the same trainer first",
    ),
    "frames without stamps": (lag_without_stamps, "pass track_policy_version=True to the collector"),
    "a replay buffer that is laid out without stamps": (
        lambda _: _make_room_for_stamps(TensorDict({"observation": torch.zeros(4, 3)}, [4])),
        "entries 'policy_version' and ('next', 'policy_version')",
    ),
    "an action with a typo": (
        lambda _: BoundStaleness(SyncWeights(ACTOR), 1, "dorp"),
        "choose one of: drop, wait, raise",
    ),
    "a bound that is no number of versions": (
        lambda _: BoundStaleness(SyncWeights(ACTOR), 1.5),
        "in versions is a whole number of at least 0, got 1.5",
    ),
    "a number for verification": (
        lambda _: VerifySync(SyncWeights(ACTOR), 10),
        "for example when=Every(100, 'batches')",
    ),
    "a background publish in one process": (
        lambda t: SyncWeights(ACTOR, background=True).register(t),
        "use a process collector with a BoardScheme",
    ),
    # process collectors
    "a board in one process": (
        lambda _: Collector(
            make_counting_env,
            make_policy(),
            frames_per_batch=20,
            weight_sync_schemes={"policy": BoardScheme()},
        ),
        "an in-process Collector needs no scheme",
    ),
    "workers to watch where there are none": (
        lambda t: WatchWorkers().register(t),
        "pass weight_sync_schemes={'policy': BoardScheme()}",
    ),
    "a timeout in words": (lambda _: WatchWorkers("60"), "a number of seconds above zero, got '60'"),
    "an adoption mode with a typo": (lambda _: BoardScheme("allias"), "choose one of: alias, copy"),
    "an adoption mode that is none, on Ray": (
        lambda _: RayBoardScheme("both"),
        "no adoption mode 'both'\n  where  RayBoardScheme(adopt='both')\n  cure   choose one of: alias, copy",
    ),
    "a moment with a typo": (lambda _: BoardScheme(adopt_at="step"), "choose one of: rollout, policy_call"),
    "a board without slots": (lambda _: WeightBoard(max_slots=0), "allow 2 * workers + 2"),
    "a module to preload that is none": (lambda _: Forkserver(preload=["nowhere"]), "no module 'nowhere'"),
    "a loss that is to stop": (lambda t: Stop(t.loss_module), "Stop needs a Trainer, got a ClipPPOLoss"),
    # from UpdateWeights, Dreamer
    "a map without a trainer": (
        lambda t: UpdateWeights(t.collector, 1, weight_update_map=ACTOR),
        "pass trainer=",
    ),
    "a loss without a world model": (
        lambda t: rlsync.dreamer_map(t.loss_module, make_policy()),
        "for others write the map by hand",
    ),
}


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    return in_process()


@pytest.mark.parametrize("mistake", WRITTEN)
def test_what_is_written_wrongly_is_told_with_its_cure(mistake: str, trainer: Trainer) -> None:
    write, words = WRITTEN[mistake]
    with pytest.raises(RlsyncError) as told:
        write(trainer)
    assert words in str(told.value)
    assert in_three_lines(told.value)
    assert all(len(line) < 400 for line in str(told.value).splitlines())


@pytest.fixture
def one_worker() -> Iterator[MultiSyncCollector]:
    policy = make_policy()
    with running(
        make_workers(MultiSyncCollector, policy, schemes={"policy": BoardScheme()}, workers=1)
    ) as collector:
        yield collector


@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_scheme_that_a_second_collector_is_given_is_told(one_worker: MultiSyncCollector) -> None:
    scheme = one_worker._weight_sync_schemes["policy"]
    with pytest.raises(RlsyncError, match="was given twice") as told:
        make_workers(MultiSyncCollector, make_policy(), schemes={"policy": scheme}, workers=1)
    assert "make one for each collector" in told.value.cure


@pytest.mark.processes
@pytest.mark.usefixtures("fork_workers")
def test_a_scheme_under_a_name_that_the_collector_does_not_have_is_told() -> None:
    board = WeightBoard()
    schemes = {"policy": board.scheme(), "actor": board.scheme()}
    with pytest.raises(RlsyncError, match="no 'actor' on the worker's collector") as told:
        make_workers(MultiSyncCollector, make_policy(), schemes=schemes, workers=1)
    assert "did you mean" not in str(told.value)
    assert "the worker's collector has: env, policy" in str(told.value)


@pytest.mark.parametrize("key", ["policy[0]", "policy.module[0]", "actor"])
def test_schemes_that_bring_the_policy_no_weights_are_told_before_a_worker_starts(key: str) -> None:
    with pytest.raises(ConfigError, match="no scheme brings the workers the weights") as told:
        make_workers(MultiSyncCollector, make_policy(), schemes={key: BoardScheme()}, workers=1)
    assert in_three_lines(told.value)
    assert f"weight_sync_schemes=['{key}'] of MultiSyncCollector" in told.value.where


@pytest.mark.processes
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("source=loss_module.actor_netwrk", "did you mean 'actor_network'?"),
        ("destination=polcy", "'policy'?"),
    ],
)
def test_a_path_that_leads_nowhere_is_found_by_check_as_by_the_start_of_a_run(
    key: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"sync.map.0.{key}"]) == 2
    assert words in capsys.readouterr().out


ENVIRONMENT = """
import gymnasium, numpy

class Narrow(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    first, then = {first}, {then}

    def reset(self, seed=None, options=None):
        return numpy.zeros(self.first, numpy.float32), {{}}

    def step(self, action):
        return numpy.zeros(self.then, numpy.float32), 1.0, False, False, {{}}

gymnasium.register("Narrow-v0", Narrow)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("recipe", "first", "then", "method"),
    [("impala", 5, 4, "reset"), ("ppo", 4, 5, "step")],
    ids=["reset", "step"],
)
def test_an_environment_of_ones_own_is_played_by_check_as_by_a_run(
    recipe: str,
    first: int,
    then: int,
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An observation has another shape than its space."""
    name = f"narrow_env_{recipe}"
    (tmp_path / f"{name}.py").write_text(ENVIRONMENT.format(first=first, then=then))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    words = [f"recipe={recipe}", f"env.id={name}:Narrow-v0", "collector.num_workers=1"]
    assert main(["check", *words]) == 2
    assert f"answers {method}() with observation = [5] of float32" in capsys.readouterr().out
