"""regraft: new attention on an old trunk.

Takes a pretrained softmax-attention language model, replaces the attention of chosen layers, teaches the replacements,
measures what was lost, and writes a checkpoint that loads anywhere. The Python interface mirrors the command line.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# name -> module that defines it; imported on first use, so that `import regraft` stays light
_API = {name: "regraft.api" for name in (
    "inspect", "plan", "select", "convert", "distill", "run", "evaluate", "verify", "bench", "report", "export", "load",
)}  # fmt: skip

__all__ = ["__version__", *sorted(_API)]


class _Room(ModuleType):
    """A package with the name of a function of ours: calling it calls that function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module("regraft.api"), self.__name__.rpartition(".")[2])(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        import inspect as standard

        return standard.signature(getattr(import_module("regraft.api"), self.__name__.rpartition(".")[2]))


class _Package(ModuleType):
    """This package. Python sets a subpackage as its attribute, which would hide the function of the same name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _API and isinstance(value, ModuleType):
            value.__class__ = _Room
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module 'regraft' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
