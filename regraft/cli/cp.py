"""regraft cp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.cli.common import show
from regraft.errors import UserError


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name.")],
    file: Annotated[Path | None, typer.Argument(help="Where to (default: NAME.yaml here).")] = None,
) -> None:
    """Copy a shipped recipe, comments included, to own and change it.

    Examples:

        regraft cp quickstart my.yaml
    """
    from regraft.recipes.load import find

    source = find(recipe)
    target = file or Path(f"{source.stem}.yaml")
    if target.exists():
        raise UserError("the file exists already", where=str(target), fix="choose another name")
    target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    show(f"{target}   next: regraft plan {target}")
