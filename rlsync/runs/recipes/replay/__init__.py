"""What all recipes with a replay buffer share: settings, the pace, and the buffer in checkpoints."""
