"""Floor 4, a checked map that is published and adopted: no TorchRL, no gymnasium."""
