"""CollectSettings refuse, before there is a collector, what no collector can do."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.cluster.collector import ClusterCollector
from rlsync.runs.actors.envs.actions import DiscreteActions
from rlsync.runs.actors.envs.specs import GymnasiumEnvs
from rlsync.runs.actors.players.uniform import UniformPlayer
from rlsync.runs.actors.settings import CollectSettings
from rlsync.runs.actors.supervision import Restarts

SETTINGS = CollectSettings(steps=5, envs_per_worker=2)


@pytest.mark.parametrize(
    ("changed", "what", "where"),
    [
        ({"steps": 0}, "steps is a whole number of at least 1, got 0", "steps=0"),
        ({"envs_per_worker": 1.5}, "envs_per_worker is a whole number", "envs_per_worker=1.5"),
        ({"rollouts_per_batch": -1}, "rollouts_per_batch is a whole number", "rollouts_per_batch=-1"),
        (
            {"overlap": True, "envs_per_worker": 1},
            "one environment cannot be split in two",
            "overlap=True, envs_per_worker=1",
        ),
        ({"adopt": "alais"}, "no adoption mode 'alais'", "adopt='alais'"),
        ({"silent_timeout_s": 0.0}, "a timeout is a number of seconds above zero", "silent_timeout_s=0.0"),
        ({"silent_timeout_s": None}, "a timeout is a number of seconds above zero", "silent_timeout_s=None"),
        ({"storing_device": "gpu"}, "no device is called 'gpu'", "storing_device=..."),
    ],
)
def test_a_wrong_value_is_refused_when_the_settings_are_made(
    changed: dict[str, Any], what: str, where: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(SETTINGS, **changed)
    assert refused.value.what.startswith(what)
    assert refused.value.where == f"CollectSettings({where})"


def test_devices_have_numbers_and_there_is_one_for_each_worker() -> None:
    assert SETTINGS.learner_device() == torch.device("cpu")
    assert SETTINGS.worker_devices(3) == (torch.device("cpu"),) * 3
    with pytest.raises(ConfigError, match="2 devices for 3 workers") as refused:
        replace(SETTINGS, policy_device=["cpu", "cpu"]).worker_devices(3)
    assert refused.value.where == "CollectSettings(policy_device=...)"


def test_settings_reach_other_processes_as_they_are() -> None:
    settings = replace(SETTINGS, dtype=torch.bfloat16, restarts=Restarts(2), policy_device=["cpu"])
    assert pickle.loads(pickle.dumps(settings)) == settings


@pytest.mark.parametrize(
    ("slots", "workers", "where"),
    [(0, 2, "CollectSettings(slots=0)"), (None, 0, "ClusterCollector(workers_per_node=0)")],
)
def test_a_cluster_refuses_its_numbers_before_it_asks_ray_for_anything(
    slots: int | None, workers: int, where: str
) -> None:
    player = UniformPlayer(DiscreteActions(2), (4,))
    with pytest.raises(ConfigError, match="is a whole number of at least 1, got 0") as refused:
        ClusterCollector(
            player,
            GymnasiumEnvs("CartPole-v1"),
            replace(SETTINGS, slots=slots),
            workers_per_node=workers,
        )
    assert refused.value.where == where
