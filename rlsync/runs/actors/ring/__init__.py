"""The RolloutRing: rollouts from worker processes to one learner."""
