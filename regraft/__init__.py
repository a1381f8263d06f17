"""regraft: new attention on an old trunk."""
