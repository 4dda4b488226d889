"""A policy, or a dict of its weights, is given to update_policy_weights_, as its docstring allows."""

import copy

from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv

layer = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
policy = TensorDictSequential(layer)
collector = Collector(GymEnv("Pendulum-v1"), policy, frames_per_batch=10)
other = copy.deepcopy(policy)
for weights in (TensorDict.from_module(other), other, TensorDict.from_module(other).to_dict()):
    try:
        collector.update_policy_weights_(weights)
        print(f"{type(weights).__name__}: taken")
    except Exception as error:
        print(f"{type(weights).__name__}: {type(error).__name__}: {error}")
collector.shutdown()
