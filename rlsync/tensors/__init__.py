"""Floor 2, named leaves and their bytes: imports torch, tensordict and the floor below."""
