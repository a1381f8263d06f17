"""The target mechanisms, one file each."""
