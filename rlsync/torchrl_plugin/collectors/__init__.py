"""Endpoints: where weights go, one file for each kind of collector."""
