"""Floor 5, one hook a file: imports torchrl and the floors below."""
