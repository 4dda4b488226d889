"""A ladder of exploration rates: each worker explores at its own power of the published rate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict.nn import TensorDictSequential

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.players.q import EpsilonLadder
from rlsync.runs.recipes import dqn
from rlsync.runs.recipes.checks import check
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.run_files import CHECKPOINT
from rlsync.runs.recipes.settings import CollectorConfig
from rlsync.runs.recipes.spaces import DISCRETE
from tests.runs.recipes.test_off_policy import built, small
from tests.runs.recipes.test_recipes import trained


def test_each_worker_explores_at_its_own_power_of_the_published_rate() -> None:
    config = small("dqn", epsilon_start=0.5, ladder_alpha=7.0)
    spaces = DISCRETE.probe(config.env)
    actor, greedy = dqn.make_policy(DQNConfig.of(config), spaces)
    policy, ladder, count = TensorDictSequential(actor, greedy), EpsilonLadder(alpha=7.0), 4000
    network = actor[0].module
    explores = dqn.player_of(policy, network, spaces, ladder=ladder, rate=greedy)
    evaluates = dqn.player_of(policy, network, spaces)
    seen, begins, generator = torch.randn(count, 4), torch.ones(count, dtype=torch.bool), torch.Generator()
    rates = []
    with torch.inference_mode():
        likeliest = network(seen).argmax(-1)
        for worker in range(3):
            state = explores.begin(count, generator, worker, 3)
            action = explores.act(seen, begins, torch.zeros(count), state, generator).action
            rates.append(float((action != likeliest).float().mean()))
        assert torch.equal(evaluates.act(seen, begins, torch.zeros(count), {}, generator).action, likeliest)
    meant = [EpsilonLadder(0.5, 7.0).of(worker, 3) / 2 for worker in range(3)]
    assert rates == pytest.approx(meant, abs=0.03), "half of the random actions are the likeliest one"


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


def test_a_single_worker_is_refused() -> None:
    config = small("dqn", ladder_alpha=7.0)
    config.collector = CollectorConfig(num_workers=1, frames_per_batch=64)
    with pytest.raises(ConfigError, match="one worker makes no ladder"):
        check(config)
