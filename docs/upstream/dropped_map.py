"""A map of weights on a collector without schemes: nothing is copied, no error is raised, the version advances."""

from types import SimpleNamespace

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.trainers import UpdateWeights

acting, learning = (
    TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    for _ in range(2)
)
collector = Collector(GymEnv("Pendulum-v1"), acting, frames_per_batch=10, track_policy_version=True)
trainer = SimpleNamespace(actor=learning)
UpdateWeights(collector, 1, weight_update_map={"polcy": "actor"}, trainer=trainer)()
same = torch.equal(acting.module.weight, learning.module.weight)
print(f"weights arrived: {same}; version {collector.policy_version}")
collector.shutdown()
