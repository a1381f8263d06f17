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
        """A folder to write the output into; it becomes final when the block ends without an error.

        UserError if another process is at the same step.
        """
        target = self.path(step, key)
        partial = target.with_name(target.name + ".partial")
        partial.mkdir(parents=True, exist_ok=True)
        with _alone_in(partial):
            yield partial
            (partial / _DONE).write_text(json.dumps({"step": step, "inputs": inputs}, default=str), encoding="utf-8")
            os.replace(partial, target)

    def trim(self, step: str, key: str, name: str) -> None:
        """Remove a folder of a finished step that only its making needed."""
        shutil.rmtree(self.path(step, key) / name, ignore_errors=True)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; the system lets go of it even after a kill. Where it has no locks, none is held.

    UserError if another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    busy = UserError(
        "another process is at this very step",
        where=str(folder),
        fix="wait until it has ended, then repeat: its result is reused",
    )
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise busy from None
            # otherwise: a file system that knows no locks
        if not (folder.is_dir() and os.path.samestat(os.stat(folder), os.fstat(handle))):
            raise busy  # it finished, and renamed the folder, while we waited for our turn
        yield
    finally:
        os.close(handle)


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
    with _appearing(target, needed) as staging:
        staging.mkdir()
        yield staging


@contextmanager
def new_file(target: Path, needed: int = 0) -> Iterator[Path]:
    """The same for a file: the block writes the staging file."""
    with _appearing(target, needed) as staging:
        yield staging


@contextmanager
def _appearing(target: Path, needed: int) -> Iterator[Path]:
    if target.exists():
        raise UserError("the output exists already", where=str(target), fix="remove it, or choose another name")
    check_space(target.parent, needed, "the output")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name[:80]}.writing-{os.getpid()}")
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
        if staging.is_dir():
            shutil.rmtree(staging, ignore_errors=True)
        else:
            staging.unlink(missing_ok=True)


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
