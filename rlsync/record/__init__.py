"""What decides a run is written down, and the run is made again from it."""
