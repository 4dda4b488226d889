"""Players that belong to no recipe: random, epsilon-greedy, and random at first."""
