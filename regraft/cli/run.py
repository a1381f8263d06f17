"""regraft run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from regraft.cli.common import Device, Json, Remote, Set, prepare, say, show, show_json


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Run folder (default: runs/NAME-HASH).")] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", help="Where step outputs are kept (default: .store beside the run folder)."),
    ] = None,
    upto: Annotated[
        str | None, typer.Option("--upto", help="Stop after align, select, distill, eval, verify or report.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Show the plan, and stop.")] = False,
    device: Device = "auto",
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Do all of a recipe: convert, align, select, distil, evaluate, verify, report.

    Finished steps are reused; repeat the command to go on after an interruption.

    Examples:

        regraft run quickstart

        regraft run my.yaml --set layers.keep=8 -o runs/eight

        regraft run quickstart --upto select
    """
    from regraft import api

    prepare()
    if dry_run:
        plan = api.plan(recipe, overrides=set_ or (), device=device, trust_remote_code=trust_remote_code)
        if as_json:
            show_json(plan.to_dict())
        else:
            show(plan.render())
        return
    result = api.run(
        recipe,
        out,
        overrides=set_ or (),
        store=store,
        upto=upto,
        device=device,
        trust_remote_code=trust_remote_code,
        log=say,
    )
    if as_json:
        show_json(_told(result))
        return
    lines = []
    if result.results is not None:
        from regraft.eval.report import verdict

        lines.append(verdict(result.results))
    if result.verified is not None:
        lines.append(result.verified.summary())
    if result.final is None:
        lines.append(f"{result.folder}   stopped after {upto}; the same command without --upto goes on")
    else:
        lines += [str(result.final), str(result.folder / "report.html")]
    show("\n".join(lines))


def _told(result: Any) -> dict[str, Any]:
    """A RunResult as plain values."""
    return {
        "folder": str(result.folder),
        "final": None if result.final is None else str(result.final),
        "converted": None if result.selection is None else result.selection.converted,
        "results": None if result.results is None else dataclasses.asdict(result.results),
        "verified": None if result.verified is None else result.verified.passed,
    }
