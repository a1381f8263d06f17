"""Which layers to convert: scores and allocation."""
