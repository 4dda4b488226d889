"""Floor 1, the words as types: imports the standard library only."""
