"""Floor 3, publishers and subscribers: imports torch, the standard library and the floors below."""
