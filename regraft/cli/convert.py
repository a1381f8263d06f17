"""regraft convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regraft.cli.common import Device, Pickle, Remote, parse_pairs, prepare, say, show
from regraft.errors import UserError


def command(
    model: Annotated[str, typer.Argument(help="Hub id, folder, .gguf file, or demo:smollm2.")],
    to: Annotated[str, typer.Option("--to", help="The mixer: see `regraft ls mixers`.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Folder for the converted model.")] = None,
    layers: Annotated[str, typer.Option("--layers", help="0,2,5-9, every:4, all, SSSL, or a file.")] = "all",
    option: Annotated[list[str] | None, typer.Option("--option", help="Mixer option, name=value (repeatable).")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    dry_run: Annotated[bool, typer.Option("-n", "--dry-run", help="Check everything, read no weights.")] = False,
    device: Device = "auto",
    trust_remote_code: Remote = False,
    allow_pickle: Pickle = False,
) -> None:
    """Replace the attention of some layers, without training, and write a self-contained checkpoint.

    Examples:

        regraft convert demo:smollm2 --to sliding_window --layers every:2 -o half

        regraft convert demo:smollm2 --to window_linear --layers layers.json --option window=128 -o half
    """
    from regraft import api
    from regraft.convert.layers import layer_strip, parse_layers
    from regraft.convert.mixers.registry import parse_options
    from regraft.convert.sources import load_config

    options = parse_pairs(option, "--option")
    if dtype not in ("float32", "bfloat16"):
        raise UserError(f"no dtype '{dtype}'", where="--dtype", fix="use float32 or bfloat16")
    parse_options(to, options)
    if out is None and not dry_run:
        raise UserError("no output folder", fix="give one with -o, or try with --dry-run")
    if out is not None and out.exists():
        raise UserError("the output exists already", where=str(out), fix="remove it, or choose another with -o")
    config = load_config(model, revision=revision, trust_remote_code=trust_remote_code)
    depth = config.num_hidden_layers
    chosen = parse_layers(layers, depth)
    strip = layer_strip(chosen, depth)
    if dry_run:
        from regraft.convert.graft import fitting_layers
        from regraft.convert.plan import meta_model

        fit = fitting_layers(meta_model(config), to, parse_options(to, options))
        bad = [i for i in chosen if i not in fit]
        if bad:
            raise UserError(f"{to} does not fit layers {bad}", where=model, fix=f"see: regraft inspect {model}")
        show(f"{strip}   would convert {len(chosen)} of {depth} layers to {to}; nothing was written")
        return
    prepare()
    say(f"converting {len(chosen)} of {depth} layers to {to}")
    result = api.convert(
        model,
        out,
        to=to,
        layers=layers,
        options=options,
        dtype=dtype,
        revision=revision,
        device=device,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
    )
    lines = [strip]
    for index, report in result.reports.items():
        fresh = f", fresh: {', '.join(report.fresh)}" if report.fresh else ""
        derived = f", derived: {', '.join(report.derived)}" if report.derived else ""
        lines.append(f"layer {index:3}  {len(report.copied)} tensors copied{derived}{fresh}")
    lines.append(f"{out}   next: regraft verify {out}")
    show("\n".join(lines))
