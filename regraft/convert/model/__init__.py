"""Configuration, model classes, cache layers and the per-forward context of grafted models."""
