"""Recipes that learn a model of the environment and act by what they imagine with it: dreamer_v3."""
