"""Recipes that learn a model of the environment and act by what they imagine with it: Dreamer, V1 and V3."""
