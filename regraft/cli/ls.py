"""regraft ls."""

from __future__ import annotations

from typing import Annotated

import typer

from regraft.cli.common import Json, show_json
from regraft.errors import UserError, suggest

KINDS = ("mixers", "recipes", "selectors", "families", "tasks")


def command(
    kind: Annotated[str, typer.Argument(help="mixers, recipes, selectors, families or tasks.")] = "mixers",
    as_json: Json = False,
) -> None:
    """List what regraft knows: mixers, recipes, selectors, source families, benchmark tasks.

    Examples:

        regraft ls

        regraft ls recipes --json
    """
    if kind not in KINDS:
        raise UserError(f"nothing called '{kind}' to list", fix=suggest(kind, KINDS))
    rows = rows_of(kind)
    if as_json:
        show_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in rows[0] if rows else ("nothing here",):
        table.add_column(name.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def rows_of(kind: str) -> list[dict[str, object]]:
    """The rows of a listing."""
    if kind == "mixers":
        from regraft.convert.mixers.registry import MIXERS

        return [
            {
                "name": e.name,
                "what": e.title,
                "state": e.state_growth,
                "training": e.training,
                "equals the teacher at": e.exact_at or "no setting",
                "paper": e.paper,
            }
            for e in MIXERS.values()
        ]
    if kind == "recipes":
        from regraft.recipes.load import load_recipe, shipped

        recipes = {name: load_recipe(name) for name in shipped()}
        return [{"name": n, "what": r.title, "source": r.source_of_method} for n, r in recipes.items()]
    if kind == "families":
        from regraft.convert.spec import FAMILIES

        return [{"model_type": f.model_type, "what": f.title} for f in FAMILIES.values()]
    if kind == "selectors":
        from regraft.select.registry import SELECTORS

        return [
            {
                "name": s.name,
                "what": s.title,
                "score": s.meaning,
                "passes at 30 layers": f"{s.passes(30):.1f}",
            }
            for s in SELECTORS.values()
        ]
    import tempfile
    from pathlib import Path

    from regraft.eval.harness import QUICK, local_tasks

    with tempfile.TemporaryDirectory() as folder:
        names = local_tasks(Path(folder))
    local = [{"name": n, "what": "on the evaluation data of this machine", "quick": n in QUICK} for n in names]
    return [*local, {"name": "any task of lm-eval", "what": "needs its data set (network)", "quick": False}]
