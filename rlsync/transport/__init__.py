"""Floor 3, how bytes travel: imports torch, the standard library and the floors below."""
