"""The recipes: complete trainers, their settings, and what they have in common."""
