"""Which implementation of each operation runs here, and why.

Every operation has a PyTorch implementation that runs everywhere; so far it is the only one. The environment variable
REGRAFT_BACKEND asks for one by name: where an operation has none of that name, running it is an error, never a silent
fallback.
"""

import importlib
import os

# operation -> its implementations, best first; one that needs a library is used when the library imports
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "sliding_window": ("torch",),
    "linear": ("torch",),
    "window_linear": ("torch",),
}
LIBRARIES = ("triton", "fla")


def backend(operation: str) -> str:
    """Name of the implementation that `operation` uses; ValueError for one that does not exist."""
    if operation not in IMPLEMENTATIONS:
        raise ValueError(f"no operation '{operation}'; known: {', '.join(IMPLEMENTATIONS)}")
    there = IMPLEMENTATIONS[operation]
    wanted = os.environ.get("REGRAFT_BACKEND")
    if wanted is None:
        return there[0]
    if wanted not in there:
        raise ValueError(f"REGRAFT_BACKEND={wanted}: {operation} is implemented in {', '.join(there)}; unset it")
    return wanted


def report() -> dict[str, str]:
    """Operation -> implementation and why; then each optional library and whether it imports, with the reason if not.

    Imports the optional libraries, whose import may fail in any way at all (a missing driver, an old compiler).
    """
    told = {}
    for operation in IMPLEMENTATIONS:
        try:
            told[operation] = backend(operation)
        except ValueError as error:
            told[operation] = f"none: {error}"
    for name in LIBRARIES:
        try:
            module = importlib.import_module(name)
        except Exception as error:
            told[name] = f"not usable: {type(error).__name__}: {error}"
        else:
            told[name] = f"{getattr(module, '__version__', 'of unknown version')}, no kernel of ours uses it yet"
    return told
