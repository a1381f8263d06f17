"""regraft cp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.cli.common import Set, show
from regraft.errors import UserError


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    file: Annotated[Path | None, typer.Argument(help="Where to (default: NAME.yaml here).")] = None,
    set_: Set = None,
) -> None:
    """Copy a recipe, comments included, to own and change it.

    Examples:

        regraft cp quickstart my.yaml

        regraft cp quickstart eight.yaml --set layers.keep=8 --set name=eight
    """
    from regraft.recipes.load import changed_text, find, parse_recipe, read
    from regraft.store import new_file

    text, where = read(recipe)
    target = file or Path(f"{find(recipe).stem}.yaml")
    if target.exists():
        raise UserError("the file exists already", where=str(target), fix="choose another name")
    if set_:
        text = changed_text(text, where, set_)
    parse_recipe(text, where)
    with new_file(target) as staging:
        staging.write_text(text, encoding="utf-8")
    show(f"{target}   next: regraft plan {target}")
