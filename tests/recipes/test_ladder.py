"""A ladder of exploration rates: each worker explores at its own power of the published rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlsync.core.errors import ConfigError
from rlsync.recipes import dqn
from rlsync.recipes.checks import check
from rlsync.recipes.dqn import DQNConfig
from rlsync.recipes.place import EXPONENT
from rlsync.recipes.replay.settings import PaceConfig
from rlsync.recipes.run_files import CHECKPOINT
from rlsync.recipes.settings import CollectorConfig
from rlsync.recipes.spaces import DISCRETE, make_env
from rlsync.workers.players.q import EpsilonLadder
from tests.recipes.test_off_policy import built, small
from tests.recipes.test_recipes import trained

#: Worker 0 takes random actions only, and worker 1 hardly any: 0.9 ** 100 is 0.00003.
STEEP = {"epsilon_start": 0.9, "ladder_base": 0.9, "ladder_alpha": 99.0}


def test_the_module_explores_at_the_power_that_each_environment_says() -> None:
    config = small("dqn", epsilon_start=0.5, ladder_alpha=7.0)
    actor, greedy = dqn.make_policy(DQNConfig.of(config), DISCRETE.probe(config.env))
    exponents = torch.tensor([1.0, 4.5, 8.0]).repeat_interleave(4000)
    values = torch.tensor([[1.0, 0.0]]).expand(12_000, 2)
    torch.manual_seed(0)
    said = TensorDict({"action": values.clone(), EXPONENT: exponents[:, None]}, [12_000])
    with set_exploration_type(ExplorationType.RANDOM):
        other = greedy(said)["action"][:, 1].float().reshape(3, 4000).mean(1)
    ladder = EpsilonLadder(0.5, 7.0)
    meant = torch.tensor([ladder.of(worker, 3) / 2 for worker in range(3)])
    torch.testing.assert_close(other, meant, rtol=0, atol=0.03)
    seen = TensorDict({"observation": torch.zeros(3, 4)}, [3])
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert torch.equal(greedy(actor(seen))["action"], actor(seen)["action"]), "evaluations have no rung"


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "num_envs"), [("sync", 1), ("sync", 2), ("async", 2)])
@pytest.mark.usefixtures("fork_workers")
def test_each_worker_explores_at_its_own_rate_in_all_of_its_environments(kind: str, num_envs: int) -> None:
    config = small("dqn", kind=kind, num_envs=num_envs, pace=PaceConfig(ratio=0.25, prefill=0), **STEEP)
    batches: list[TensorDict] = []
    trained(built(config), lambda batch: batches.append(batch.reshape(-1)))
    frames = torch.cat(batches)
    greedy = frames["action_value"].argmax(-1) == frames["action"].to(torch.int64).argmax(-1)
    exponents = frames[EXPONENT].squeeze(-1)
    steps = {exponent: greedy[exponents == exponent] for exponent in sorted(set(exponents.tolist()))}
    # An asynchronous run of a few batches may have had them all from one worker.
    assert list(steps) == [1.0, 100.0] or (kind == "async" and steps.keys() < {1.0, 100.0})
    if 100.0 in steps:
        assert bool(steps[100.0].all())
    if 1.0 in steps:
        most = steps[1.0].float().mean()
        assert 0.3 < most < 0.8, "0.55 of the actions, since half of the random ones are greedy by chance"
    assert (frames["next", EXPONENT].squeeze(-1) == exponents).all()


@pytest.mark.thorough
@pytest.mark.usefixtures("fork_workers")
def test_a_resumed_run_goes_on_down_the_ladder(tmp_path: Path) -> None:
    rates = {"epsilon_frames": 1_000, "ladder_alpha": 7.0, "ladder_base": 0.04}
    trained(built(small("dqn", run_dir=tmp_path, **rates)))
    again = built(small("dqn", total_frames=384, **rates))
    again.load_from_file(tmp_path / CHECKPOINT)
    assert float(again.greedy_module.eps) == pytest.approx(1 - 0.96 * 0.256, abs=1e-4)
    trained(again)
    assert float(again.greedy_module.eps) == pytest.approx(1 - 0.96 * 0.384, abs=1e-4)


def test_by_default_a_ladder_ends_at_the_rates_of_ape_x() -> None:
    config = small("dqn", ladder_alpha=7.0, epsilon_frames=10)
    _, greedy = dqn.make_policy(DQNConfig.of(config), DISCRETE.probe(config.env))
    greedy.step(10)
    ends = [float(greedy.eps) ** EpsilonLadder(alpha=7.0).exponent(worker, 4) for worker in range(4)]
    assert ends == pytest.approx([0.4, 0.04716, 0.00556, 0.00066], rel=1e-2)


@pytest.mark.parametrize("rates", [{"ladder_base": 0.0}, {"epsilon_start": 0.2}])
def test_a_ladder_of_zeros_or_one_that_rises_is_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ConfigError) as refused:
        check(small("dqn", ladder_alpha=7.0, **rates))
    assert refused.value.where == "recipe.ladder_base"


def test_a_single_worker_is_refused_and_no_ladder_adds_nothing_to_an_observation() -> None:
    config = small("dqn", ladder_alpha=7.0)
    config.collector = CollectorConfig(num_workers=1, frames_per_batch=64)
    with pytest.raises(ConfigError, match="one worker makes no ladder"):
        check(config)
    env = make_env(config.env)
    assert EXPONENT not in list(env.observation_spec.keys())
    env.close()
