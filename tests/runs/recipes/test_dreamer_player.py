"""What acts in the Dreamer recipes: it does what TorchRL's policy does, and carries its state by the laws."""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Generator, Tensor, nn
from torchrl.data import Bounded, MultiCategorical, OneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type

from rlsync import DreamerPlayer
from rlsync.runs.actors.envs.observations import like
from rlsync.runs.actors.player import Acted, Record, State, materialised, player_call, without_memory
from rlsync.runs.recipes.dreamer import v1, v3
from rlsync.runs.recipes.dreamer.config import DreamerV1Config, DreamerV3Config
from rlsync.runs.recipes.dreamer.player import WorldModelPlayer
from rlsync.runs.recipes.env_settings import EnvConfig
from rlsync.runs.recipes.spaces import DISCRETE, Spaces
from tests.runs.actors.test_unroll_collector import CARTPOLE, collecting
from tests.tools.parts.space_envs import SEVERAL_PARTS, rows_of

ENVS, STEPS = 3, 7
V1 = DreamerV1Config(cells=16, belief=16, state=4)
V3 = DreamerV3Config(cells=16, belief=12, categoricals=3, classes=4, channels=2, bins=31)
SPACES = {
    "v1": Spaces(like((5,)), 2, Bounded(-2.0, 3.0, (2,))),
    "v3 choices": Spaces(like((5,)), 3, OneHot(3)),
    "v3 several choices": Spaces(like((5,)), 5, MultiCategorical((2, 3))),
    "v3 numbers": Spaces(like((5,)), 2, Bounded(-2.0, 3.0, (2,))),
    "v3 pictures": Spaces(like((3, 16, 16)), 3, OneHot(3)),
    "v3 several parts": Spaces(SEVERAL_PARTS, 3, OneHot(3)),
}
every_kind = pytest.mark.parametrize("kind", SPACES)
choices = pytest.mark.parametrize("on_adoption", ["keep", "reset", "recompute"])


def network_of(kind: str, seed: int = 0) -> Any:
    """What a loss acts with; its weights are not those of the start, where all choices are alike."""
    return copy.deepcopy(_network_of(kind, seed))


@cache
def _network_of(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    recipe, module = (V1, v1) if kind == "v1" else (V3, v3)
    network: nn.Module = module.make_loss(recipe, SPACES[kind]).actor_network
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return network


def indices_of(kind: str, numbers: Tensor) -> Tensor:
    """What players choose, of actions as the model sees them."""
    spaces = SPACES[kind]
    if not spaces.discrete:
        return numbers
    chosen = [each.argmax(-1) for each in numbers.split(spaces.choices, -1)]
    return torch.stack(chosen, -1) if isinstance(spaces.action_spec, MultiCategorical) else chosen[0]


def player_of(
    kind: str, network: nn.Module | None = None, *, window: int = 64, **how: Any
) -> WorldModelPlayer:
    network = network_of(kind) if network is None else network
    make, recipe = (v1.DreamerV1Player, V1) if kind == "v1" else (v3.DreamerV3Player, V3)
    return make(network, replace(recipe, window=window), SPACES[kind], **how)


def observed(kind: str, seed: int, count: int = ENVS) -> Tensor:
    return rows_of(SPACES[kind].observations, count, seed=seed)


def played(
    player: WorldModelPlayer, kind: str, begins: list[list[int]], state: State, generator: Generator
) -> tuple[list[Acted], State]:
    """Steps, at the number of each of which these environments begin an episode; nothing is written to."""
    made = []
    for step, envs in enumerate(begins):
        is_init = torch.zeros(ENVS, dtype=torch.bool)
        is_init[envs] = True
        given = {key: value.clone() for key, value in state.items()}
        acted = player.act(observed(kind, step), is_init, torch.zeros(ENVS), given, generator)
        state = acted.state
        made.append(acted)
    return made, state


ALL = [0, 1, 2]


# ------------------------------------------------------------------ as TorchRL's


@every_kind
@pytest.mark.parametrize("deterministic", [False, True])
def test_it_does_what_torchrls_policy_does_with_the_same_random_numbers(
    kind: str, deterministic: bool
) -> None:
    network = network_of(kind)
    policy, player = network.get_submodule("player"), player_of(kind, network, deterministic=deterministic)
    generator = Generator()
    state = player.begin(ENVS, generator)
    theirs = {key: value.clone() for key, value in state.items()}
    for step in range(STEPS):
        is_init = torch.tensor([step == 0, step in (0, 3), step == 0])
        begins = is_init.unsqueeze(-1)
        seen = TensorDict({key: value.masked_fill(begins, 0.0) for key, value in theirs.items()}, [ENVS])
        seen.update({"observation": observed(kind, step), "is_init": begins})
        generator.manual_seed(step)
        acted = player.act(observed(kind, step), is_init, torch.zeros(ENVS), state, generator)
        torch.manual_seed(step)
        explores = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
        with torch.no_grad(), set_exploration_type(explores):
            policy(seen)
        action = indices_of(kind, seen["action"])
        torch.testing.assert_close(acted.action, action, rtol=1e-5, atol=1e-5)
        for key, value in {
            "previous_action": seen["action"].float(),
            **seen.select("state", "belief"),
        }.items():
            torch.testing.assert_close(acted.state[key], value, rtol=1e-5, atol=1e-5)
        state = acted.state
        theirs = {key: seen[key] for key in ("state", "belief")} | {"previous_action": seen["action"].float()}
        if kind == "v1":  # TorchRL's prior makes the belief of the next step at the end of this one
            theirs["belief"] = seen["next", "belief"]


@every_kind
def test_its_leaves_have_the_names_that_earlier_checkpoints_and_users_own_players_have(kind: str) -> None:
    network = network_of(kind)
    assert network.state_dict().keys() == DreamerPlayer(network.player).state_dict().keys()


@every_kind
def test_numbers_stay_within_their_bounds_and_choices_are_all_made(kind: str) -> None:
    player = player_of(kind)
    generator = Generator().manual_seed(0)
    count = 300
    first = observed(kind, 0, count), torch.ones(count, dtype=torch.bool), torch.zeros(count)
    action = player.act(*first, player.begin(count, generator), generator).action
    if SPACES[kind].discrete:
        assert {*map(tuple, action.view(count, -1).tolist())} == {
            *itertools.product(*map(range, SPACES[kind].choices))
        }
    else:
        assert action.shape == (count, 2)
        assert action.min() >= -2
        assert action.max() <= 3
        assert action.std() > 0.5


# ------------------------------------------------------------------ the laws of players


@every_kind
def test_where_an_episode_begins_nothing_of_before_acts(kind: str) -> None:
    player = player_of(kind, on_adoption="recompute")
    first = observed(kind, 0), torch.ones(ENVS, dtype=torch.bool), torch.zeros(ENVS)

    def acted(state: State) -> Acted:
        return player.act(*first, state, Generator().manual_seed(1))

    begun = player.begin(ENVS, Generator())
    other = {
        key: torch.randn_like(value) if value.is_floating_point() else value for key, value in begun.items()
    }
    other["state_version"] = torch.full((ENVS,), 4)
    one, two = acted({key: value.clone() for key, value in begun.items()}), acted(other)
    assert torch.equal(one.action, two.action)
    assert one.records["state_version"].tolist() == two.records["state_version"].tolist() == [-1] * ENVS
    for key in ("state", "belief"):
        assert torch.equal(one.state[key], two.state[key])


@every_kind
@choices
def test_the_same_seed_gives_the_same_actions_whatever_torchs_own_numbers_are(
    kind: str, on_adoption: str
) -> None:
    player = player_of(kind, on_adoption=on_adoption)
    begins = [ALL, *[[]] * (STEPS - 1)]

    def actions(seed: int) -> Tensor:
        torch.seed()
        generator = Generator().manual_seed(seed)
        made, _ = played(player, kind, begins, player.begin(ENVS, generator), generator)
        return torch.stack([acted.action for acted in made])

    assert torch.equal(actions(3), actions(3))
    assert not torch.equal(actions(3), actions(4))


def test_groups_that_act_in_turn_have_states_of_their_own() -> None:
    player = player_of("v3 choices", on_adoption="recompute", window=3)
    alone: dict[int, list[Tensor]] = {}
    for group in (0, 1):
        generator = Generator().manual_seed(group)
        state = player.begin(ENVS, generator)
        alone[group] = []
        for step in range(STEPS):
            first = torch.full((ENVS,), step == 0)
            seen = observed("v3 choices", 10 * group + step)
            acted = player.act(seen, first, torch.zeros(ENVS), state, generator)
            state = player.adopted(acted.state, step)
            alone[group].append(acted.action)
    generators = [Generator().manual_seed(group) for group in (0, 1)]
    states = [player.begin(ENVS, generator) for generator in generators]
    for step in range(STEPS):
        for group in (0, 1):
            first = torch.full((ENVS,), step == 0)
            seen = observed("v3 choices", 10 * group + step)
            acted = player.act(seen, first, torch.zeros(ENVS), states[group], generators[group])
            states[group] = player.adopted(acted.state, step)
            assert torch.equal(acted.action, alone[group][step])


@every_kind
@choices
def test_it_travels_without_its_memory_and_acts_alike_once_it_has_the_weights(
    kind: str, on_adoption: str
) -> None:
    player = player_of(kind, on_adoption=on_adoption)
    arrived = materialised(pickle.loads(pickle.dumps(without_memory(player))))
    for name, module in arrived.modules.items():
        module.load_state_dict(player.modules[name].state_dict())
    begins = [ALL, [], [1], []]

    def actions(acting: Any) -> Tensor:
        generator = Generator().manual_seed(3)
        with torch.inference_mode():
            made, _ = played(acting, kind, begins, acting.begin(ENVS, generator), generator)
        return torch.stack([acted.action for acted in made])

    assert torch.equal(actions(arrived), actions(player))


@every_kind
@choices
def test_it_takes_states_of_any_values_as_the_proof_of_behaviour_gives_them(
    kind: str, on_adoption: str
) -> None:
    call = player_call(player_of(kind, on_adoption=on_adoption), torch.device("cpu"))
    with torch.no_grad():
        for plain in (True, False):
            outputs = [call(plain), call(plain)]
            assert all(torch.equal(one, two) for one, two in zip(*outputs, strict=True))


@every_kind
@choices
def test_an_action_in_place_of_its_own_is_what_the_model_learns_of(kind: str, on_adoption: str) -> None:
    player = player_of(kind, on_adoption=on_adoption)
    other = player_of(kind, on_adoption=on_adoption)
    generator = Generator().manual_seed(1)
    first = observed(kind, 0), torch.ones(ENVS, dtype=torch.bool), torch.zeros(ENVS)
    acted = player.act(*first, player.adopted(player.begin(ENVS, generator), 1), generator)
    given = torch.tensor([[-2.0, 3.0]] * ENVS)
    if SPACES[kind].discrete:
        given = (acted.action + 1) % torch.tensor(SPACES[kind].choices)
        given = given if acted.action.ndim > 1 else given.view(ENVS)
    done = player.instead(acted, given)
    numbers = done.state["previous_action"]
    assert torch.equal(indices_of(kind, numbers), given)
    assert numbers.shape == (ENVS, SPACES[kind].actions)
    assert torch.equal(done.action, given)
    assert torch.equal(done.records["state_version"], acted.records["state_version"])
    # The state that is made again, with other weights or the same, is of this action, too.
    again = other.adopted({key: value.clone() for key, value in done.state.items()}, 2)
    assert torch.equal(again["previous_action"], numbers)
    torch.testing.assert_close(again["belief"], done.state["belief"])


# ------------------------------------------------------------------ adoptions


@every_kind
@pytest.mark.parametrize("window", [2, 20])
def test_the_same_weights_make_the_state_again_that_was_there(kind: str, window: int) -> None:
    player = player_of(kind, on_adoption="recompute", window=window)
    generator = Generator().manual_seed(0)
    state = player.adopted(player.begin(ENVS, generator), 1)
    _, state = played(player, kind, [ALL, [], [1], [], [0]], state, generator)
    again = player.adopted({key: value.clone() for key, value in state.items()}, 2)
    # The window covers the episodes of environments 0 and 1, of one and three steps, or of all.
    for env, steps in enumerate((1, 3, 5)):
        for key in ("state", "belief"):
            same = torch.allclose(again[key][env], state[key][env], atol=1e-6)
            assert same == (steps <= window) or key == "state", (key, env)
    assert again["state_version"].tolist() == [2] * ENVS


@every_kind
def test_new_weights_make_the_state_of_the_episode_so_far(kind: str) -> None:
    old, new = network_of(kind, seed=0), network_of(kind, seed=1)
    player = player_of(kind, old, on_adoption="recompute", window=4)
    generator = Generator().manual_seed(0)
    state = player.adopted(player.begin(ENVS, generator), 1)
    begins = [ALL, [], [1], [], [], [0]]
    made, state = played(player, kind, begins, state, generator)
    old.load_state_dict(new.state_dict())
    again = player.adopted(state, 2)
    other = player_of(kind, new)
    carried = other.begin(ENVS, Generator())
    since = torch.tensor([5, 2, 2])  # the first step of each environment's episode in the window
    for step, acted in enumerate(made):
        noise, action = (acted.state[key][:, step % 4] for key in ("past_noise", "past_action"))
        first = (since == step).unsqueeze(-1)
        before = {key: value.masked_fill(first, 0.0) for key, value in carried.items()}
        latent, belief = other.seen(observed(kind, step), before, first, noise)
        carried = {"state": latent, "belief": belief, "previous_action": action}
    for key, value in carried.items():
        torch.testing.assert_close(again[key], value, rtol=1e-5, atol=1e-5)


class Showing(v3.DreamerV3Player):
    """Records the belief, too. With one class no state is left to chance, so the belief can be made again."""

    RECIPE = DreamerV3Config(cells=16, belief=12, categoricals=3, classes=1, bins=31)

    def __init__(self, network: nn.Module, on_adoption: str, window: int) -> None:
        recipe = replace(self.RECIPE, window=window)
        spaces = DISCRETE.probe(EnvConfig("CartPole-v1"))
        super().__init__(network, recipe, spaces, on_adoption=on_adoption)
        self.records = (*self.records, Record("belief", (12,), torch.float32))

    def act(self, *given: Any) -> Acted:
        acted = super().act(*given)
        return acted._replace(records={**acted.records, "belief": acted.state["belief"]})


class Episode:
    """What a rollout after the other must show of one environment, with the weights of each version."""

    def __init__(self, acting: dict[int, Showing], on_adoption: str, window: int) -> None:
        self.acting, self.on_adoption, self.window = acting, on_adoption, window
        self.made_by = -1
        self.past: list[tuple[Tensor, Tensor]] = []
        self.carried: State = {}

    def step(self, version: int, observation: Tensor, action: Tensor, is_init: bool) -> tuple[int, Tensor]:
        """The version that made the state before a step, and the belief in it."""
        adopts = self.made_by not in (-1, version)
        if is_init:
            self.past = []
            self.made_by = -1
        elif adopts and self.on_adoption == "reset":
            self.made_by = -1
        elif adopts and self.on_adoption == "recompute":
            self.made_by = -1
            for seen, taken in self.past[-self.window :]:
                self._advance(version, seen, taken)
        before = self.made_by
        self.past.append((observation, action))
        return before, self._advance(version, observation, action)

    def _advance(self, version: int, observation: Tensor, action: Tensor) -> Tensor:
        player = self.acting[version]
        before = player.begin(1, Generator()) if self.made_by == -1 else self.carried
        begins = torch.tensor([[self.made_by == -1]])
        state, belief = player.seen(observation.unsqueeze(0), before, begins, torch.zeros(1, 3))
        one_hot = nn.functional.one_hot(action, 2).float().unsqueeze(0)
        self.carried = {"state": state, "belief": belief, "previous_action": one_hot}
        self.made_by = version
        return belief[0]


@pytest.mark.processes
@pytest.mark.each_value
@choices
@pytest.mark.parametrize("overlap", [False, True])
def test_workers_do_to_the_state_what_is_declared_when_they_adopt(on_adoption: str, overlap: bool) -> None:
    torch.manual_seed(0)
    spaces, window = DISCRETE.probe(EnvConfig("CartPole-v1")), 5
    network = v3.make_loss(Showing.RECIPE, spaces).actor_network
    player = Showing(network, on_adoption=on_adoption, window=window)
    acting: dict[int, Showing] = {}

    def publish(collector: Any) -> None:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter += 0.3 * torch.randn_like(parameter)
        collector.update_policy_weights_()
        acting[collector.policy_version] = copy.deepcopy(player)

    acting[1] = copy.deepcopy(player)
    batches = []
    with collecting(player, CARTPOLE, num_workers=1, overlap=overlap) as collector:
        for number, batch in enumerate(itertools.islice(collector, 16)):
            batches.append(batch.clone())
            if number % 3 != 2:  # so that some rollouts have the version of the one before
                publish(collector)
    seen_in_mid_episode: set[bool] = set()
    for env in range(4):
        episode = Episode(acting, on_adoption, window)
        for batch in batches:
            version = int(batch["policy_version"][0, env])
            for step in range(len(batch["action"])):
                is_init = bool(batch["is_init"][step, env])
                given = batch["observation"][step, env], batch["action"][step, env], is_init
                with torch.no_grad():
                    made_by, belief = episode.step(version, *given)
                assert int(batch["state_version"][step, env]) == made_by
                torch.testing.assert_close(batch["belief"][step, env], belief, rtol=1e-4, atol=1e-5)
                if not is_init:
                    seen_in_mid_episode.add(made_by == version)
    # Only a state that is made again is always of the version that acts.
    assert seen_in_mid_episode == ({True} if on_adoption == "recompute" else {True, False})
