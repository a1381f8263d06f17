"""regraft inspect."""

from __future__ import annotations

from typing import Annotated

import typer

from regraft.cli.common import Json, Remote, show, show_json


def command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or demo:smollm2.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    trust_remote_code: Remote = False,
    as_json: Json = False,
) -> None:
    """Show a model's layers, heads and cache, and which mixers fit and why not.

    Examples:

        regraft inspect demo:smollm2

        regraft inspect runs/quickstart-1a2b3c4d/final --json
    """
    from regraft.convert.plan import inspect_source, render_inspection

    told = inspect_source(model, revision=revision, trust_remote_code=trust_remote_code)
    if as_json:
        show_json(told)
    else:
        show(render_inspection(told))
