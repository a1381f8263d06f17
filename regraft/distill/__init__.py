"""Losses, stages and the training loop."""
