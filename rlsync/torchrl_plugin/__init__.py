"""Floor 4, the plug into TorchRL: imports torchrl and the floors below."""
