"""The recipe schema and the shipped recipes."""
