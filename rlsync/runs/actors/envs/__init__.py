"""Vectors of environments behind one interface, and films of them."""
