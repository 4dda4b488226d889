"""Floor 7, one verb a file: imports hydra, rich, matplotlib and every floor below."""
