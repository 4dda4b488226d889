"""Processes that act: environments, players, rollouts, supervision. No algorithm."""
