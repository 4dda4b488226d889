"""How a person's environment is made: functions, wrappers, limits, stacks, clipped rewards, and refusals."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, Graph, OneOf, Sequence, Space, Text, Tuple

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.envs.specs import make_venv
from rlsync.runs.actors.envs.vectors import ListedEnvs, VectorEnvs
from rlsync.runs.cli.main import main
from rlsync.runs.config import command_line
from rlsync.runs.evaluation.play import filmed
from rlsync.runs.evaluation.try_out import random_steps
from rlsync.runs.life.job import jobs_of
from rlsync.runs.recipes.env_settings import AtariConfig, EnvConfig, RenderedConfig, ending_after
from rlsync.runs.recipes.registry import recipe_named
from rlsync.runs.recipes.spaces import ANY
from tests.runs.recipes.test_recipe_envs import STEPS, rollout
from tests.tools.parts.made_envs import HORIZON, MODULE
from tests.tools.parts.space_envs import spaced

KINDS = {"single": ListedEnvs, "vector": VectorEnvs, "torchrls": None}


def made(function: str, **keys: Any) -> EnvConfig:
    return EnvConfig(make=f"{MODULE}:{function}", **keys)


def refusal(config: EnvConfig, call: Callable[[EnvConfig], object] = ANY.probe) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        call(config)
    assert len(str(error.value).splitlines()) == 3
    return error.value


# ------------------------------------------------------------------------------------ functions


@pytest.mark.parametrize("function", KINDS)
@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_function_makes_the_frames_of_the_environments_that_it_returns(
    function: str, num_envs: int
) -> None:
    batch = rollout(made(function, num_envs=num_envs))
    assert batch.batch_size == (num_envs, STEPS)
    lengths = batch["collector", "episode_length"]
    returns = batch["collector", "episode_return"]
    assert lengths.max() <= HORIZON
    assert batch["next", "done"].sum() >= 3 * num_envs
    assert torch.equal(lengths.float(), returns)
    firsts = batch["observation"][:, 0]
    assert len(firsts.unique(dim=0)) == num_envs, "each has a seed of its own"
    assert torch.equal(rollout(made(function, num_envs=num_envs))["observation"], batch["observation"])


@pytest.mark.parametrize(("function", "kind"), KINDS.items())
def test_recipes_take_what_a_function_makes_and_its_spec_travels(function: str, kind: type | None) -> None:
    config = made(function)
    for recipe in ("ppo", "impala"):
        assert recipe_named(recipe).probe(config).observation_shape == (4,)
    envs = make_venv(pickle.loads(pickle.dumps(config.spec())), 2)
    assert kind is None or isinstance(envs, kind)
    envs.close()


def test_a_function_is_called_with_its_arguments_and_is_the_environments_name() -> None:
    config = made("single", kwargs={"horizon": 4})
    assert rollout(config)["collector", "episode_length"].max() == 4
    assert (config.name, config.word) == (f"{MODULE}:single", f"env.make={MODULE}:single")
    assert config.facts() == f"{MODULE}:single"
    envs = filmed(config.spec(), seed=0)
    assert envs.frame.ndim == 3
    envs.close()


@pytest.mark.parametrize(
    ("function", "problem", "cure"),
    [
        ("singel", "made_envs has no 'singel'", "did you mean 'single'?"),
        ("raises", "raises RuntimeError: no licence", "correct the function"),
        ("nothing", "returns no environment: None", "return an environment or a vector environment"),
        ("agents", "returns ManyAgents, an environment of several agents", "what one of them sees"),
        ("three", "returns a vector of 3 environments, and a worker steps 1", "an argument num_envs"),
        ("late", "does not reset in the step that ends an episode", "AutoresetMode.SAME_STEP"),
        ("unlabelled", "observes nothing under 'observation': its keys are state", "RenameTransform"),
    ],
)
def test_a_function_that_makes_no_environment_is_refused(function: str, problem: str, cure: str) -> None:
    error = refusal(made(function))
    assert problem in error.what
    assert f"{MODULE}:{function}" in error.what + error.where
    assert cure in error.cure


@pytest.mark.parametrize(
    ("keys", "where", "cure"),
    [
        ({"make": "no_such_module:make"}, "env.make=no_such_module:make", "PYTHONPATH"),
        ({"make": f"{MODULE}.single"}, "env.make", "write env.make=module:function"),
        ({"make": f"{MODULE}:NOT_CALLABLE"}, "env.make=", "name a function"),
        ({"make": f"{MODULE}:single", "kwargs": {"horizn": 3}}, "env.make=", "+env.kwargs.NAME=VALUE"),
        ({"make": f"{MODULE}:vector", "frame_stack": 2}, "env.frame_stack", "around each environment"),
        ({"make": f"{MODULE}:torchrls", "max_episode_steps": 2}, "env.max_episode_steps", "transforms"),
        ({"id": ""}, "env.id", "for example"),
        ({"max_episode_steps": 3, "kwargs": {"max_episode_steps": 3}}, "env.max_episode_steps", "leave out"),
    ],
)
def test_keys_that_do_not_fit_are_refused_by_their_names(keys: dict[str, Any], where: str, cure: str) -> None:
    error = refusal(EnvConfig(**keys), lambda config: config.spec().envs(1))
    assert error.where.startswith(where)
    assert cure in error.cure


@pytest.mark.seconds
def test_settings_that_are_tuned_for_an_id_are_not_taken_for_a_function() -> None:
    for words in ([], ["env=pendulum"]):
        tuned, of_a_function = (
            jobs_of(command_line.read([*words, *more]))[0] for more in ([], [f"env.make={MODULE}:single"])
        )
        assert "tuned" in dict(tuned.told)["settings"]
        assert "general settings, not tuned" in dict(of_a_function.told)["settings"]


# ------------------------------------------------------------------------------------- wrappers

TRIPLED = {"name": f"{MODULE}:Scaled", "factor": 2.0}


@pytest.mark.parametrize(
    "keys", [{}, {"make": f"{MODULE}:single"}, {"make": f"{MODULE}:single", "num_envs": 2}]
)
def test_wrappers_are_put_around_each_environment_in_their_order(keys: dict[str, Any]) -> None:
    clipped = {"name": "gymnasium.wrappers.ClipReward", "max_reward": 2.5}
    first = rollout(EnvConfig(**keys, wrappers=[TRIPLED, clipped, f"{MODULE}.Scaled"]))
    assert first["next", "reward"].unique().tolist() == [6.0], "1 x 2, at most 2.5, x 3"
    last = rollout(EnvConfig(**keys, wrappers=[f"{MODULE}:Scaled", clipped, TRIPLED]))
    assert last["next", "reward"].unique().tolist() == [5.0], "1 x 3, at most 2.5, x 2"


def test_a_vector_environment_takes_wrappers_of_vector_environments() -> None:
    scaled = {"name": "gymnasium.wrappers.vector.ClipReward", "max_reward": 0.5}
    batch = rollout(made("vector", num_envs=2, wrappers=[scaled]))
    assert batch["next", "reward"].unique().tolist() == [0.5]
    assert "raises" in refusal(made("vector", wrappers=["gymnasium.wrappers.ClipReward"])).what


def test_what_is_drawn_is_in_its_wrappers() -> None:
    config = RenderedConfig("CartPole-v1", img_height=16, img_width=16, wrappers=[TRIPLED], frameskip=2)
    envs = make_venv(config.spec(), 1, seed=0)
    (answer,) = random_steps(envs, torch.Generator().manual_seed(0), 1)
    envs.close()
    assert answer.reward.tolist() == [4.0]


@pytest.mark.parametrize(
    ("wrapper", "problem", "cure"),
    [
        ("gymnasium.wrappers.TimeLimt", "gymnasium.wrappers has no 'TimeLimt'", "did you mean 'TimeLimit'?"),
        ("gymnasium.wraper.TimeLimit", "No module named", "did you mean 'gymnasium.wrappers'?"),
        ("Foo", "does not say in which module it lies", "module:name"),
        (f"{MODULE}:NOT_CALLABLE", "cannot be called: 3", "name a function or a class"),
        (f"{MODULE}:Breaks", "the wrapper Breaks raises LookupError: nothing to do", "look at what it takes"),
        (f"{MODULE}.forgets", "the wrapper forgets returns no environment: None", "gymnasium.Env"),
        ({"nam": "x"}, "a wrapper cannot be {'nam': 'x'}", "ARGUMENT: VALUE"),
        (3, "a wrapper cannot be 3", "ARGUMENT: VALUE"),
    ],
)
def test_a_wrapper_that_wraps_nothing_is_refused(wrapper: object, problem: str, cure: str) -> None:
    error = refusal(EnvConfig(wrappers=[wrapper]))
    assert problem in error.what
    assert error.where.startswith("env.wrappers")
    assert cure in error.cure


# ------------------------------------------------------------------------- limits, stacks, rewards


@pytest.mark.parametrize("config", [EnvConfig(), made("single")], ids=["id", "function"])
def test_an_episode_is_truncated_after_the_steps_that_a_key_says(config: EnvConfig) -> None:
    lengths = rollout(ending_after(config, 7))["collector", "episode_length"]
    assert lengths.max() == 7


def test_steps_of_what_is_drawn_are_actions_and_a_limit_of_gymnasiums_gives_way() -> None:
    config = RenderedConfig("CartPole-v1", frameskip=2, kwargs={"max_episode_steps": 100})
    limited = ending_after(config, 7)
    assert (limited.max_episode_steps, limited.kwargs) == (7, {})
    assert limited.spec().max_episode_steps == 14


@pytest.mark.parametrize(
    ("shape", "stacked"),
    [
        ((4,), (12,)),
        ((40, 44), (3, 40, 44)),
        ((20, 24, 1), (3, 20, 24)),
        ((20, 24, 3), (9, 20, 24)),
        ((2, 20, 24), (6, 20, 24)),
    ],
)
def test_the_newest_observations_are_one_vector_or_one_picture(
    shape: tuple[int, ...], stacked: tuple[int, ...]
) -> None:
    config = spaced(Box(0, 255, shape, np.uint8))
    alone = _observed(config)
    config.frame_stack = 3
    observed = _observed(config)
    assert observed[0].shape == (2, *stacked)
    history = [alone[0]] * 3
    for one, several in zip(alone, observed, strict=True):
        history = [*history[1:], one]
        assert torch.equal(several, _joined(history))


def _observed(config: EnvConfig) -> list[torch.Tensor]:
    """What two environments show after a reset and after each of four steps, of the same seed."""
    envs = make_venv(config.spec(), 2)
    first = envs.reset(1).clone()
    steps = random_steps(envs, torch.Generator().manual_seed(0), 4)
    observed = [first, *(answer.observation.clone() for answer in steps)]
    envs.close()
    return observed


def _joined(history: list[torch.Tensor]) -> torch.Tensor:
    """Along channels, or numbers, the oldest first."""
    return torch.cat(history, 1)


def test_choices_are_stacked_as_vectors_and_other_spaces_are_refused() -> None:
    config = spaced(Discrete(3))
    config.frame_stack = 2
    assert rollout(config)["observation"].sum(-1).unique().tolist() == [2.0]
    config = spaced(Dict(near=Discrete(2), far=Box(0, 1, (2,))))
    config.frame_stack = 3
    assert rollout(config)["observation"].shape[-1] == 12
    config = spaced(Dict(near=Discrete(2), camera=Box(0, 255, (8, 8, 3), np.uint8)))
    config.frame_stack = 2
    error = refusal(config)
    assert (error.where.partition("=")[0], "FlattenObservation" in error.cure) == ("env.frame_stack", True)


def test_the_learner_gets_clipped_rewards_and_returns_are_the_environments() -> None:
    batch = rollout(EnvConfig("Pendulum-v1", 2, wrappers=[TRIPLED], max_episode_steps=20))
    config = EnvConfig("Pendulum-v1", 2, wrappers=[TRIPLED], max_episode_steps=20, clip_reward=True)
    assert config.facts().endswith("the learner's rewards are clipped to [-1, 1], returns are not")
    clipped = rollout(config)
    rewards = batch["next", "reward"]
    assert rewards.min() < -1
    assert torch.equal(clipped["next", "reward"], rewards.clamp(-1, 1))
    for key in ("episode_return", "episode_length"):
        assert torch.equal(clipped["collector", key], batch["collector", key])
    assert batch["collector", "episode_return"].min() < -20


# --------------------------------------------------------------------------- spaces, other packages

ACTIONS = {
    "unflatten": [Dict(move=Box(-1, 1, (2,)), jump=Discrete(2)), Tuple((Discrete(2), Discrete(3)))],
    "members that you list": [
        Text(5),
        Sequence(Discrete(2)),
        OneOf((Discrete(2), Discrete(3))),
        Graph(Box(-1, 1, (2,)), None),
    ],
}
CASES = [(space, cure) for cure, spaces in ACTIONS.items() for space in spaces]


@pytest.mark.parametrize(("space", "cure"), CASES, ids=lambda case: type(case).__name__)
def test_actions_that_no_player_has_are_refused_with_the_wrapper_that_helps(
    space: Space[Any], cure: str
) -> None:
    error = refusal(spaced(action=space))
    assert "takes actions of" in error.what
    assert "gymnasium.wrappers.TransformAction" in error.cure
    assert cure in error.cure


@pytest.mark.parametrize(
    ("space", "problem", "cure"),
    [
        (Text(5), "no numbers: Text(", "TransformObservation"),
        (Sequence(Box(0, 1, (2,))), "no numbers: Sequence(", "TransformObservation"),
        (
            Dict(goal=Text(5), near=Box(0, 1, (2,)), seen=Dict(word=Text(3), at=Discrete(2))),
            "goal is Text, seen.word is Text",
            "env.wrappers=[{name: gymnasium.wrappers.FilterObservation, filter_keys: [near]}]",
        ),
    ],
)
def test_observations_without_numbers_are_refused_with_the_wrapper_that_helps(
    space: Space[Any], problem: str, cure: str
) -> None:
    error = refusal(spaced(space))
    assert problem in error.what
    assert cure in error.cure


@pytest.mark.parametrize("key", ["make", "wrappers", "max_episode_steps", "frame_stack"])
def test_games_of_ale_py_say_which_key_they_have_instead(key: str) -> None:
    values = {"make": "a:b", "wrappers": ["a:B"], "max_episode_steps": 3, "frame_stack": 2}
    config = AtariConfig("ALE/Pong-v5", **{key: values[key]})
    (error,) = config.errors()
    assert error.where == f"env.{key}"
    instead = {"max_episode_steps": "env.max_episode_frames", "frame_stack": "env.stack_num"}
    assert instead.get(key, "env=gymnasium") in error.cure


# ---------------------------------------------------------------------------------- through a run

RUN = (
    "recipe=ppo",
    "recipe.num_epochs=1",
    "recipe.total_frames=256",
    "recipe.evaluation.every_frames=128",
    "recipe.evaluation.episodes=2",
    "collector.frames_per_batch=64",
    "collector.num_workers=1",
    "recipe.hidden=[16]",
    "logger=none",
)


#: A function, what is put around what it makes, and the words that the first lines of a run have for that.
AROUND = {
    "single": (
        (
            f"env.wrappers=[{{name: '{MODULE}:Scaled', factor: 2.0}}, gymnasium.wrappers.FlattenObservation]",
            "env.frame_stack=2",
            "env.max_episode_steps=9",
            "env.clip_reward=true",
        ),
        "; in Scaled(factor=2.0), FlattenObservation; at most 9 steps an episode; 2 newest observations",
    ),
    "vector": (("env.num_envs=2", "env.clip_reward=true"), "; the learner's rewards are clipped"),
    "torchrls": (("env.num_envs=2",), ""),
}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.one_case
@pytest.mark.parametrize("function", AROUND)
def test_the_keys_travel_with_a_run_to_all_that_reads_it(
    function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, more = tmp_path / "run", tmp_path / "more"
    keys, facts = AROUND[function]
    single = function == "single"
    longest = 9 if single else HORIZON
    assert main(["train", *RUN, f"env.make={MODULE}:{function}", *keys, f"run_dir={run}"]) == 0
    assert f"plays {MODULE}:{function}{facts}" in capsys.readouterr().out
    with (run / "evaluations.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows
    assert all(float(row["length_mean"]) <= longest for row in rows)
    assert main(["train", f"resume={run}", "recipe.total_frames=384", f"run_dir={more}"]) == 0
    capsys.readouterr()
    for folder in (run, more):
        assert main(["eval", str(folder), "--episodes", "2", "--no-video", "--json"]) == 0
        score = json.loads(capsys.readouterr().out)
        assert score["env"] == f"{MODULE}:{function}"
        factor = 2 if single else 1
        assert score["return_mean"] == factor * score["length_mean"], "evaluated returns are not clipped"
        assert score["length_mean"] <= longest
    if single:
        limited = ["--max-episode-steps", "3", "--episodes", "2", "--json", "--no-video"]
        assert main(["eval", str(run), *limited]) == 0
        assert json.loads(capsys.readouterr().out)["length_mean"] == 3
    assert main(["rerun", str(run)]) == 0, capsys.readouterr()
    assert main(["export", str(run), str(tmp_path / "policy.pt2")]) == 0
    exported = torch.export.load(tmp_path / "policy.pt2").module()
    assert exported(torch.zeros(1, 8 if single else 4)) is not None
