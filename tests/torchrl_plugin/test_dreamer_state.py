"""The state that a Dreamer player carries: which weights made it, and what an adoption does to it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import SerialEnv

from rlsync import ConfigError, DreamerPlayer, SyncWeights, dreamer_map
from tests.tools.dreamer_canary import fill, make_canary
from tests.tools.dreamer_parts import (
    BELIEF,
    Dreamer,
    make_dreamer_collector,
    make_dreamer_env,
    make_env,
    make_trainer,
    make_v1,
    make_v3,
)
from tests.tools.parts import ACTIONS
from tests.tools.running import in_three_lines, running
from tests.torchrl_plugin.test_dreamer_map import as_trainer, losses_of

# The weights of canaries make no state: they are shown in it.
pytestmark = pytest.mark.filterwarnings("ignore::rlsync.IdleLeaves")

EPISODE, ROLLOUT = 10, 4

choices = pytest.mark.parametrize("on_adoption", ["keep", "reset", "recompute"])
versions = pytest.mark.parametrize("version", [1, 3])


@contextmanager
def publishing(
    dreamer: Dreamer, player: DreamerPlayer, collector: Collector | None = None
) -> Iterator[tuple[SyncWeights, Iterator[TensorDictBase]]]:
    """A collector beside a learner, and the hook that feeds it; nothing is published yet."""
    if collector is None:
        collector = make_dreamer_collector(player, frames=ROLLOUT, version=dreamer.version)
    with running(collector):
        trainer = as_trainer(make_trainer(dreamer, collector))
        hook = SyncWeights(dreamer_map(losses_of(dreamer), player))
        hook.register(trainer)
        yield hook, iter(collector)


def collected(dreamer: Dreamer, player: DreamerPlayer, rollouts: int) -> TensorDictBase:
    """Frames of rollouts, each with a version of its own, whose weights are the number of the version."""
    with publishing(dreamer, player) as (hook, batches):
        found = []
        for _ in range(rollouts):
            fill(dreamer.player, hook.version + 1)
            hook.publish()
            found.append(next(batches).clone())
        return torch.cat(found)


def expected(frames: TensorDictBase, on_adoption: str, window: int = 1000) -> list[tuple[int, list[float]]]:
    """What must be on each frame: the version that made the state, and the belief."""
    said, made_by, made = [], -1, [0.0] * BELIEF
    steps = 0
    for begins, acts in zip(frames["is_init"].flatten(), frames["policy_version"].tolist(), strict=True):
        if begins or (made_by != acts and on_adoption == "reset"):
            made_by, made, steps = -1, [0.0] * BELIEF, 0
        elif made_by != acts and on_adoption == "recompute":
            kept = min(steps, window)
            made_by, made = acts, ([0.0] * BELIEF + [float(acts)] * kept)[-BELIEF:]
        after = [*made[1:], float(acts)]
        said.append((made_by, after))
        made_by, made, steps = acts, after, steps + 1
    return said


@pytest.mark.one_case
@choices
@versions
@pytest.mark.seconds
def test_a_canary_shows_which_weights_made_which_state(version: int, on_adoption: str) -> None:
    dreamer = make_canary(version)
    frames = collected(dreamer, DreamerPlayer(dreamer.copied(), on_adoption=on_adoption), rollouts=7)
    after = frames["next", "belief"] if version == 1 else frames["belief"]
    found = list(zip(frames["state_version"].flatten().tolist(), after.tolist(), strict=True))
    assert found == expected(frames, on_adoption)
    older = frames["state_version"].flatten() != frames["policy_version"]
    seen = bool((older & ~frames["is_init"].flatten()).any())
    assert seen == (on_adoption != "recompute"), "an adoption in the middle of an episode was seen"


@pytest.mark.thorough
def test_a_prior_at_the_end_makes_the_belief_of_the_next_step() -> None:
    dreamer = make_canary(3)
    player = DreamerPlayer(copy.deepcopy(dreamer.with_the_prior_last()), on_adoption="recompute")
    frames = collected(dreamer, player, rollouts=5)
    after = frames["next", "belief"].tolist()
    found = list(zip(frames["state_version"].flatten().tolist(), after, strict=True))
    assert found == expected(frames, "recompute")


@pytest.mark.seconds
def test_recompute_keeps_a_window_of_steps() -> None:
    dreamer = make_canary(3)
    frames = collected(
        dreamer, DreamerPlayer(dreamer.copied(), on_adoption="recompute", window=2), rollouts=5
    )
    found = list(zip(frames["state_version"].flatten().tolist(), frames["belief"].tolist(), strict=True))
    assert found == expected(frames, "recompute", window=2)
    assert found != expected(frames, "recompute")


def test_the_recomputed_state_is_what_the_new_weights_make_of_the_episode() -> None:
    dreamer = make_v3()
    with torch.no_grad():  # no draw of the posterior is left to chance
        dreamer.player[1].posterior.obs_rnn_to_post_projector[-1].weight.mul_(1e6)
    player = DreamerPlayer(dreamer.copied(), on_adoption="recompute")
    with publishing(dreamer, player) as (hook, batches):
        hook.publish()
        first = next(batches).clone()
        with torch.no_grad():
            for parameter in dreamer.player.parameters():
                parameter.mul_(1 + torch.rand_like(parameter))
        hook.publish()
        second = next(batches).clone()
    assert second["state_version"].flatten().tolist() == [2] * ROLLOUT
    again, estimator = TensorDict({}, []), copy.deepcopy(dreamer.player)
    again.update(
        {"state": torch.zeros(8), "belief": torch.zeros(BELIEF), "previous_action": torch.zeros(ACTIONS)}
    )
    for frame in torch.cat([first, second]).unbind(0):
        again.update(frame.select("observation", "is_init"))
        with torch.no_grad():
            estimator[0](again), estimator[1](again)
        if int(frame["policy_version"]) == 2:
            torch.testing.assert_close(again["belief"], frame["belief"])
            torch.testing.assert_close(again["state"], frame["state"])
        again["previous_action"] = frame["action"].float()


@pytest.mark.seconds
@choices
@pytest.mark.one_case
def test_each_of_several_environments_has_an_episode_of_its_own(on_adoption: str) -> None:
    dreamer = make_canary(3)
    player = DreamerPlayer(dreamer.copied(), on_adoption=on_adoption)

    def both() -> object:
        return SerialEnv(2, [lambda: make_env(3, horizon=3), lambda: make_env(3, horizon=7)])

    def make() -> object:
        return both().append_transform(player.primer())

    collector = Collector(make, player, frames_per_batch=8, total_frames=-1, track_policy_version=True)
    with publishing(dreamer, player, collector) as (hook, batches):
        found = []
        for _ in range(5):
            fill(dreamer.player, hook.version + 1)
            hook.publish()
            found.append(next(batches).clone())
    for frames in torch.cat(found, 1).unbind(0):
        said = list(zip(frames["state_version"].flatten().tolist(), frames["belief"].tolist(), strict=True))
        assert said == expected(frames, on_adoption)


def test_the_previous_action_is_carried_and_torchrl_alone_leaves_it_at_zero() -> None:
    player = DreamerPlayer(make_v3().player)
    for policy, carries in ((player, True), (player.player, False)):
        collector = Collector(lambda: make_dreamer_env(player), policy, frames_per_batch=20, total_frames=-1)
        with running(collector):
            frames = next(iter(collector))
        before = frames["action"][:-1].float() * ~frames["is_init"][1:]
        assert bool(before.any())
        assert torch.equal(frames["previous_action"][1:], before if carries else torch.zeros_like(before))
        assert not frames["previous_action"][0].any()


@pytest.mark.parametrize("make", [make_v1, make_v3])
def test_a_player_without_stamps_keeps_its_state_and_names_no_version(make) -> None:
    dreamer = make()
    player = DreamerPlayer(dreamer.player)
    frames = make_dreamer_env(player, version=dreamer.version).rollout(8, player)
    assert set(frames["state_version"].flatten().tolist()) == {-1}
    assert torch.equal(frames["belief"][2:], frames["next", "belief"][1:-1]) == (dreamer.version == 1)


# ------------------------------------------------------------------------------------------ what is refused


def test_an_adoption_that_cannot_be_seen_is_refused() -> None:
    player = DreamerPlayer(make_v3().player, on_adoption="reset")
    with pytest.raises(ConfigError, match="do not carry 'policy_version'") as wrong:
        make_dreamer_env(player).rollout(2, player)
    assert in_three_lines(wrong.value)


def test_an_environment_without_the_primer_is_refused() -> None:
    player = DreamerPlayer(make_v3().player)
    with pytest.raises(ConfigError, match="does not carry 'state_version'") as wrong:
        make_env().rollout(2, player)
    assert in_three_lines(wrong.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"on_adoption": "forget"}, "no way to adopt 'forget'"), ({"window": 0}, "of at least 1, got 0")],
)
def test_wrong_arguments_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as wrong:
        DreamerPlayer(make_v3().player, **options)
    assert in_three_lines(wrong.value)


def test_a_prior_that_does_not_know_the_shape_of_an_action_is_refused() -> None:
    player = make_v3().player
    player[1].prior.action_shape = None
    with pytest.raises(ConfigError, match="shape of an action") as wrong:
        DreamerPlayer(player)
    assert in_three_lines(wrong.value)
