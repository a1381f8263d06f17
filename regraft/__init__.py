"""regraft: new attention on an old trunk.

Takes a pretrained softmax-attention language model, replaces the attention of chosen layers, teaches the replacements,
measures what was lost, and writes a checkpoint that loads anywhere. The Python interface mirrors the command line.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# name -> module that defines it; imported on first use, so that `import regraft` stays light
_API = {name: "regraft.api" for name in (
    "inspect", "plan", "select", "convert", "distill", "run", "evaluate", "verify", "bench", "report", "export", "load",
)}  # fmt: skip

__all__ = ["__version__", *sorted(_API)]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module 'regraft' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
