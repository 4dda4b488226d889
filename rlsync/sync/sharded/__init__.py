"""Learners whose weights are sharded over several processes. The rest of sync comes in by :mod:`.ranks`."""
