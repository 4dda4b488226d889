"""Players of three kinds in the same worker processes: what they record, carry, adopt and are refused for."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torch import Generator, Tensor, nn

from rlsync.core.errors import ConfigError, WorkerLost
from rlsync.core.ledger import Ledger
from rlsync.core.plan import POLICY
from rlsync.runs.actors.devices import CPU
from rlsync.runs.actors.envs.actions import BoxActions, DiscreteActions, MultiDiscreteActions
from rlsync.runs.actors.frames import RolloutShape, check_batch, concatenate
from rlsync.runs.actors.player import (
    Acted,
    Playable,
    Player,
    Record,
    State,
    materialised,
    player_call,
    player_of,
    without_memory,
)
from rlsync.runs.actors.players.q import EpsilonGreedyPlayer, EpsilonLadder
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.actors.replay.mixing import ReplayMix
from rlsync.runs.actors.replay.unrolls import UnrollReplay
from rlsync.runs.actors.supervision import Restarts
from rlsync.runs.evaluation.evaluator import Evaluator
from rlsync.runs.evaluation.play import Score, play
from rlsync.runs.evaluation.process import EvaluationJob, best_in
from rlsync.runs.recipes.impala import Categorical, GymnasiumEnvs, ImpalaNet, make_venv
from rlsync.runs.recipes.impala.recipe import RECIPE
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.settings import CollectorConfig, Config, EnvConfig
from rlsync.sync.acts import examined
from tests.runs.actors.test_envs import LADDER
from tests.runs.actors.test_unroll_collector import (
    CARTPOLE,
    PENDULUM,
    batches_of,
    cartpole_net,
    collecting,
    recomputed,
)
from tests.tools.processes import wait_until
from tests.tools.programs import fresh_python

REPO = Path(__file__).resolve().parents[3]
#: One evaluation, whose process loads gymnasium first; there are up to three.
PLAYED_WITHIN_S = 80.0
TWO = DiscreteActions(2)


def q_net(actions: int = 2, hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, actions))


def make_impala() -> ImpalaNet:
    return cartpole_net(lstm=4, last_action=True, last_reward=True)


def make_uniform() -> Player:
    return UniformPlayer(TWO, (4,))


def make_q() -> Player:
    return EpsilonGreedyPlayer(q_net(), TWO, (4,), ladder=EpsilonLadder(0.5, 1.0))


PLAYERS: dict[str, Callable[[], Player | Playable]] = {
    "impala": make_impala,
    "uniform": make_uniform,
    "q": make_q,
}


def values_of(player: Player | Playable, batch: TensorDictBase) -> dict[str, Tensor]:
    """What a player with these weights records in the steps of a batch."""
    if isinstance(player, ImpalaNet):
        return {"behaviour_log_prob": recomputed(player, batch)[0]}
    if isinstance(player, UniformPlayer):
        return {"behaviour_log_prob": torch.full_like(batch["reward"], -math.log(2))}
    assert isinstance(player, EpsilonGreedyPlayer)
    with torch.no_grad():
        values = player.network(batch["observation"][:-1])
    taken = values.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    return {"taken_value": taken, "max_value": values.amax(-1)}


class Versions:
    """Copies of a player, one with the weights of each version that was published."""

    def __init__(self, collector: Any, player: Player | Playable) -> None:
        self.collector, self.player = collector, player
        self.kept: dict[int, Player | Playable] = {}
        self.keep()

    def keep(self) -> None:
        self.kept[self.collector.policy_version] = copy.deepcopy(self.player)

    def publish_others(self) -> None:
        """Change every weight, and publish."""
        with torch.no_grad():
            for module in player_of(self.player).modules.values():
                for parameter in module.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
        self.collector.update_policy_weights_()
        self.keep()


# ---------------------------------------------------------------------- what acted


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize("adopt", ["alias", "copy"])
@pytest.mark.parametrize("name", PLAYERS)
def test_every_step_records_what_the_weights_of_its_stamp_give(name: str, adopt: str) -> None:
    player = PLAYERS[name]()
    with collecting(player, CARTPOLE, adopt=adopt) as collector:
        versions, seen = Versions(collector, player), set()
        for batch in itertools.islice(collector, 25):
            check_batch(batch, player, ["policy_version"])
            stamps = batch["policy_version"]
            assert (stamps == stamps[0, 0]).all(), "one version acts in a rollout"
            stamp = int(stamps[0, 0])
            for key, expected in values_of(versions.kept[stamp], batch).items():
                torch.testing.assert_close(batch[key], expected, rtol=1e-5, atol=1e-5)
            seen.add(stamp)
            versions.publish_others()
    weights = bool(player_of(player).modules)
    assert collector.policy_version == (26 if weights else 0)
    assert len(seen) > 6 if weights else seen == {0}


class PairPlayer(Player):
    """All weights of two modules are the version; records the least and the greatest, and counts steps."""

    actions = TWO
    observation_shape = (4,)
    observation_dtype = torch.float32
    records = (
        Record("least", (), torch.float32),
        Record("greatest", (), torch.float32, beside=True),
        Record("steps", (1,), torch.float32, per="unroll"),
    )

    def __init__(self) -> None:
        self.encoder, self.actor = nn.Linear(4, 300), nn.Linear(300, 2)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"encoder": self.encoder, "actor": self.actor}

    def publish_as(self, version: int) -> None:
        with torch.no_grad():
            for module in self.modules.values():
                for parameter in module.parameters():
                    parameter.fill_(version)

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        return {"steps": torch.zeros(num_envs, 1)}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        weights = torch.cat([p.flatten() for m in self.modules.values() for p in m.parameters()])
        count = len(observation)
        records = {"least": weights.min().expand(count), "greatest": weights.max().expand(count)}
        steps = state["steps"].masked_fill(is_init.unsqueeze(-1), 0.0) + 1
        return Acted(torch.zeros(count, dtype=torch.int64), records, {"steps": steps})


@pytest.mark.processes
def test_several_modules_are_published_as_one_version() -> None:
    player = PairPlayer()
    player.publish_as(1)
    with collecting(player, CARTPOLE) as collector:
        for version, batch in enumerate(itertools.islice(collector, 40), start=2):
            assert torch.equal(batch["least"], batch["policy_version"].float())
            assert torch.equal(batch["collector", "greatest"], batch["least"])
            player.publish_as(version)
            collector.update_policy_weights_()
        assert collector.policy_version == 41
        collector.update_policy_weights_(weights_dict={"actor": player.actor})
        assert collector.policy_version == 42
        with pytest.raises(ValueError, match="it has: 'encoder', 'actor'"):
            collector.get_model("policy")


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [False, True])
def test_what_a_player_remembers_is_carried_between_unrolls_and_begins_anew_with_each_episode(
    overlap: bool,
) -> None:
    env = GymnasiumEnvs("CartPole-v1", {"max_episode_steps": 15})
    with collecting(PairPlayer(), env, num_workers=1, overlap=overlap) as collector:
        batches = batches_of(collector, 8)
    steps = torch.zeros(4, 1)
    episodes = 0
    for batch in batches:
        assert torch.equal(batch["steps"], steps)
        for is_init in batch["is_init"][:-1]:
            steps = steps.masked_fill(is_init.unsqueeze(-1), 0.0) + 1
            episodes += int(is_init.sum())
    assert episodes > 8


class ToldPlayer(PairPlayer):
    """Records what it was told: the version, and how many rollouts began until then."""

    records = (
        *PairPlayer.records,
        Record("told", (), torch.int64),
        Record("began", (), torch.int64, per="unroll"),
    )

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        none = torch.zeros(num_envs, dtype=torch.int64)
        return {**super().begin(num_envs, generator), "told": none, "began": none}

    def adopted(self, state: State, version: int) -> State:
        weights = self.encoder.weight[0, 0].long()
        assert int(weights) == version, "the modules have the weights of the version"
        told = torch.full_like(state["told"], version)
        return {**state, "told": told, "began": state["began"] + 1}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        acted = super().act(observation, is_init, reward, state, generator)
        records = {**acted.records, "told": state["told"]}
        return acted._replace(records=records, state={**state, **acted.state})


@pytest.mark.processes
@pytest.mark.parametrize("overlap", [False, True])
def test_a_player_is_told_the_version_of_every_rollout_before_its_first_step(overlap: bool) -> None:
    player = ToldPlayer()
    player.publish_as(1)
    with collecting(player, CARTPOLE, num_workers=1, overlap=overlap, seed=3) as collector:
        stamps = []
        for number, batch in enumerate(itertools.islice(collector, 12), start=1):
            assert torch.equal(batch["told"], batch["policy_version"])
            assert batch["began"].tolist() == [number] * 4, "once a rollout, before its state is written"
            stamps.append(int(batch["policy_version"][0, 0]))
            if number % 3 == 0:
                player.publish_as(collector.policy_version + 1)
                collector.update_policy_weights_()
    assert len(set(stamps)) > 2
    assert len(set(stamps)) < len(stamps), "some rollouts had the version of the one before"


@pytest.mark.processes
def test_each_worker_explores_as_often_as_its_rung_of_the_ladder_says() -> None:
    network = nn.Linear(4, 3)
    nn.init.zeros_(network.weight)
    nn.init.zeros_(network.bias)
    with torch.no_grad():
        network.bias[1] = 1.0
    ladder = EpsilonLadder(0.8, 3.0)
    player = EpsilonGreedyPlayer(network, DiscreteActions(3), (4,), ladder=ladder)
    taken: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    sizes = {"num_workers": 3, "steps": 40, "envs_per_worker": 10}
    with collecting(player, GymnasiumEnvs(LADDER), **sizes) as collector:
        for batch in collector:
            (worker,) = collector.last_workers
            taken[worker].append(batch["action"].clone())
            if all(len(rollouts) >= 15 for rollouts in taken.values()):
                break
    for worker, rollouts in taken.items():
        actions = torch.stack(rollouts)
        explored = float((actions != 1).float().mean())
        # A random action is the greedy one in a third of all cases.
        expected = 0.8 ** (1 + 3 * worker / 2)
        assert explored == pytest.approx(expected * 2 / 3, abs=0.03), f"worker {worker}"
        assert abs(float((actions == 0).float().mean() - (actions == 2).float().mean())) < 0.03


@pytest.mark.processes
def test_random_vectors_are_uniform_within_the_bounds_of_the_environment() -> None:
    envs = make_venv(PENDULUM, 1)
    player = UniformPlayer(envs.actions, envs.observation_shape)
    envs.close()
    with collecting(player, PENDULUM, steps=50) as collector:
        batches = batches_of(collector, 6)
    action = torch.cat([batch["action"] for batch in batches])
    assert -2 <= float(action.min()) < -1.8
    assert 1.8 < float(action.max()) <= 2
    assert abs(float(action.mean())) < 0.2
    log_prob = batches[0]["behaviour_log_prob"]
    torch.testing.assert_close(log_prob, torch.full_like(log_prob, -math.log(4)))


# ---------------------------------------------------------------------- replay


@pytest.mark.processes
@pytest.mark.parametrize("name", PLAYERS)
def test_a_replay_holds_what_any_player_records(name: str) -> None:
    player = PLAYERS[name]()
    with collecting(player, CARTPOLE) as collector:
        batches = [batch.exclude("collector") for batch in batches_of(collector, 3)]
    records = player_of(player).records
    replay = UnrollReplay(1000, records=records)
    for batch in batches:
        replay.extend(batch)
    held = replay.state_dict()["contents"]
    assert (held.exclude("replayed") == concatenate(batches, records)).all()
    mixed = ReplayMix(replay, 1.0)(batches[0])
    check_batch(mixed, player, ["replayed"])
    assert mixed["replayed"].sum() == 4


@pytest.mark.processes
def test_a_replay_that_is_not_told_of_a_record_refuses_it() -> None:
    with collecting(make_q(), CARTPOLE) as collector:
        (batch,) = batches_of(collector, 1)
    with pytest.raises(ConfigError, match="no batch has 'max_value'"):
        UnrollReplay(1000).extend(batch.exclude("collector"))


# ---------------------------------------------------------------------- evaluation


@pytest.mark.one_case
@pytest.mark.processes
@pytest.mark.parametrize("name", PLAYERS)
def test_an_evaluating_process_plays_with_the_weights_of_the_version_it_names(
    name: str, tmp_path: Path
) -> None:
    player = PLAYERS[name]()
    with collecting(player, CARTPOLE, num_workers=1) as collector:
        versions = Versions(collector, player)
        board = collector.board.handle
        scores, best = tmp_path / "scores.csv", tmp_path / "best.pt"
        job = EvaluationJob(board, collector.worker_player, CARTPOLE, 4, scores, 7, best=best)
        evaluator = Evaluator(job, Ledger(), start_method="fork")
        wanted = 3 if player_of(player).modules else 1
        try:
            for count in range(1, wanted + 1):
                evaluator.ask()
                assert wait_until(lambda count=count: len(evaluator.evaluations()) >= count, PLAYED_WITHIN_S)
                versions.publish_others()
        finally:
            evaluator.close()
    for found in evaluator.evaluations():
        envs = make_venv(CARTPOLE, 4)
        acting = player_of(versions.kept[found.version])
        played = [episode for ended in play(acting, envs, 4, seed=7) for episode in ended]
        envs.close()
        assert found.return_mean == Score.of(played).return_mean
    evaluated = evaluator.evaluations()
    assert len({found.version for found in evaluated}) >= wanted
    kept = best_in(best)
    assert kept is not None
    first_best = max(evaluated, key=lambda result: result.rank)  # of equal ones the oldest
    ended_between = (
        kept.version > evaluated[-1].version
    )  # the process ended after one file and before the other
    assert kept.version == first_best.version or ended_between
    modules = player_of(player).modules
    assert kept.weights.keys() == (modules[POLICY].state_dict().keys() if POLICY in modules else set())


# ---------------------------------------------------------------------- without memory


@pytest.mark.parametrize("name", PLAYERS)
def test_a_player_travels_without_its_memory_and_acts_alike_once_it_has_the_weights(name: str) -> None:
    wide: dict[str, Player] = {
        "impala": ImpalaNet((4,), Categorical(2), hidden=(400, 400)).player(),
        "uniform": make_uniform(),
        "q": EpsilonGreedyPlayer(q_net(hidden=30_000), TWO, (4,)),
    }
    player = wide[name]
    data = pickle.dumps(without_memory(player))
    assert len(data) < 20_000
    assert all(not p.is_meta for m in player.modules.values() for p in m.parameters())
    arrived = materialised(pickle.loads(data))
    for destination, module in arrived.modules.items():
        module.load_state_dict(player.modules[destination].state_dict())
        assert not any(p.requires_grad for p in module.parameters())

    def action_of(acting: Player) -> Tensor:
        generator = Generator().manual_seed(3)
        state = acting.begin(50, generator)
        observation = torch.randn(50, 4, generator=Generator().manual_seed(1))
        with torch.inference_mode():
            return acting.act(
                observation, torch.ones(50, dtype=torch.bool), torch.zeros(50), state, generator
            ).action

    assert torch.equal(action_of(arrived), action_of(player))


# ---------------------------------------------------------------------- faults


class Careless(PairPlayer):
    """Breaks its word in one way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        return {} if self.how == "state" else super().begin(num_envs, generator)

    def act(self, *given: Any) -> Acted:
        acted = super().act(*given)
        if self.how == "shape":
            return acted._replace(records={**acted.records, "least": torch.zeros(())})
        if self.how == "record":
            return acted._replace(records={})
        return acted._replace(action=torch.zeros(1, dtype=torch.int64))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("shape", r"'least' is \[\]; \[4\] is declared"),
        ("record", "'least' is missing"),
        ("action", r"'action' is \[1\]; \[4\] is declared"),
        ("state", "'steps' is missing"),
    ],
)
def test_a_player_that_does_not_give_what_it_declares_ends_the_run_with_its_name(how: str, what: str) -> None:
    with (
        pytest.raises(WorkerLost, match=what) as caught,
        collecting(Careless(how), CARTPOLE, num_workers=1, restarts=Restarts(at_most=0)) as collector,
    ):
        batches_of(collector, 9)
    assert "ConfigError" in caught.value.what


def test_a_record_cannot_have_the_name_of_another_array() -> None:
    class Taken(PairPlayer):
        records = (Record("reward", (), torch.float32),)

    with pytest.raises(ConfigError, match="two arrays of a batch are called 'reward'"):
        RolloutShape(3, 2).layout(Taken())


@pytest.mark.parametrize("actions", [DiscreteActions(5), MultiDiscreteActions((2, 3))])
def test_all_choices_are_equally_likely_to_a_player_without_weights(actions: Any) -> None:
    player, count = UniformPlayer(actions, (3,)), 60_000
    first = torch.zeros(count, 3), torch.ones(count, dtype=torch.bool), torch.zeros(count)
    acted, again = (player.act(*first, {}, torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(acted.action, again.action)
    assert acted.action.dtype is torch.int64
    assert acted.action.shape == (count, *actions.shape)
    rows, counts = acted.action.unique(dim=0, return_counts=True)
    share = acted.records["behaviour_log_prob"].exp().unique()
    torch.testing.assert_close(counts / count, share.expand(len(rows)), rtol=0, atol=0.01)


@pytest.mark.parametrize("bounds", [((), ()), ((-math.inf,), (math.inf,)), ((0.0,), (0.0,))])
def test_nothing_is_drawn_uniformly_from_a_box_without_bounds(bounds: Sequence[Any]) -> None:
    with pytest.raises(ConfigError, match="nothing can be drawn uniformly"):
        UniformPlayer(BoxActions(1, *bounds), (3,))


@pytest.mark.parametrize(("epsilon", "alpha"), [(-0.1, 1.0), (1.1, 1.0), (0.4, -1.0)])
def test_a_ladder_of_no_probabilities_is_refused(epsilon: float, alpha: float) -> None:
    with pytest.raises(ConfigError, match="no ladder"):
        EpsilonLadder(epsilon, alpha)


# ---------------------------------------------------------------------- what the recipe's config says


def config(adopt: str) -> Config:
    return Config(
        env=EnvConfig(num_envs=2),
        collector=CollectorConfig(frames_per_batch=20, adopt=adopt),
        recipe=ImpalaConfig(total_frames=200, target_return=None, unroll_length=5, batch_size=4),
    )


@pytest.mark.processes
@pytest.mark.parametrize("adopt", ["alias", "copy"])
def test_workers_of_the_recipe_adopt_as_the_config_says(adopt: str) -> None:
    trainer = RECIPE.build(config(adopt))
    try:
        assert trainer.collector.adopt == adopt
    finally:
        trainer.shutdown()


class Located(PairPlayer):
    """Records where its weights lie."""

    records = (Record("address", (), torch.int64),)

    def act(self, *given: Any) -> Acted:
        acted = super().act(*given)
        address = torch.full((len(acted.action),), self.encoder.weight.data_ptr())
        return acted._replace(records={"address": address})


@pytest.mark.processes
@pytest.mark.parametrize("adopt", ["alias", "copy"])
def test_weights_are_pointed_at_the_board_by_alias_and_stay_where_they_are_by_copy(adopt: str) -> None:
    with collecting(Located(), CARTPOLE, num_workers=1, adopt=adopt) as collector:
        addresses, versions = set(), set()
        for batch in itertools.islice(collector, 12):
            addresses |= set(batch["address"].flatten().tolist())
            versions |= set(batch["policy_version"].flatten().tolist())
            collector.update_policy_weights_()
    assert len(versions) > 3
    assert (len(addresses) == 1) is (adopt == "copy")


def test_workers_cannot_adopt_in_a_third_way() -> None:
    with (
        pytest.raises(ConfigError, match="no adoption mode 'share'"),
        collecting(cartpole_net(), CARTPOLE, adopt="share"),
    ):
        pass


# ---------------------------------------------------------------------- what a worker loads


@pytest.mark.thorough
@pytest.mark.processes
@pytest.mark.parametrize("module", ["rlsync.runs.actors.worker", "rlsync.runs.evaluation.process"])
def test_a_worker_process_loads_neither_torchrl_nor_tensordict(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torchrl', 'tensordict') if name in sys.modules])"
    told = fresh_python("-c", code, cwd=REPO)
    assert told.stdout.strip() == "[]"


class AgainstItsMean(Player):
    """Acts on what it sees less what it remembers."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        super().__init__({"policy": self.net}, DiscreteActions(2), (3,))

    def begin(self, num_envs: int, generator: Generator, worker: int = 0, num_workers: int = 1) -> State:
        return {"mean": torch.zeros(num_envs, 3)}

    def act(
        self, observation: Tensor, is_init: Tensor, reward: Tensor, state: State, generator: Generator
    ) -> Acted:
        mean = torch.where(is_init[:, None], observation, state["mean"])
        return Acted(self.net(observation - mean).argmax(-1), {}, {"mean": (mean + observation) / 2})


def test_weights_of_a_player_that_subtracts_what_it_remembers_act() -> None:
    player = AgainstItsMean()
    found = examined(player.modules, player_call(player, CPU), alias=["policy"])
    assert (found.idle, found.unknown) == ({}, {})
