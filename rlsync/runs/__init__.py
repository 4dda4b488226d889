"""The house that stands on the plug: everything that trains by itself."""
