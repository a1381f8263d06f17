"""Which implementation of each operation runs here, and why.

Every operation has a PyTorch implementation that runs everywhere; it is the only one so far, so asking for another by
the environment variable REGRAFT_BACKEND is an error rather than a silent fallback.
"""

import importlib.util
import os

OPERATIONS = ("sliding_window", "linear", "window_linear")
BACKENDS = ("torch",)


def backend(operation: str) -> str:
    """Name of the implementation that `operation` uses; ValueError for one that does not exist."""
    if operation not in OPERATIONS:
        raise ValueError(f"no operation '{operation}'; known: {', '.join(OPERATIONS)}")
    wanted = os.environ.get("REGRAFT_BACKEND", "torch")
    if wanted not in BACKENDS:
        raise ValueError(f"REGRAFT_BACKEND={wanted}: {operation} is implemented in {', '.join(BACKENDS)}")
    return wanted


def report() -> dict[str, str]:
    """Operation -> implementation, and which optional libraries are there (found, never imported)."""
    told = {operation: backend(operation) for operation in OPERATIONS}
    for name in ("triton", "fla"):
        there = importlib.util.find_spec(name) is not None
        told[name] = "installed, no kernel of ours uses it yet" if there else "not installed"
    return told
