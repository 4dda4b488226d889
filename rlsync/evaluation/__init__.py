"""Floor 5, above the two other rooms: play a version, score it, film it, keep the best. No algorithm."""
