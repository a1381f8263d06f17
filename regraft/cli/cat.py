"""regraft cat."""

from __future__ import annotations

from typing import Annotated

import typer

from regraft.cli.common import Set, show


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    set_: Set = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes instead.")] = False,
) -> None:
    """Print a recipe with every default written out.

    Examples:

        regraft cat quickstart

        regraft cat my.yaml --set layers.keep=8
    """
    from regraft.recipes.load import dump, json_schema, load_recipe

    show(json_schema() if schema else dump(load_recipe(recipe, set_ or ())).rstrip())
