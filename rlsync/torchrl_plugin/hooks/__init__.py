"""Floor 4, one hook a file: imports torchrl and the floors below."""
