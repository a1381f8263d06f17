"""Errors that a user can cause and mend: told in three lines (what, where, do this), exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what the user asked for or gave: shown without a traceback.

    `what` says what is wrong, `where` names the file, option, layer or tensor, `fix` says what to do next.
    """

    def __init__(self, what: str, where: str = "the arguments", fix: str = "see the command's --help"):
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix

    def lines(self) -> list[str]:
        """The message as three lines: what, where, do this."""
        return [f"error: {self.what}", f"where: {self.where}", f"do:    {self.fix}"]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def suggest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` plus the list of known names, for an unknown `name`."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}known: {', '.join(known)}"
