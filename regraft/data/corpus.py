"""The embedded corpus: the documentation that every CPython carries, so that the demo needs no download.

`pydoc_data.topics` (the language reference by topic) and the docstrings of the standard library, one document a topic
or module. One tenth of the documents, chosen by a hash of their names, is held out for evaluation.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from functools import cache
from pathlib import Path

SMALLEST = 400  # characters; shorter documents say too little
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "pydoc_data", "turtledemo"}


def held_out(name: str) -> bool:
    """Whether the document called `name` belongs to the held-out tenth."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0


@cache
def _all_documents() -> dict[str, str]:
    documents = {**_topics(), **_modules()}
    seen: set[str] = set()
    kept = {}
    for name in sorted(documents):
        text = documents[name].strip()
        if len(text) >= SMALLEST and text not in seen:
            seen.add(text)
            kept[name] = text
    return kept


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a slim Python leaves it out; the docstrings remain
        return {}
    return {f"topic:{name}": text for name, text in topics.items()}


def _modules() -> dict[str, str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED.intersection(parts) or parts[0].startswith("config-"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # files in the standard library that are meant not to parse
        found["module:" + "/".join(parts)] = "\n\n".join(_docstrings(tree))
    return found


def _docstrings(tree: ast.Module) -> list[str]:
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=True)
            if text:
                named = "" if isinstance(node, ast.Module) else f"{node.name}: "
                texts.append(named + inspect.cleandoc(text))
    return texts


def embedded_documents(split: str) -> list[str]:
    """Documents of `split` ("train", "heldout" or "all"), in a fixed order."""
    if split not in ("train", "heldout", "all"):
        raise ValueError(f"the embedded corpus has no split '{split}'")
    return [text for name, text in _all_documents().items() if split == "all" or held_out(name) == (split == "heldout")]
