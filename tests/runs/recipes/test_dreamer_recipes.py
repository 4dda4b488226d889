"""The recipes dreamer_v1 and dreamer_v3: rows, sequences, states of player and learner, whole runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import DreamerV3MLP, RSSMPosterior, RSSMPrior, symlog

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.collector import UnrollCollector
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.actors.player import Acted, Record
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.compat.replay import RowBuffer
from rlsync.runs.config.composing import written
from rlsync.runs.evaluation.checkpoint import CheckpointPlayer
from rlsync.runs.evaluation.checkpoint import load as load_player
from rlsync.runs.evaluation.play import play
from rlsync.runs.recipes.dreamer import v1, v3
from rlsync.runs.recipes.dreamer.config import DreamerV1Config, DreamerV3Config
from rlsync.runs.recipes.dreamer.player import WorldModelPlayer
from rlsync.runs.recipes.dreamer.sequences import SequenceMemory, Sequences
from rlsync.runs.recipes.evaluating import acting_of
from rlsync.runs.recipes.hooks.steering import KeepPace
from rlsync.runs.recipes.registry import recipe_of
from rlsync.runs.recipes.run_files import CHECKPOINT, RESOLVED
from rlsync.runs.recipes.settings import Config, EnvConfig
from rlsync.runs.recipes.spaces import ANY, BOX, DISCRETE
from rlsync.runs.recipes.timeline import timeline
from rlsync.torchrl_plugin.compat.trainers import registered_modules
from tests.runs.recipes.test_recipes import trained
from tests.tools.parts.configs import configs_of

SMALL = [
    "recipe.cells=16",
    "recipe.belief=16",
    "recipe.batch_size=4",
    "recipe.sequence_length=4",
    "recipe.horizon=3",
    "recipe.total_frames=192",
    "recipe.buffer_frames=400",
    "recipe.pace.prefill=64",
    "recipe.pace.ratio=0.125",
    "recipe.free_nats=0",  # so that also the prior learns from the first update on
    "recipe.target_return=null",
    "recipe.evaluation.every_frames=0",
    "collector.frames_per_batch=32",
]
OF = {
    "dreamer_v3": ["recipe.categoricals=2", "recipe.classes=4", "recipe.bins=31"],
    "dreamer_v1": ["env=pendulum"],
}
every_recipe = pytest.mark.parametrize("name", list(OF))


@cache
def composed(name: str) -> Config:
    return configs_of(f"recipe={name}", *SMALL, *OF[name])[0]


def small(name: str, *words: str, run_dir: Path | None = None) -> Config:
    """The config of a short run of small networks, with other values of keys: composed once for all tests."""
    where = [] if run_dir is None else [f"run_dir={run_dir}"]
    keys = OmegaConf.from_dotlist([*where, *words])
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(composed(name)), keys))


def built(config: Config) -> Any:
    return recipe_of(config).build(config, None)


def pace_of(trainer: Any) -> KeepPace:
    (pace,) = (module for module in registered_modules(trainer) if isinstance(module, KeepPace))
    return pace


# ------------------------------------------------------------------ sequences


def buffer_of(rows: TensorDict, sampler: Sequences, capacity: int = 1_000) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), sampler=sampler, batch_size=400)
    buffer.extend(rows)
    return buffer


def numbered(streams: list[int], rows: list[int], inits: list[bool] | None = None) -> TensorDict:
    given = {"stream": torch.tensor(streams), "row": torch.tensor(rows)}
    given["is_init"] = torch.tensor(inits or [False] * len(rows))
    return TensorDict({key: value.unsqueeze(-1) for key, value in given.items()}, [len(rows)])


def test_sequences_of_many_streams_in_any_order_follow_each_other_and_all_are_drawn() -> None:
    generator = np.random.default_rng(0)
    pairs = generator.permutation([(s, r) for s in range(3) for r in range(20)])
    drawn = buffer_of(numbered(*pairs.T.tolist()), Sequences(4)).sample().reshape(100, 4)
    assert torch.equal(drawn["row"].squeeze(-1).diff(dim=1), torch.ones(100, 3, dtype=torch.int64))
    assert (drawn["stream"] == drawn["stream"][:, :1]).all()
    starts = {(int(s), int(r)) for s, r in zip(drawn["stream"][:, 0], drawn["row"][:, 0], strict=True)}
    possible = {(s, r) for s in range(3) for r in range(17)}
    assert starts <= possible
    assert len(starts) > len(possible) * 0.7


def test_what_is_drawn_does_not_depend_on_the_random_ids_of_streams() -> None:
    """Else no run of two environments could be made again."""
    drawn = []
    for ids in ((0, 1), (1, 0)):
        torch.manual_seed(0)
        rows = numbered([*ids] * 10, [place // 2 for place in range(20)])
        drawn.append(buffer_of(rows, Sequences(4)).sample())
    assert torch.equal(drawn[0]["row"], drawn[1]["row"])
    assert torch.equal(drawn[0]["stream"], 1 - drawn[1]["stream"])


def test_a_lost_rollout_and_an_overwritten_row_tear_a_sequence() -> None:
    lost = numbered([0] * 8, [0, 1, 2, 3, 6, 7, 8, 9])
    buffer = buffer_of(lost, Sequences(4), capacity=8)
    assert {int(r) for r in buffer.sample().reshape(-1, 4)["row"][:, 0]} == {0, 6}
    buffer.extend(numbered([0, 0], [10, 11]))  # takes the places of rows 0 and 1
    assert {int(r) for r in buffer.sample().reshape(-1, 4)["row"][:, 0]} == {6, 7, 8}


def test_within_episodes_no_sequence_crosses_an_end() -> None:
    inits = [True, False, False, True, False, False, False]
    buffer = buffer_of(numbered([0] * 7, list(range(7)), inits), Sequences(3, within_episodes=True))
    assert {int(r) for r in buffer.sample()[:399].reshape(-1, 3)["row"][:, 0]} == {0, 3, 4}


def test_too_few_rows_are_told() -> None:
    with pytest.raises(ConfigError, match=r"no 9 rows of one environment .*(?s:.*)prefill"):
        buffer_of(numbered([0] * 8, list(range(8))), Sequences(9)).sample()


# ------------------------------------------------------------------ player and learner


def test_the_v3_learner_makes_the_state_that_the_player_had() -> None:
    """With one class nothing is drawn at random, so the two must agree in every row."""
    torch.manual_seed(0)
    recipe = DreamerV3Config(cells=16, belief=16, categoricals=2, classes=1, bins=31)
    loss = v3.make_loss(recipe, DISCRETE.probe(EnvConfig()))
    compare_states(loss, recipe, v3.DreamerV3Player, EnvConfig())


def test_the_v1_learner_makes_the_state_that_the_player_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first row they differ: the player of this version begins with a belief of zeros."""
    for kind, inputs in ((RSSMPrior, 3), (RSSMPosterior, 2)):

        def without_noise(me: Any, *given: Any, forward: Any = kind.forward, inputs: int = inputs) -> Any:
            return forward(me, *given[:inputs], noise=torch.zeros(()))

        monkeypatch.setattr(kind, "forward", without_noise)
    torch.manual_seed(0)
    recipe = DreamerV1Config(cells=16, belief=16, state=4)
    loss = v1.make_loss(recipe, BOX.probe(EnvConfig("Pendulum-v1")))
    # The belief of the second row comes from that of the first: the player's is put in its place.
    compare_states(loss, recipe, v1.DreamerV1Player, EnvConfig("Pendulum-v1"), first=1)


def compare_states(
    loss: Any, recipe: Any, kind: type[WorldModelPlayer], env: EnvConfig, first: int = 0
) -> None:
    spaces = ANY.probe(env)

    class Showing(kind):  # type: ignore[misc, valid-type]
        """Records its state, too."""

        def __init__(self) -> None:
            super().__init__(loss.actor_network, recipe, spaces, on_adoption="keep")
            shown = [Record(key, (width,), torch.float32) for key, width in self.widths.items()]
            self.records = (*self.records, *shown)

        def act(self, *given: Any) -> Acted:
            acted = super().act(*given)
            return acted._replace(records=acted.records | {key: acted.state[key] for key in self.widths})

    player = Showing()
    settings = CollectSettings(steps=12, envs_per_worker=1, transitions=True, seed=3)
    collector = UnrollCollector(player, env.spec(), settings, num_workers=0)
    buffer = RowBuffer(storage=LazyTensorStorage(50), sampler=Sequences(8), batch_size=8)
    memory = SequenceMemory(buffer, buffer.sampler, player.widths, lambda: collector.last_rollouts)
    try:
        frames = next(iter(collector)).clone()
        memory.store(frames)
    finally:
        collector.shutdown()
    rows = buffer[:][buffer[:]["row"].flatten().argsort()]
    assert rows["next", "observation"].dtype is spaces.observation_dtype
    sample = rows[first:8].unsqueeze(0).clone()
    for key, width in player.widths.items():
        held = frames[key][0, 0] if first else torch.zeros(width)
        sample[key] = held.expand(1, 8 - first, width).clone()
    if first:  # DreamerV1's loss is told of a picture
        seen = sample["next", "observation"]
        sample["next", "picture"] = seen.reshape(*seen.shape[:-1], 1, 1, -1)
    with torch.no_grad():
        made = loss.model_loss.world_model(sample)["next"]
    assert frames["belief"][0, 1:].std(0).max() > 0, "it depends on what is seen"
    # A frame has what the player held after it saw the frame's observation.
    for key in player.widths:
        torch.testing.assert_close(made[key][0], frames[key][0, first:8], atol=1e-5, rtol=1e-5)


def test_the_loss_of_dreamer_v1_is_on_the_device_that_the_learner_has() -> None:
    config = small("dreamer_v1")
    loss = v1.make_loss(config.recipe, BOX.probe(config.env), torch.device("meta"))
    tensors = [*loss.parameters(), *loss.buffers(), *loss.actor_network.parameters()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


# ------------------------------------------------------------------ runs


#: How workers act: the learner's process, in turn with processes, beside it, or as it comes.
WAYS = {
    "own process": ["collector.num_workers=0"],
    "in turn": ["collector.lag=0"],
    "beside": ["collector.lag=1"],
    "free": ["collector.lag=null"],
}


@pytest.mark.thorough
@every_recipe
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("fork_workers")
def test_a_run_learns_at_the_pace_that_was_planned_for_it(name: str, way: str) -> None:
    config = small(name, *WAYS[way])
    trainer = built(config)
    batches: list[TensorDict] = []
    trainer.register_op("batch_process", lambda batch: batches.append(batch.clone()) or batch)
    before = {key: value.clone() for key, value in trainer.loss_module.named_parameters()}
    trained(trainer)
    plan = timeline(config)
    assert pace_of(trainer).updates == plan.updates == 16
    assert trainer.collected_frames == plan.frames
    after = dict(trainer.loss_module.named_parameters())
    stale = [key for key, value in before.items() if torch.equal(value, after[key])]
    assert not stale, stale
    stamps = torch.cat([batch["policy_version"].flatten() for batch in batches])
    made_by = torch.cat([batch["state_version"].flatten() for batch in batches])
    begins = torch.cat([batch["is_init"].flatten() for batch in batches])
    assert stamps[0] >= 1
    assert stamps.max() > 4
    assert (made_by[begins] == -1).all()
    assert (made_by[~begins] >= 1).all()
    assert (made_by <= stamps).all()
    assert (made_by[~begins] < stamps[~begins]).any(), "states were carried over adoptions"


@every_recipe
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_resumed_run_goes_on_with_its_rows_its_pace_and_its_optimizer(name: str, tmp_path: Path) -> None:
    first = ("recipe.total_frames=128", "recipe.pace.ratio=0.0625")
    trainer = built(small(name, *first, run_dir=tmp_path / "first"))
    trained(trainer)
    rows, updates = len(trainer.replay_buffer), pace_of(trainer).updates
    more = ("recipe.total_frames=192", "recipe.pace.ratio=0.0625")
    again = small(name, *more, run_dir=tmp_path / "again")
    resumed = built(again)
    resumed.load_from_file(tmp_path / "first" / CHECKPOINT)
    assert len(resumed.replay_buffer) == rows
    assert pace_of(resumed).updates == updates
    for part in ("named_parameters", "named_buffers"):  # these have the scale of returns
        kept = dict(getattr(trainer.loss_module, part)())
        torch.testing.assert_close(dict(getattr(resumed.loss_module, part)()), kept)
    if name == "dreamer_v3":
        slow, loaded = (t.loss_module.value_loss.target_value_model_params for t in (trainer, resumed))
        torch.testing.assert_close(loaded.flatten_keys().to_dict(), slow.flatten_keys().to_dict())
        assert float(resumed.loss_module.actor_loss.return_high) != 0
    state = trainer.optimizer.state_dict()["state"]
    torch.testing.assert_close(resumed.optimizer.state_dict()["state"], state)
    trained(resumed)
    assert pace_of(resumed).updates == timeline(again).updates


@pytest.mark.thorough
@every_recipe
@pytest.mark.usefixtures("fork_workers")
def test_the_player_of_a_checkpoint_plays(name: str, tmp_path: Path) -> None:
    config = small(name, run_dir=tmp_path)
    trained(built(config))
    acting = acting_of(config, deterministic=True)
    load_player(tmp_path / CHECKPOINT, acting)
    scores = played(acting)
    assert len(scores) == 2
    assert all(np.isfinite(scores))


@pytest.mark.parametrize("on_adoption", ["reset", "recompute"])
def test_what_plays_one_version_needs_no_stamps_to_see_adoptions(on_adoption: str, tmp_path: Path) -> None:
    config = small("dreamer_v3", f"recipe.on_adoption={on_adoption}", run_dir=tmp_path)
    assert len(played(acting_of(config, deterministic=True))) == 2


def played(acting: CheckpointPlayer) -> list[float]:
    """The returns of two episodes."""
    envs = make_venv(acting.env, 2)
    try:
        return [episode.total for step in play(acting.player, envs, 2, seed=3) for episode in step]
    finally:
        envs.close()


def test_the_decoder_of_dreamer_v3_says_the_symlog_of_an_observation() -> None:
    """So numbers of any size are within reach: its loss is the squared distance from their symlog."""
    _, _, decoder = v3.make_eyes(DreamerV3Config(cells=16), DISCRETE.probe(EnvConfig("CartPole-v1")), 8)
    states = 5 * torch.randn(32, 8)
    with torch.no_grad():
        *_, last = (layer for layer in decoder.modules() if isinstance(layer, torch.nn.Linear))
        last.bias.fill_(7.0)
        said = DreamerV3MLP.forward(decoder, states)
        torch.testing.assert_close(symlog(decoder(states)), said, rtol=1e-4, atol=1e-4)
    assert said.abs().max() > 7


def test_the_open_loop_of_an_earlier_run_is_left_out_where_its_config_is_read(tmp_path: Path) -> None:
    config = small("dreamer_v3")
    earlier = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(config)))
    earlier.recipe.open_loop = {"every_frames": 1_000, "seen": 5, "ahead": 10}
    OmegaConf.save(earlier, tmp_path / RESOLVED)
    assert written(tmp_path / RESOLVED) == config


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "words", "what"),
    [
        ("dreamer_v3", ["recipe.pace.prefill=3"], "has no sequence of 4 frames"),
        (
            "dreamer_v3",
            ["collector.num_workers=20", "collector.frames_per_batch=20"],
            "20 environments has no sequence",
        ),
        ("dreamer_v3", ["recipe.sequence_length=1"], "recipe.sequence_length cannot be 1"),
        ("dreamer_v3", ["recipe.bins=1"], "recipe.bins cannot be 1"),
        ("dreamer_v3", ["recipe.gamma=1"], "a discount of 1 makes infinite"),
        ("dreamer_v3", ["recipe.buffer_frames=15"], "never holds a batch of 16"),
        ("dreamer_v3", ["recipe.on_adoption=forget"], "recipe.on_adoption cannot be 'forget'"),
        ("dreamer_v1", ["recipe.belief=8"], "has one width"),
        ("dreamer_v1", ["env.id=CartPole-v1"], "continuous actions"),
    ],
)
@pytest.mark.seconds
def test_what_cannot_work_is_refused(name: str, words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        built(small(name, *words))
