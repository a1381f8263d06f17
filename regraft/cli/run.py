"""regraft run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.cli.common import Device, Remote, Set, prepare, say, show


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Run folder (default: runs/NAME-HASH).")] = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Show the plan, and stop.")] = False,
    device: Device = "auto",
    trust_remote_code: Remote = False,
) -> None:
    """Do all of a recipe: convert, align, select, distil, evaluate, verify, report.

    Finished steps are reused; repeat the command to go on after an interruption.

    Examples:

        regraft run quickstart

        regraft run my.yaml --set layers.keep=8 -o runs/eight
    """
    from regraft import api

    prepare()
    if dry_run:
        show(api.plan(recipe, overrides=set_ or (), device=device).render())
        return
    result = api.run(recipe, overrides=set_ or (), out=out, device=device, trust_remote_code=trust_remote_code, log=say)
    from regraft.eval.report import verdict

    show(f"{verdict(result.results)}\n{result.verified.summary()}\n{result.final}\n{result.folder / 'report.html'}")
