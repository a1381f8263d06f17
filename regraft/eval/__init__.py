"""Judging: divergence, recall, lm-eval, speed, verification, report."""
