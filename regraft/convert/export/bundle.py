"""The code beside the weights: a grafted checkpoint loads anywhere with trust_remote_code=True, without regraft.

transformers copies and imports only flat modules that it finds by `from .NAME import`, so the modules a model uses are
written as `regraft_<path>.py` with their imports rewritten, plus a generated `modeling_regraft.py` that binds the one
family's classes. A model that was itself loaded from such a folder copies these files on (see model/factory.py).
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from regraft.convert.mixers.registry import get_mixer

MIN_TRANSFORMERS = "5.24"
ENTRY = "modeling_regraft"

_FACTORY = "regraft.convert.model.factory"
_HEADER = (
    "# Part of a checkpoint written by regraft {version} (Apache-2.0), so that it loads without regraft.\n"
    "# Generated: change the original, {path}, instead.\n"
)
_GENERATED = re.compile(rf"^({ENTRY}|regraft_\w+)\.py$")
_RELATIVE = re.compile(r"^from \.(\w+) import ", flags=re.MULTILINE)
_CHECK = """\
import transformers

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < ({least}):
    raise ImportError(f"this checkpoint needs transformers >= {wanted}, found {{transformers.__version__}}")
"""


def flat_name(module: str) -> str:
    """`regraft.convert.spec` as the name of a flat module: `regraft_convert_spec`."""
    return module.replace(".", "_")


def used_modules(roots: Iterable[str]) -> list[str]:
    """`roots` and every module of their packages that they import at top level, directly or not, sorted.

    ValueError, naming file and line, for an import that could not be followed into a checkpoint: inside a function, of
    a whole module, relative, or of a package.
    """
    roots = list(roots)
    packages = {root.split(".")[0] for root in roots}
    found: set[str] = set()
    while roots:
        module = roots.pop()
        if module not in found:
            found.add(module)
            roots.extend(_own_imports(module, packages))
    return sorted(found)


def _own_imports(module: str, packages: set[str]) -> Iterator[str]:
    """The modules of `packages` that `module` imports."""
    tree = ast.parse(_source(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            own = [alias.name for alias in node.names if alias.name.split(".")[0] in packages]
        elif isinstance(node, ast.ImportFrom):
            own = [node.module or "."] if node.level or (node.module or "").split(".")[0] in packages else []
        else:
            continue
        for name in own:
            whole = isinstance(node, ast.Import) or "." not in name or node.level or _path(name).name == "__init__.py"
            if whole or node not in tree.body:
                raise ValueError(
                    f"{_path(module).name}, line {node.lineno}: '{ast.unparse(node)}' cannot go into a checkpoint; "
                    f"use a top-level 'from package.module import name'"
                )
            yield name


def _path(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"no module {module}")
    return Path(spec.origin)


def _source(module: str) -> str:
    return _path(module).read_text(encoding="utf-8")


def flatten(module: str, version: str, packages: Iterable[str] = ("regraft",)) -> str:
    """Source of `module` with `from regraft.x.y import a` as `from .regraft_x_y import a`."""
    pattern = re.compile(rf"^from ((?:{'|'.join(sorted(packages))})(?:\.\w+)+) import ", flags=re.MULTILINE)
    text = pattern.sub(lambda match: f"from .{flat_name(match[1])} import ", _source(module))
    return _HEADER.format(version=version, path=module.replace(".", "/") + ".py") + text


def modeling_source(model: Any, version: str) -> str:
    """The generated module that transformers is sent to by `auto_map`."""
    source = _source_class(model)
    classes = {name: get_mixer(name) for name in _mixer_names(model)}
    family = type(model)._family_names
    count = len(model.config.regraft["mixers"])
    lines = [
        f"# Written by regraft {version} (Apache-2.0). Classes of this checkpoint:",
        f"# a {source.removesuffix('ForCausalLM')} with the attention of {count} layers replaced.",
        _CHECK.format(least=MIN_TRANSFORMERS.replace(".", ", "), wanted=MIN_TRANSFORMERS),
        f"from {_source_module(model)} import {source}",
        f"from .{flat_name(_FACTORY)} import make_classes",
        *(f"from .{flat_name(c.__module__)} import {c.__name__}" for c in classes.values()),
        "",
        "MIXERS = {" + ", ".join(f'"{name}": {c.__name__}' for name, c in classes.items()) + "}",
        f"{family['config']}, {family['base']}, {family['causal']} = make_classes({source}, MIXERS, __name__)",
    ]
    return "\n".join(lines) + "\n"


def _mixer_names(model: Any) -> list[str]:
    return sorted({entry["name"] for entry in model.config.regraft["mixers"].values()})


def _family_class(model: Any) -> type:
    """The source family's own class that `model` (a base model or a causal LM) extends."""
    return next(c for c in type(model).__mro__ if c.__module__.startswith("transformers.models."))


def _source_module(model: Any) -> str:
    return _family_class(model).__module__


def _source_class(model: Any) -> str:
    """Name of the source's causal-LM class, also when `model` is a base model."""
    return type(model)._family_names["causal"].removeprefix("Regraft")


def write_code(model: Any, folder: str | Path) -> list[str]:
    """Write the modules that `model` uses into `folder`; returns the file names.

    Same model, same bytes. Generated files of an earlier save that this model does not use are removed.
    """
    from regraft import __version__

    modules = used_modules([_FACTORY, *(get_mixer(name).__module__ for name in _mixer_names(model))])
    packages = {module.split(".")[0] for module in modules}
    files = {f"{flat_name(module)}.py": flatten(module, __version__, packages) for module in modules}
    files[f"{ENTRY}.py"] = modeling_source(model, __version__)
    folder = Path(folder)
    for old in folder.iterdir():
        if _GENERATED.match(old.name) and old.name not in files:
            old.unlink()
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return list(files)


def code_files(folder: Path) -> list[str]:
    """The code files of a checkpoint folder, as transformers finds them: from the entry module, by its imports.

    FileNotFoundError names a module that is imported but not there.
    """
    found: list[str] = []
    waiting = [ENTRY]
    while waiting:
        name = f"{waiting.pop()}.py"
        if name not in found:
            found.append(name)
            waiting.extend(_RELATIVE.findall((folder / name).read_text(encoding="utf-8")))
    return sorted(found)
