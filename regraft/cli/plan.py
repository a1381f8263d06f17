"""regraft plan."""

from __future__ import annotations

from typing import Annotated

import typer

from regraft.cli.common import Device, Json, Remote, Set, prepare, show, show_json


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    set_: Set = None,
    measure: Annotated[bool, typer.Option("--measure", help="Load the model and time it for the estimate.")] = False,
    device: Device = "auto",
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Show what a recipe will do and cost; no weights are read, nothing is written.

    Examples:

        regraft plan quickstart

        regraft plan my.yaml --set layers.keep=8 --json
    """
    from regraft import api

    prepare()
    plan = api.plan(recipe, overrides=set_ or (), measure=measure, device=device, trust_remote_code=trust_remote_code)
    if as_json:
        show_json(plan.to_dict())
    else:
        show(plan.render())
