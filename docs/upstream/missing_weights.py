"""Weights that lack a layer, or have another shape, are applied without an error."""

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.weight_update import WeightStrategy

net = nn.Linear(3, 2)
WeightStrategy(extract_as="tensordict").apply_weights(net, TensorDict())
print("no weights at all: taken")
WeightStrategy(extract_as="tensordict").apply_weights(net, TensorDict(bias=torch.ones(1)))
print(f"a bias of one number for two: {net.bias.tolist()}")
