"""Replayed experience: rows, unrolls, mixing."""
