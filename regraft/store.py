"""Step outputs, stored once under a hash of their inputs: changing one knob redoes only what depends on it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regraft.errors import UserError

_DONE = "done.json"


def key_of(*parts: Any) -> str:
    """Hash of JSON-able inputs."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """A folder of finished step outputs, `<step>-<hash>/`, each appearing by one rename.

    A step that was interrupted leaves `<step>-<hash>.partial/`, in which it goes on when it is run again.
    """

    def __init__(self, root: Path):
        self.root = root

    def path(self, step: str, key: str) -> Path:
        """Where the output of this step with these inputs lies, or will lie."""
        return self.root / f"{step}-{key}"

    def has(self, step: str, key: str) -> bool:
        """Whether it is finished."""
        return (self.path(step, key) / _DONE).is_file()

    @contextmanager
    def make(self, step: str, key: str, inputs: Any) -> Iterator[Path]:
        """A folder to write the output into; it becomes final when the block ends without an error."""
        target = self.path(step, key)
        partial = target.with_name(target.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        yield partial
        (partial / _DONE).write_text(json.dumps({"step": step, "inputs": inputs}, default=str), encoding="utf-8")
        os.replace(partial, target)


def check_space(folder: Path, needed: int, what: str) -> None:
    """UserError unless the disk of `folder` has `needed` bytes free."""
    at = folder.absolute()
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    if free < needed:
        raise UserError(
            f"not enough disk space: {what} needs {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free",
            where=str(folder),
            fix="free some space, or choose another disk with -o",
        )


@contextmanager
def new_folder(target: Path, needed: int = 0) -> Iterator[Path]:
    """A staging folder that becomes `target` when the block ends without an error, and vanishes otherwise.

    UserError if `target` exists, its disk lacks `needed` bytes, or the disk fills up on the way.
    """
    if target.exists():
        raise UserError("the output exists already", where=str(target), fix="remove it, or choose another with -o")
    check_space(target.parent, needed, "the output")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name[:80]}.writing-{os.getpid()}")
    staging.mkdir()
    try:
        yield staging
        os.replace(staging, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise UserError(
                "the disk is full; nothing was left behind", where=str(target), fix="free some space, then repeat"
            ) from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """A file that shares its bytes with `source` where the disk allows it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy_folder(source: Path, target: Path, skip: tuple[str, ...] = ()) -> None:
    """All files of a flat folder into `target` (made if need be), weights linked where the disk allows it."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.name in skip or file.is_dir():
            continue
        destination = target / file.name
        destination.unlink(missing_ok=True)
        if file.suffix == ".safetensors":
            link_or_copy(file, destination)
        else:
            shutil.copyfile(file, destination)
