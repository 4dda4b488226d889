"""Floor 5, the plug into TorchRL: imports torchrl and the floors below."""
