"""Workers on the machines of a Ray cluster: one agent for each node, and the learner's end of them."""
