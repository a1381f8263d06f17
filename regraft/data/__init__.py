"""Text sources, packing, synthetic tasks."""
