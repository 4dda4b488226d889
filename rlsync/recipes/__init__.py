"""Floor 5, complete trainers: imports torchrl, gymnasium and the floors below."""
