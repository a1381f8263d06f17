"""regraft report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.cli.common import show


def command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `regraft run` or `regraft eval -o`.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="New folder (default: the run folder).")] = None,
) -> None:
    """Write one self-contained HTML page, and its Markdown twin, about one or several runs.

    Examples:

        regraft report runs/quickstart-1a2b3c4d

        regraft report runs/a runs/b -o comparison
    """
    from regraft import api
    from regraft.store import new_folder

    if out is None:
        show(str(api.report(runs)))
        return
    with new_folder(out) as staging:
        api.report(runs, staging)
    show(str(out / "report.html"))
