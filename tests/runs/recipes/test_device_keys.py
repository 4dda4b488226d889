"""The devices of a run: what their keys accept, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlsync.core.errors import ConfigError
from rlsync.runs.actors.devices import CPU, device_named, device_of_each
from rlsync.runs.recipes import ppo
from rlsync.runs.recipes.checks import check, errors
from rlsync.runs.recipes.dqn import DQNConfig
from rlsync.runs.recipes.impala import Categorical, CollectSettings, GymnasiumEnvs, ImpalaNet, UnrollCollector
from rlsync.runs.recipes.impala.settings import ImpalaConfig
from rlsync.runs.recipes.run import Run
from rlsync.runs.recipes.sac import SACConfig
from rlsync.runs.recipes.settings import CollectorConfig, Config, DeviceConfig, PPOConfig
from rlsync.runs.recipes.td3 import TD3Config
from rlsync.runs.recipes.trainer import RandomState
from tests.runs.recipes.test_recipes import small_ppo
from tests.tools.processes import child_pids
from tests.tools.running import in_three_lines

NONE_HERE = torch.cuda.device_count() == 0


def config_with(key: str, device: Any) -> Config:
    config = Config()
    getattr(config, key.partition(".")[0]).device = device
    return config


KEYS = ("learner.device", "collector.device", "evaluation.device")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    ("device", "what"),
    [
        ("cuda:99", "no device 'cuda:99': this machine has "),
        ("cpu:1", "no device 'cpu:1': this machine has 1 CPU device"),
        ("gpu", "no device is called 'gpu'"),
        ("meta", "no device is called 'meta'"),
        ("", "no device is called ''"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_its_key_and_what_there_is(
    key: str, device: str, what: str
) -> None:
    before = child_pids()
    with pytest.raises(ConfigError) as refused:
        ppo.RECIPE.build(config_with(key, device))
    assert refused.value.what.startswith(what)
    assert refused.value.where == key
    in_three_lines(refused.value)
    assert child_pids() == before


@pytest.mark.skipif(not NONE_HERE, reason="this machine has a CUDA device")
def test_without_any_cuda_device_the_error_says_so() -> None:
    with pytest.raises(ConfigError) as refused:
        check(config_with("learner.device", "cuda:3"))
    assert str(refused.value).splitlines()[0] == "no device 'cuda:3': this machine has no CUDA device"


@pytest.mark.parametrize(
    ("device", "what"),
    [
        (["cpu"], "1 device for 2 workers"),
        (["cpu"] * 3, "3 devices for 2 workers"),
        ([], "0 devices for 2 workers"),
        (3, "3 is neither a device nor a list of devices"),
        (None, "None is neither a device nor a list of devices"),
    ],
)
def test_a_list_of_devices_has_one_for_each_worker(device: Any, what: str) -> None:
    (error,) = errors(config_with("collector.device", device))
    assert error.what == what
    assert error.where == "collector.device"


def test_an_entry_of_the_list_is_named_by_its_number() -> None:
    (error,) = errors(config_with("collector.device", ["cpu", "cuda:99"]))
    assert error.where == "collector.device, entry 1"


@pytest.mark.parametrize("device", ["cpu", "cpu:0", ["cpu", "cpu"], torch.device("cpu")])
def test_cpus_are_cpus_however_they_are_written(device: Any) -> None:
    config = config_with("collector.device", device)
    assert Run(check(config)).worker_devices == (CPU, CPU)


def test_the_defaults_are_cpus_for_everything() -> None:
    run = Run(Config())
    assert (run.device, run.worker_devices, run.evaluation_device) == (CPU, (CPU, CPU), CPU)


def test_all_wrong_devices_are_told_at_once() -> None:
    wrong = Config(
        collector=CollectorConfig(device=["gpu", "cpu"]),
        learner=DeviceConfig("gpu"),
        evaluation=DeviceConfig("gpu"),
    )
    assert [error.where for error in errors(wrong)] == [
        "learner.device",
        "collector.device, entry 0",
        "evaluation.device",
    ]


@pytest.mark.parametrize("recipe", [PPOConfig(), DQNConfig(), SACConfig(), TD3Config(), ImpalaConfig()])
def test_workers_act_on_any_device_that_torch_knows(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # No accelerator is at hand: torch is told of an XPU, of which TorchRL 0.14.1 knows nothing.
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    config = config_with("collector.device", ["cpu", "xpu"])
    config.recipe = recipe
    config.collector.frames_per_batch = 160
    assert list(errors(config)) == []


def test_without_a_worker_process_there_is_one_device() -> None:
    config = config_with("collector.device", ["cpu"])
    config.collector.num_workers = 0
    (error,) = errors(config)
    assert error.what == "a list of devices has one for each worker, and there is no worker process"
    config.collector.device = "cpu"
    assert Run(check(config)).worker_devices == (CPU,)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"policy_device": ["cpu"]}, "1 device for 2 workers"),
        ({"policy_device": "gpu"}, "no device is called 'gpu'"),
        ({"storing_device": "cuda:99"}, "no device 'cuda:99': this machine has "),
    ],
)
def test_the_actor_learner_refuses_a_device_before_a_worker_starts(
    options: dict[str, Any], what: str
) -> None:
    before = child_pids()
    net = ImpalaNet((4,), Categorical(2))
    env = GymnasiumEnvs("CartPole-v1")
    with pytest.raises(ConfigError) as refused:
        UnrollCollector(net, env, CollectSettings(steps=5, envs_per_worker=2, **options))
    assert refused.value.what.startswith(what)
    assert child_pids() == before


def test_devices_are_numbered_so_that_equal_ones_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_named("cuda", "here") == torch.device("cuda", 0)
    assert device_of_each(["cuda:1", "cpu"], 2, "here") == (torch.device("cuda", 1), CPU)
    with pytest.raises(ConfigError) as refused:
        device_named("cuda:2", "here")
    assert refused.value.what == "no device 'cuda:2': this machine has 2 CUDA devices"
    assert refused.value.cure == "give cpu, or one of cuda:0, cuda:1"


@pytest.mark.skipif(not NONE_HERE, reason="this machine has a CUDA device")
def test_a_checkpoint_with_the_random_numbers_of_a_gpu_loads_without_one() -> None:
    state = RandomState().state_dict()
    drawn = torch.rand(3)
    gpu = {**state, "torch_cuda": [torch.zeros(16, dtype=torch.uint8)]}
    RandomState().load_state_dict(gpu)
    assert torch.equal(torch.rand(3), drawn)
    assert "torch_cuda" in gpu, "what was given is left as it is"


@pytest.mark.usefixtures("fork_workers")
def test_a_list_of_cpus_trains_as_a_single_cpu_does() -> None:
    config = small_ppo()
    config.collector.device = ["cpu", "cpu"]
    config.recipe.total_frames = 128
    trainer = ppo.RECIPE.build(config)
    shared = [parameter.is_shared() for parameter in trainer.loss_module.parameters()]
    trainer.train()
    assert trainer.collected_frames == 128
    assert not any(shared), "the learner's own weights stay where they are"
