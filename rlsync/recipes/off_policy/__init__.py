"""Recipes that learn from a replay buffer, at a held pace: dqn, sac and td3."""
