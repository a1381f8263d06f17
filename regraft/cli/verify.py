"""regraft verify."""

from __future__ import annotations

from typing import Annotated

import typer

from regraft.cli.common import Json, prepare, show, show_json


def command(
    model: Annotated[str, typer.Argument(help="A converted checkpoint.")],
    reload: Annotated[bool, typer.Option("--reload/--no-reload", help="Also load it in a fresh process.")] = True,
    as_json: Json = False,
) -> None:
    """Prove a converted checkpoint right: exact limits, every mode of use, padding, packing, cache, reload.

    Exit code 1 if a check fails.

    Examples:

        regraft verify half

        regraft verify runs/quickstart-1a2b3c4d/final --json
    """
    from regraft import api

    prepare()
    report = api.verify(model, reload=reload)
    if as_json:
        show_json(report.to_dict())
    else:
        show(report.render())
    if not report.passed:
        raise typer.Exit(1)
