"""Players of several modules with a recurrent state: TorchRL's DreamerV1 and DreamerV3."""
