"""Sizes shared by all parts. Discrete parts have those of CartPole-v1 and mix freely with it."""

OBSERVATIONS = 4
ACTIONS = 2
HIDDEN = 16
FRAMES_PER_BATCH = 10
