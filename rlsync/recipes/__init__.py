"""Floor 6, complete trainers: imports torchrl, gymnasium and the floors below. ``registry`` lists them."""
