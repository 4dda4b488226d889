"""The recipes with TorchRL's losses on one Ray node: test_cluster.py runs these tests in their own network.

They share one Ray. Each builds a recipe, trains some updates, and ends its workers.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.trainers import Trainer

from rlsync.cli.main import main
from rlsync.core.plan import POLICY
from rlsync.recipes import registry
from rlsync.recipes.dqn import DQNConfig
from rlsync.recipes.hooks.steering import KeepPace
from rlsync.recipes.replay.normalize import NormalizeConfig
from rlsync.recipes.replay.settings import PaceConfig
from rlsync.recipes.sac import SACConfig
from rlsync.recipes.settings import (
    ClusterConfig,
    CollectorConfig,
    Config,
    EnvConfig,
    LoggerConfig,
    PPOConfig,
    RecipeConfig,
)
from rlsync.recipes.sync_settings import RouteConfig, SyncConfig, WhenConfig
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from rlsync.transport.rules import keyed
from rlsync.workers.cluster.collector import TransitionCollector
from rlsync.workers.player import Player, materialised

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


def config(recipe: RecipeConfig, env: str, kind: str, sync: SyncConfig, num_envs: int = 1) -> Config:
    return Config(
        seed=3,
        env=EnvConfig(env, num_envs),
        collector=CollectorConfig(kind, WORKERS, FRAMES),
        cluster=ClusterConfig(kind="ray"),
        sync=sync,
        logger=LoggerConfig(kind="none"),
        recipe=recipe,
    )


class Witness:
    """Keeps every version that is published, and compares each frame with what its version would have said.

    Args:
        trainer: of a run on a cluster.
        said: what the policy writes besides the action, and frames have.
    """

    def __init__(self, trainer: Trainer, said: str) -> None:
        collector = trainer.collector
        assert isinstance(collector, TransitionCollector)
        self.collector = collector
        self.batches: list[TensorDictBase] = []
        self._said = said
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
        with torch.inference_mode(), set_exploration_type(ExplorationType.DETERMINISTIC):
            seen = TensorDict({"observation": observation}, [len(observation)])
            return self._acts.modules[POLICY](seen).get(self._said)

    def look(self, batch: TensorDictBase) -> TensorDictBase:
        self.batches.append(batch.clone())
        steps = batch.reshape(-1)
        for version in steps["policy_version"].unique().tolist():
            made = steps[steps["policy_version"] == version]
            expected = self.would_say(version, made["observation"])
            torch.testing.assert_close(made[self._said], expected, rtol=1e-4, atol=1e-4)
        return batch

    def ends_well(self) -> None:
        """Versions were told apart, and several acted."""
        frames = torch.cat([batch.reshape(-1) for batch in self.batches])
        acted = frames["policy_version"].unique().tolist()
        assert len(acted) >= 3
        seen = frames["observation"]
        apart = (self.would_say(acted[0], seen) - self.would_say(acted[-1], seen)).abs().max()
        assert apart > 1e-2, "the versions are too much alike for this test"


def trained(settings: Config, said: str) -> tuple[Trainer, Witness]:
    trainer = registry.recipe_named(settings.recipe.name).build(settings)
    try:
        witness = Witness(trainer, said)
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
        ladder_alpha=3.0,
        ladder_base=1e-9,
        normalize=NormalizeConfig(observations=True),
    )
    sync = SyncConfig(map=VALUE_GREEDY, when=WhenConfig(every=4, unit="optim_steps"))
    trainer, witness = trained(config(recipe, "CartPole-v1", "async", sync, num_envs=2), "action_value")
    assert trainer.collected_frames == 16 * FRAMES
    (pace,) = (module for module in registered_modules(trainer) if isinstance(module, KeepPace))
    assert pace.updates == 14 * FRAMES // 4
    frames = torch.cat([batch.reshape(-1) for batch in witness.batches])
    greedy = frames["action"].argmax(-1) == frames["action_value"].argmax(-1)
    stamps = frames["policy_version"]
    random = torch.tensor([bool(witness.of(version, "prefill", "random")) for version in stamps.tolist()])
    assert random[: 2 * FRAMES].all(), "the prefill acts at random"
    assert not greedy[random].all()
    assert greedy[~random].all()
    assert (~random).any()
    exponents = frames["exploration_exponent"].unique().tolist()
    assert exponents == [1.0, 4.0], "each worker of the node has a rung of its own"
    stds = [witness.of(version, POLICY, STD) for version in stamps.unique().tolist()]
    assert not torch.equal(stds[0], stds[-1]), "the statistics travel with the weights"


@pytest.mark.thorough
def test_sac_waits_for_the_learner_and_each_batch_is_of_the_newest_version() -> None:
    recipe = SACConfig(
        total_frames=8 * FRAMES, lr=1e-2, hidden=[16], pace=PaceConfig(ratio=0.25, prefill=FRAMES)
    )
    settings = config(recipe, "Pendulum-v1", "sync", SyncConfig(when=EVERY_STEP))
    _, witness = trained(settings, "loc")
    stamps = [batch["policy_version"].unique().tolist() for batch in witness.batches]
    updates = FRAMES // 4  # after each batch but the first, which is the prefill
    assert stamps == [[2], *([2 + updates * batch] for batch in range(7))]


@pytest.mark.thorough
def test_ppo_learns_from_whole_batches_of_the_newest_version() -> None:
    recipe = PPOConfig(total_frames=4 * FRAMES, lr=1e-2, hidden=[16], num_epochs=2, batch_size=32)
    settings = config(recipe, "CartPole-v1", "sync", SyncConfig(), num_envs=2)
    _, witness = trained(settings, "logits")
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
        "collector=async",
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
