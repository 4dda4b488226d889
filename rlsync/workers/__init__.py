"""Floor 5, processes that act: environments, players, rollouts, supervision. No algorithm."""
