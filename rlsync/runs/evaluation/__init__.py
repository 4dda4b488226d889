"""Plays a version, scores it, films it, and keeps the best. No algorithm."""
