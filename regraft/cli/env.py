"""regraft env."""

from __future__ import annotations

from regraft.cli.common import Json, show, show_json


def command(as_json: Json = False) -> None:
    """Print versions, machine and kernels, for bug reports.

    Examples:

        regraft env
    """
    from regraft.eval.environment import environment, render

    found = environment()
    if as_json:
        show_json(found)
    else:
        show(render(found))
