"""The recipes with TorchRL's losses on one Ray node: test_cluster.py runs these tests in their own network.

They share one Ray. Each builds a recipe, trains some updates, and ends its workers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.trainers import Trainer

from rlsync.core.plan import POLICY
from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.player import Player, materialised
from rlsync.runs.actors.players.prefill import PREFILL
from rlsync.runs.cli.main import main
from rlsync.runs.recipes import registry
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.hooks.steering import KeepPace
from rlsync.runs.recipes.replay.settings import PaceConfig
from rlsync.runs.recipes.sac import CrossQConfig, SACConfig
from rlsync.runs.recipes.settings import (
    ClusterConfig,
    CollectorConfig,
    Config,
    EnvConfig,
    LoggerConfig,
    NormalizeConfig,
    PPOConfig,
    RecipeConfig,
)
from rlsync.runs.recipes.sync_settings import RouteConfig, SyncConfig, WhenConfig
from rlsync.runs.recipes.td3 import TD3Config
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from rlsync.transport.rules import keyed
from tests.tools.parts import made_envs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("one_node"),
]

WORKERS, FRAMES = 2, 64
EVERY_STEP = WhenConfig(every=1, unit="optim_steps")
VALUE_GREEDY = [
    RouteConfig("policy.module[0]", "loss_module.value_network"),
    RouteConfig("policy.module[1]", "greedy_module"),
]

#: The spread of the observations, in the network of a worker.
STD = "module.0.module.0.module.observations.std"


def config(recipe: RecipeConfig, env: str, lag: int | None, sync: SyncConfig, num_envs: int = 1) -> Config:
    return Config(
        seed=3,
        env=EnvConfig(env, num_envs),
        collector=CollectorConfig(WORKERS, FRAMES, lag),
        cluster=ClusterConfig(kind="ray"),
        sync=sync,
        logger=LoggerConfig(kind="none"),
        recipe=recipe,
    )


Says = Callable[[Player, Tensor], Tensor]  #: what a player says of observations
Judge = Callable[[Tensor, TensorDictBase], object]  #: asserts that steps are of a player that says this


def acted(player: Player, seen: Tensor) -> Tensor:
    """The actions of a player that draws nothing."""
    count, generator = len(seen), torch.Generator().manual_seed(0)
    begins, reward = torch.ones(count, dtype=torch.bool), torch.zeros(count)
    state = player.begin(count, generator)
    return player.act(seen, begins, reward, state, generator).action


def values(player: Player, seen: Tensor) -> Tensor:
    return player.network(seen)  # type: ignore[attr-defined, no-any-return]


def logits(player: Player, seen: Tensor) -> Tensor:
    return player._network(seen)  # type: ignore[attr-defined, no-any-return]


def are_recorded(said: Tensor, steps: TensorDictBase) -> None:
    """The log-probability of each action is the one that its step has."""
    expected = said.log_softmax(-1).gather(-1, steps["action"].argmax(-1, keepdim=True)).squeeze(-1)
    torch.testing.assert_close(steps["action_log_prob"], expected, rtol=1e-4, atol=1e-4)


def are_taken(said: Tensor, steps: TensorDictBase) -> None:
    torch.testing.assert_close(steps["action"], said, rtol=1e-4, atol=1e-4)


def are_the_largest(said: Tensor, steps: TensorDictBase) -> None:
    assert torch.equal(steps["action"].argmax(-1), said.argmax(-1))


class Witness:
    """Keeps every version that is published, and compares each frame with what its version would have said.

    Args:
        trainer: of a run on a cluster.
        says: what the player of a version says of observations.
        judge: compares it with the steps that the version has made. Random ones are left out.
    """

    def __init__(self, trainer: Trainer, says: Says, judge: Judge) -> None:
        collector = trainer.collector
        assert isinstance(collector, ClusterCollector)
        self.collector = collector
        self.batches: list[TensorDictBase] = []
        self._says = says
        self._judge = judge
        self._acts: Player = materialised(copy.deepcopy(collector.worker_player))
        self._versions: dict[int, dict[Any, Tensor]] = {}
        self._keep()
        publish = collector.transport.publish

        def publish_and_keep(*given: Any, **named: Any) -> int | None:
            version = publish(*given, **named)
            self._keep()
            return version

        collector.transport.publish = publish_and_keep  # type: ignore[method-assign]
        trainer.register_op("batch_process", self.look)

    def _keep(self) -> None:
        newest = self.collector.transport.newest_leaves()
        assert newest is not None
        self._versions[self.collector.transport.newest_stamp.version] = {
            key: tensor.clone() for key, tensor in keyed(*newest).items()
        }

    def of(self, version: int, destination: str, name: str) -> Tensor:
        return self._versions[version][destination, name]

    def would_say(self, version: int, observation: Tensor) -> Tensor:
        for destination, module in self._acts.modules.items():
            for name, tensor in module.state_dict().items():
                tensor.copy_(self.of(version, destination, name))
        with torch.inference_mode():
            return self._says(self._acts.by_weights(), observation)

    def was_random(self, version: int) -> bool:
        return PREFILL in self._acts.modules and bool(self.of(version, PREFILL, "random"))

    def look(self, batch: TensorDictBase) -> TensorDictBase:
        self.batches.append(batch.clone())
        steps = batch.reshape(-1)
        for version in steps["policy_version"].unique().tolist():
            if not self.was_random(version):
                made = steps[steps["policy_version"] == version]
                self._judge(self.would_say(version, made["observation"]), made)
        return batch

    def ends_well(self) -> None:
        """Versions were told apart, and several acted."""
        frames = torch.cat([batch.reshape(-1) for batch in self.batches])
        acted = frames["policy_version"].unique().tolist()
        assert len(acted) >= 3
        seen = frames["observation"]
        apart = (self.would_say(acted[0], seen) - self.would_say(acted[-1], seen)).abs().max()
        assert apart > 1e-2, "the versions are too much alike for this test"


def trained(settings: Config, says: Says, judge: Judge) -> tuple[Trainer, Witness]:
    trainer = registry.recipe_named(settings.recipe.name).build(settings)
    try:
        witness = Witness(trainer, says, judge)
        trainer.train()
    finally:
        trainer.collector.shutdown()
    witness.ends_well()
    return trainer, witness


@pytest.mark.thorough
def test_dqn_fills_its_buffer_from_a_node_and_each_frame_was_made_by_the_version_it_names() -> None:
    recipe = DQNConfig(
        total_frames=16 * FRAMES,
        lr=1e-2,
        hidden=[16],
        pace=PaceConfig(ratio=0.25, prefill=2 * FRAMES),
        epsilon_start=1e-9,
        epsilon_end=1e-9,
        normalize=NormalizeConfig(observations=True),
    )
    sync = SyncConfig(map=VALUE_GREEDY, when=WhenConfig(every=4, unit="optim_steps"))
    settings = config(recipe, "CartPole-v1", None, sync, num_envs=2)
    trainer, witness = trained(settings, values, are_the_largest)
    assert trainer.collected_frames == 16 * FRAMES
    (pace,) = (module for module in registered_modules(trainer) if isinstance(module, KeepPace))
    assert pace.updates == 14 * FRAMES // 4
    frames = torch.cat([batch.reshape(-1) for batch in witness.batches])
    stamps = frames["policy_version"]
    random = torch.tensor([witness.was_random(version) for version in stamps.tolist()])
    assert random[: 2 * FRAMES].all(), "the prefill acts at random"
    actions = frames["action"].argmax(-1)[random].float()
    assert 0.3 < float(actions.mean()) < 0.7
    assert (~random).any()
    stds = [witness.of(version, POLICY, STD) for version in stamps.unique().tolist()]
    assert not torch.equal(stds[0], stds[-1]), "the statistics travel with the weights"


@pytest.mark.thorough
@pytest.mark.parametrize("recipe", [SACConfig, CrossQConfig, TD3Config])
def test_nodes_wait_for_the_learner_and_each_batch_is_of_the_newest_version(
    recipe: type[SACConfig | TD3Config],
) -> None:
    sizes: dict[str, Any] = {"total_frames": 8 * FRAMES, "lr": 1e-2, "hidden": [16]}
    sizes |= {"pace": PaceConfig(ratio=0.25, prefill=FRAMES), "compile": "off"}
    if recipe is TD3Config:
        sizes["exploration_noise"] = 0.0
    settings = config(recipe(**sizes), "Pendulum-v1", 0, SyncConfig(when=EVERY_STEP))
    # sac and crossq draw their actions, and record nothing by which they could be told.
    _, witness = trained(settings, acted, are_taken if recipe is TD3Config else lambda said, steps: None)
    stamps = [batch["policy_version"].unique().tolist() for batch in witness.batches]
    updates = FRAMES // 4  # after each batch but the first, which is the prefill
    assert stamps == [[2], *([2 + updates * batch] for batch in range(7))]


@pytest.mark.thorough
def test_ppo_learns_from_whole_batches_of_the_newest_version() -> None:
    recipe = PPOConfig(total_frames=4 * FRAMES, lr=1e-2, hidden=[16], num_epochs=2, batch_size=32)
    settings = config(recipe, "", 0, SyncConfig(), num_envs=2)
    settings.env.make = f"{made_envs.MODULE}:single"
    settings.env.wrappers = [{"name": f"{made_envs.MODULE}:Scaled", "factor": 2.0}]
    settings.env.frame_stack = 2
    _, witness = trained(settings, logits, are_recorded)
    stamps = [batch["policy_version"].unique().tolist() for batch in witness.batches]
    assert stamps == [[2], [3], [4], [5]], "one version a batch, and the newest one"


@pytest.mark.thorough
def test_td3_ends_by_an_evaluation_on_the_learners_machine_and_is_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    words = [
        "recipe=td3",
        "cluster=ray",
        "collector.lag=null",
        "logger=none",
        "recipe.hidden=[16]",
        "recipe.pace.prefill=128",
        "recipe.pace.ratio=0.25",
        "recipe.total_frames=1000000",
        "recipe.target_return=-100000",  # which the first evaluation reaches
        "recipe.evaluation.every_frames=64",
        "recipe.evaluation.episodes=1",
    ]
    assert main(["train", *words, f"run_dir={first}"]) == 0
    said = capsys.readouterr().out
    ended = re.search(r"^stopped: target return reached  frames ([\d,]+)", said, re.MULTILINE)
    assert ended, said
    assert len((first / "evaluations.csv").read_text().splitlines()) >= 2, "a header and a result"
    assert (first / "cluster.json").exists()
    goal = int(ended[1].replace(",", "")) + 256
    more = [f"recipe.total_frames={goal}", "recipe.target_return=null", "recipe.evaluation.every_frames=0"]
    assert main(["train", f"resume={first}", *more, f"run_dir={second}"]) == 0
    said = capsys.readouterr().out
    assert f"frames {ended[1]}" in said, "it goes on from the checkpoint"
    assert re.search(rf"^stopped: total_frames collected  frames {goal:,}", said, re.MULTILINE), said
