"""The Trainer hooks of the recipes. They work with any ``torchrl.trainers.Trainer``."""
