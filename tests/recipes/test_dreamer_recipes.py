"""The recipes dreamer_v1 and dreamer_v3: rows, sequences, states of player and learner, whole runs."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import GymEnv, TransformedEnv
from torchrl.modules import DreamerV3MLP, RSSMPosterior, RSSMPrior, symlog

from rlsync.core.errors import ConfigError
from rlsync.core.plan import Verdict
from rlsync.evaluation.checkpoint import CheckpointPlayer
from rlsync.evaluation.checkpoint import load as load_player
from rlsync.evaluation.play import play
from rlsync.recipes.dreamer import v1, v3
from rlsync.recipes.dreamer.building import make_player_env
from rlsync.recipes.dreamer.config import DreamerV1Config, DreamerV3Config
from rlsync.recipes.dreamer.sequences import NumberRows, SequenceMemory, Sequences, as_rows
from rlsync.recipes.evaluating import acting_of
from rlsync.recipes.registry import recipe_of
from rlsync.recipes.run_files import CHECKPOINT, IMAGINATION
from rlsync.recipes.settings import Config, EnvConfig
from rlsync.recipes.spaces import BOX, DISCRETE
from rlsync.recipes.timeline import timeline
from rlsync.workers.envs.specs import make_venv
from tests.recipes.test_off_policy import pace_of
from tests.recipes.test_recipes import hook_of, trained
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
    "recipe.open_loop.every_frames=64",
    "recipe.open_loop.seen=2",
    "recipe.open_loop.ahead=4",
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
def composed(name: str, kind: str) -> Config:
    return configs_of(f"recipe={name}", f"collector={kind}", *SMALL, *OF[name])[0]


def small(name: str, *words: str, kind: str = "sync", run_dir: Path | None = None) -> Config:
    """The config of a short run of small networks, with other values of keys: composed once for all tests."""
    where = [] if run_dir is None else [f"run_dir={run_dir}"]
    keys = OmegaConf.from_dotlist([*where, *words])
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(composed(name, kind)), keys))


def built(config: Config) -> Any:
    return recipe_of(config).build(config, None)


# ------------------------------------------------------------------ rows


def frames_of(num_envs: int = 1, frames: int = 60, seed: int = 0) -> list[TensorDict]:
    """Batches of a player in real environments, some of whose episodes end in them."""
    loss = v3.make_loss(DreamerV3Config(cells=8, belief=8), DISCRETE.probe(EnvConfig()))
    player = loss.actor_network

    collector = Collector(
        lambda: make_player_env(player.primer(), EnvConfig("CartPole-v1", num_envs)),
        player,
        frames_per_batch=15 * num_envs,
        total_frames=frames,
        track_policy_version=True,
    )
    collector.set_seed(seed)
    batches = [batch.clone() for batch in collector]
    collector.shutdown()
    return batches


@pytest.mark.seconds
def test_an_episode_of_n_steps_gives_n_plus_one_rows_across_batches() -> None:
    batches = frames_of(frames=120)
    rows = torch.cat([as_rows(batch) for batch in batches])
    rows = rows[rows["row"].flatten().argsort()]
    frames = torch.cat([batch.reshape(-1) for batch in batches])
    steps = ~rows["is_init"].flatten()
    torch.testing.assert_close(rows["next", "observation"][steps], frames["next", "observation"])
    torch.testing.assert_close(rows["action"][steps], frames["action"].float())
    torch.testing.assert_close(rows["next", "reward"][steps], frames["next", "reward"])
    assert torch.equal(rows["next", "done"][steps], frames["next", "done"])
    begins = frames["is_init"].flatten()
    assert begins.sum() == (~steps).sum() >= 3
    torch.testing.assert_close(rows["next", "observation"][~steps], frames["observation"][begins])
    assert not rows["action"][~steps].any()
    assert not rows["next", "reward"][~steps].any()
    assert not rows["next", "done"][~steps].any()
    assert torch.equal(rows["row"].flatten().diff(), torch.ones(len(rows) - 1, dtype=torch.int64))
    after_an_end = rows["next", "done"].flatten()[:-1]
    assert torch.equal(rows["is_init"].flatten()[1:], after_an_end)


@pytest.mark.processes
def test_environments_side_by_side_are_streams_of_their_own() -> None:
    rows = torch.cat([as_rows(batch) for batch in frames_of(num_envs=3, frames=180)])
    streams = rows["stream"].flatten()
    assert len(streams.unique()) == 3
    for stream in streams.unique():
        numbers = rows["row"][streams == stream].flatten().sort().values
        assert torch.equal(numbers.diff(), torch.ones(len(numbers) - 1, dtype=torch.int64))


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
    compare_states(loss, "CartPole-v1", {"state": 2, "belief": 16}, first=0)


def test_the_v1_learner_makes_the_state_that_the_player_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first row they differ: TorchRL's player of this version begins with a belief of zeros."""
    for kind in (RSSMPrior, RSSMPosterior):
        forward = kind.forward
        monkeypatch.setattr(
            kind, "forward", lambda me, *given, f=forward: f(me, *given, noise=torch.zeros(()))
        )
    torch.manual_seed(0)
    recipe = DreamerV1Config(cells=16, belief=16, state=4)
    loss = v1.make_loss(recipe, BOX.probe(EnvConfig("Pendulum-v1")))
    # The belief of the second row comes from that of the first: the player's is put in its place.
    compare_states(loss, "Pendulum-v1", {"state": 4, "belief": 16}, first=1)


def compare_states(loss: Any, env_id: str, widths: dict[str, int], first: int) -> None:
    player = loss.actor_network
    env = make_player_env(player.primer(), EnvConfig(env_id))
    frames = env.rollout(12, player)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(50), sampler=Sequences(8), batch_size=8)
    memory = SequenceMemory(buffer, buffer.sampler, widths)
    memory.store(frames)
    rows = buffer[:][buffer[:]["row"].flatten().argsort()]
    sample = rows[:8].reshape(1, 8).clone()
    for key, width in widths.items():
        sample[key] = torch.zeros(1, 8, width)
    if first:  # the sequence begins with the second row, in the state that the player had
        sample = sample[:, 1:]
        for key in widths:
            sample[key] = frames[key][:1].reshape(1, 1, -1).expand(1, 7, -1).clone()
    sample["next", "picture"] = (
        sample["next", "observation"].reshape(1, -1, 1, 1, widths and 3)[:, :]
        if (first)
        else sample["next", "observation"]
    )
    with torch.no_grad():
        made = loss.model_loss.world_model(sample)
    # A frame's root has what the player held after it saw the frame's observation.
    torch.testing.assert_close(
        made["next", "state"][0, : 8 - first], frames["state"][first:8], atol=1e-5, rtol=1e-5
    )


# ------------------------------------------------------------------ runs


@pytest.mark.thorough
@every_recipe
@pytest.mark.parametrize("kind", ["in_process", "sync", "async"])
@pytest.mark.usefixtures("fork_workers")
def test_a_run_learns_at_the_pace_that_was_planned_for_it(name: str, kind: str) -> None:
    config = small(name, kind=kind)
    trainer = built(config)
    versions: list[torch.Tensor] = []
    trainer.register_op("batch_process", lambda batch: versions.append(batch["policy_version"]) or batch)
    before = {key: value.clone() for key, value in trainer.loss_module.named_parameters()}
    trained(trainer)
    plan = timeline(config)
    assert pace_of(trainer).updates == plan.updates == 16
    assert trainer.collected_frames == plan.frames
    after = dict(trainer.loss_module.named_parameters())
    stale = [key for key, value in before.items() if torch.equal(value, after[key])]
    assert not stale, stale
    stamps = torch.cat([stamp.flatten() for stamp in versions])
    assert (stamps.diff() >= 0).all()
    assert stamps[0] >= 1
    assert stamps[-1] > 4


@pytest.mark.thorough
@every_recipe
@pytest.mark.usefixtures("fork_workers")
def test_a_coupled_player_is_tied_and_a_decoupled_one_gets_copies(name: str) -> None:
    coupled = built(small(name, kind="in_process"))
    sync = hook_of(coupled)
    assert {row.verdict for row in sync.plan.rows} == {Verdict.ALIASED}
    trained(coupled)
    assert {receipt.copied_bytes for receipt in sync.receipts} == {0}
    decoupled = built(small(name))
    assert {row.verdict for row in hook_of(decoupled).plan.rows} == {Verdict.COPIED}
    decoupled.collector.shutdown()


@every_recipe
@pytest.mark.usefixtures("fork_workers")
@pytest.mark.one_case
def test_a_resumed_run_goes_on_with_its_rows_its_pace_and_its_optimizer(name: str, tmp_path: Path) -> None:
    first = ("recipe.total_frames=128", "recipe.pace.ratio=0.0625")
    trainer = built(small(name, *first, kind="in_process", run_dir=tmp_path / "first"))
    trained(trainer)
    rows, updates = len(trainer.replay_buffer), pace_of(trainer).updates
    more = ("recipe.total_frames=192", "recipe.pace.ratio=0.0625")
    again = small(name, *more, kind="in_process", run_dir=tmp_path / "again")
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
    with (tmp_path / "again" / IMAGINATION).open() as file:
        assert {int(line["frames"]) for line in csv.DictReader(file)} == {160}


@pytest.mark.thorough
@every_recipe
@pytest.mark.usefixtures("fork_workers")
def test_the_player_of_a_checkpoint_plays(name: str, tmp_path: Path) -> None:
    config = small(name, kind="in_process", run_dir=tmp_path)
    trained(built(config))
    acting = acting_of(config, deterministic=True)
    load_player(tmp_path / CHECKPOINT, acting)
    scores = played(acting)
    assert len(scores) == 2
    assert all(np.isfinite(scores))


@pytest.mark.parametrize("on_adoption", ["reset", "recompute"])
def test_what_plays_one_version_needs_no_stamps_to_see_adoptions(on_adoption: str, tmp_path: Path) -> None:
    config = small("dreamer_v3", f"recipe.on_adoption={on_adoption}", kind="in_process", run_dir=tmp_path)
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


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "words", "what"),
    [
        ("dreamer_v3", ["recipe.pace.prefill=3"], "has no sequence of 4 frames"),
        ("dreamer_v3", ["collector.num_workers=20", "env.num_envs=1"], "20 environments has no sequence"),
        ("dreamer_v3", ["recipe.open_loop.ahead=100"], "no sequence of 102 frames"),
        ("dreamer_v3", ["recipe.sequence_length=1"], "recipe.sequence_length cannot be 1"),
        ("dreamer_v3", ["recipe.bins=1"], "recipe.bins cannot be 1"),
        ("dreamer_v3", ["recipe.gamma=1"], "a discount of 1 makes infinite"),
        ("dreamer_v3", ["recipe.buffer_frames=15"], "never holds a batch of 16"),
        ("dreamer_v3", ["recipe.on_adoption=forget"], "recipe.on_adoption cannot be 'forget'"),
        ("dreamer_v3", ["cluster.kind=ray"], "dreamer_v3"),
        ("dreamer_v1", ["recipe.belief=8"], "has one width"),
        ("dreamer_v1", ["env.id=CartPole-v1"], "continuous actions"),
        ("dreamer_v3", ["collector.kind=in_process", "collector.num_workers=2"], "not more than one worker"),
        (
            "dreamer_v3",
            ["collector.kind=in_process", "collector.num_workers=1", "recipe.evaluation.every_frames=9"],
            "not an evaluating",
        ),
    ],
)
@pytest.mark.seconds
def test_what_cannot_work_is_refused(name: str, words: list[str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        built(small(name, *words))


def test_rows_are_numbered_one_after_the_other() -> None:
    frames = TransformedEnv(GymEnv("CartPole-v1"), NumberRows()).rollout(3)
    assert frames["row"].flatten().tolist() == [0, 1, 2]
    assert frames["next", "row"].flatten().tolist() == [1, 2, 3]
