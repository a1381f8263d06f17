"""A checkpoint becomes a grafted model."""
