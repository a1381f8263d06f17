"""The code beside the weights: a grafted checkpoint loads anywhere with trust_remote_code=True, without regraft.

transformers copies and imports only flat modules that it finds by `from .NAME import`, so the modules a model uses are
written as `regraft_<path>.py` with their imports rewritten, plus a generated `modeling_regraft.py` that binds the one
family's classes. A model that was itself loaded from such a folder copies these files on (see model/factory.py).
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

from regraft.convert.mixers.registry import get_mixer

_IMPORT = re.compile(r"^from (regraft(?:\.\w+)+) import ", flags=re.MULTILINE)
_FACTORY = "regraft.convert.model.factory"
_HEADER = (
    "# Part of a checkpoint written by regraft {version} (Apache-2.0), so that it loads without regraft.\n"
    "# Generated: change the original, regraft/{path}, instead.\n"
)


def flat_name(module: str) -> str:
    """`regraft.convert.spec` as the name of a flat module: `regraft_convert_spec`."""
    return module.replace(".", "_")


def used_modules(roots: list[str]) -> list[str]:
    """`roots` and every regraft module that they import at top level, directly or not, sorted."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        for node in ast.parse(_source(module)).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("regraft."):
                waiting.append(node.module)
    return sorted(found)


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin)


def _source(module: str) -> str:
    return _path(module).read_text(encoding="utf-8")


def flatten(module: str, version: str) -> str:
    """Source of `module` with `from regraft.x.y import a` as `from .regraft_x_y import a`."""
    text = _IMPORT.sub(lambda match: f"from .{flat_name(match[1])} import ", _source(module))
    return _HEADER.format(version=version, path="/".join(module.split(".")[1:]) + ".py") + text


def modeling_source(model: Any, version: str) -> str:
    """The generated module that transformers is sent to by `auto_map`."""
    source = type(model).__mro__[2]
    names = {entry["name"] for entry in model.config.regraft["mixers"].values()}
    classes = {name: get_mixer(name) for name in sorted(names)}
    family = type(model)._family_names
    lines = [
        f"# Written by regraft {version} (Apache-2.0). Classes of this checkpoint:",
        f"# a {source.__name__} whose attention is replaced in {len(model.config.regraft['mixers'])} layers.",
        f"from {source.__module__} import {_causal_source(source)}",
        f"from .{flat_name(_FACTORY)} import make_classes",
        *(f"from .{flat_name(c.__module__)} import {c.__name__}" for c in classes.values()),
        "",
        "MIXERS = {" + ", ".join(f'"{name}": {c.__name__}' for name, c in classes.items()) + "}",
        f"{family['config']}, {family['base']}, {family['causal']} = make_classes("
        f"{_causal_source(source)}, MIXERS, __name__)",
    ]
    return "\n".join(lines) + "\n"


def _causal_source(source: type) -> str:
    """Name of the source's causal-LM class, also when `source` is its base model."""
    name = source.__name__
    return (
        name if name.endswith("ForCausalLM") else name.removesuffix("TextModel").removesuffix("Model") + "ForCausalLM"
    )


def write_code(model: Any, folder: str | Path) -> list[str]:
    """Write the modules that `model` uses into `folder`; returns the file names."""
    from regraft import __version__

    names = {entry["name"] for entry in model.config.regraft["mixers"].values()}
    modules = used_modules([_FACTORY, *(get_mixer(name).__module__ for name in sorted(names))])
    folder = Path(folder)
    written = []
    for module in modules:
        file = folder / f"{flat_name(module)}.py"
        file.write_text(flatten(module, __version__), encoding="utf-8")
        written.append(file.name)
    (folder / "modeling_regraft.py").write_text(modeling_source(model, __version__), encoding="utf-8")
    return [*written, "modeling_regraft.py"]
