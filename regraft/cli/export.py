"""regraft export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.cli.common import show


def command(
    model: Annotated[Path, typer.Argument(help="Folder of a converted checkpoint.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Copy to this folder.")] = None,
    push: Annotated[str | None, typer.Option("--push", help="Hub repository, owner/name.")] = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="List the files; no network.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to push to.")] = None,
    create_pr: Annotated[bool, typer.Option("--pr", help="Open a pull request instead of committing.")] = False,
) -> None:
    """Publish a converted checkpoint: weights, code, tokenizer and card; to a folder or the Hub.

    Examples:

        regraft export runs/quickstart-1a2b3c4d/final --push me/smollm2-half --dry-run

        regraft export runs/quickstart-1a2b3c4d/final -o smollm2-half
    """
    from regraft.convert.export.hub import export

    manifest = export(
        model, out=out, push=push, dry_run=dry_run, private=private, revision=revision, create_pr=create_pr
    )
    where = f"{push or out}"
    show(f"{manifest.render()}\n{'would go' if dry_run else 'gone'} to {where}")
