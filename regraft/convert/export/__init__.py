"""Self-contained checkpoints, model cards, and the Hub."""
