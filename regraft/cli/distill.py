"""regraft distill."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.cli.common import Device, Set, prepare, say, show
from regraft.errors import UserError


def command(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe's name, or a YAML file.")],
    student: Annotated[str, typer.Option("--student", help="The converted model to train.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for checkpoints and the result.")],
    stage: Annotated[int, typer.Option("--stage", min=0, help="Which stage of the recipe, from 0.")] = 0,
    set_: Set = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Show what would train, and stop.")] = False,
    device: Device = "auto",
) -> None:
    """Train a converted model by one stage of a recipe; repeat the command to resume.

    Examples:

        regraft distill quickstart --student half --stage 0 -o aligned

        regraft distill lolcats --student half --stage 1 -o x --dry-run
    """
    from regraft import api
    from regraft.recipes.load import load_recipe

    loaded = load_recipe(recipe, set_ or ())
    if stage >= len(loaded.distill):
        raise UserError(f"the recipe has no stage {stage}", where=recipe, fix=f"0 to {len(loaded.distill) - 1}")
    chosen = loaded.distill[stage]
    prepare()
    if dry_run:
        from regraft.convert.sources import load_source
        from regraft.distill.stages import trainable_summary

        summary = trainable_summary(load_source(student).model, chosen)
        lines = [f"stage {stage}: {summary['stage']}, train: {summary['train']}"]
        for kind in ("new", "rest"):
            part = summary[kind]
            extra = [str(v) for k, v in part.items() if k in ("names", "lora_targets") and v]
            lines.append(f"{kind:7} {part['parameters']:>12,} parameters at lr {part['lr']:g}  {' '.join(extra)[:200]}")
        lines.append(f"frozen  {summary['frozen']:>12,} parameters")
        show("\n".join(lines))
        return
    result = api.distill(
        student,
        chosen,
        teacher=loaded.teacher or loaded.base,
        out=out,
        data=loaded.data[chosen.data],
        seed=loaded.seed,
        device=device,
        log=say,
    )
    show(f"{result.steps} steps, {result.tokens} tokens, loss {result.final_loss:.4f}\n{out / 'model'}")
