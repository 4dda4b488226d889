"""Checked, versioned weight synchronisation for TorchRL."""

__version__ = "0.1.0.dev0"
