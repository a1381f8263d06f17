"""regraft select."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.cli.common import Device, Json, Seed, parse_pairs, prepare, say, show, show_json
from regraft.errors import UserError


def command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or demo:smollm2.")],
    to: Annotated[str, typer.Option("--to", help="The mixer that the layers would become.")],
    keep: Annotated[int, typer.Option("--keep", min=0, help="Softmax layers to keep.")],
    by: Annotated[str, typer.Option("--by", help="The selector: see `regraft ls selectors`.")] = "align",
    compare: Annotated[str, typer.Option("--compare", help="Selectors to compare, as a,b,c.")] = "",
    option: Annotated[list[str] | None, typer.Option("--option", help="Mixer option, name=value (repeatable).")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=512, help="Calibration tokens.")] = 4096,
    align_tokens: Annotated[int, typer.Option("--align-tokens", min=512, help="Tokens of stage 1.")] = 20_000,
    data: Annotated[str, typer.Option("--data", help="corpus, a text file or glob, or hub:NAME.")] = "corpus",
    out: Annotated[Path, typer.Option("-o", "--out", help="Where the choice goes.")] = Path("layers.json"),
    device: Device = "auto",
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Rank the layers for a mixer and choose which to convert; writes layers.json and a figure.

    Examples:

        regraft select demo:smollm2 --to window_linear --keep 15

        regraft select demo:smollm2 --to sliding_window --keep 15 --compare uniform,align,kl
    """
    from regraft import api
    from regraft.recipes.schema import DataConfig

    figure = out.with_suffix(".svg")
    for path in (out, figure):
        if path.exists():
            raise UserError("the output exists already", where=str(path), fix="remove it, or choose another with -o")
    if out.suffix != ".json":
        raise UserError("the choice is written as JSON", where=str(out), fix="give a name that ends in .json")
    options = parse_pairs(option, "--option")
    prepare()
    names = [name.strip() for name in compare.split(",") if name.strip()]
    result = api.select(
        model,
        to=to,
        keep=keep,
        by=by,
        options=options,
        data=DataConfig(source=data),
        tokens=tokens,
        align_tokens=align_tokens,
        compare=names,
        seed=seed,
        device=device,
        log=say,
    )
    from regraft.eval.figures import layer_bars, standalone
    from regraft.select.compare import render
    from regraft.store import new_file

    if names:
        selections, quality = result
        chosen = min(selections, key=lambda s: quality[s.by]["KL"])
        text = render(selections, quality) + f"\nwritten: the choice of {chosen.by} (lowest held-out KL)"
    else:
        selections, quality, chosen = [result], {}, result
        text = chosen.render()
    with new_file(figure) as staging:
        staging.write_text(standalone(layer_bars(chosen.to_dict())), encoding="utf-8")
    chosen.save(out)
    if as_json:
        show_json({"selections": [s.to_dict() for s in selections], "quality": quality, "chosen": chosen.by})
    else:
        show(f"{text}\n{out}  {figure}   next: regraft convert {model} --to {to} --layers {out} -o OUT")
