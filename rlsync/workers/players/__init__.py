"""Players that belong to no recipe: a random one, an epsilon-greedy one, and TorchRL policies."""
