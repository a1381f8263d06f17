"""regraft bench."""

from __future__ import annotations

from typing import Annotated

import typer

from regraft.cli.common import Device, Json, parse_sizes, prepare, show, show_json


def command(
    model: Annotated[str, typer.Argument(help="The converted model.")],
    against: Annotated[str | None, typer.Option("--against", help="The teacher (default: its source).")] = None,
    contexts: Annotated[str, typer.Option("--contexts", help="Context lengths.")] = "1k,4k",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed rounds.")] = 3,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Decode steps a round.")] = 16,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Time prefill and decode and measure the cache by context, the two models taking turns.

    Examples:

        regraft bench runs/quickstart-1a2b3c4d/final --contexts 1k,4k,8k
    """
    import dataclasses

    from regraft import api

    sizes = parse_sizes(contexts, "--contexts")
    prepare()
    rows = api.bench(model, against=against, contexts=sizes, device=device, repeats=repeats, new_tokens=new_tokens)
    if as_json:
        show_json([dataclasses.asdict(row) for row in rows])
        return
    lines = []
    for r in rows:
        lines.append(
            f"{r.name:8} context {r.context:6}  prefill {r.prefill_tok_s:8.0f} tok/s (spread {r.prefill_spread:.0%})  "
            f"decode {r.decode_tok_s:6.1f} tok/s (spread {r.decode_spread:.0%})  "
            f"cache {r.cache_bytes / 2**20:8.1f} MiB ({r.cache_dtype})  n {r.prefill_repeats} + {r.repeats}"
        )
    for context in sizes:
        pair = {r.name: r for r in rows if r.context == context}
        lines.append(
            f"at {context}: decode {pair['student'].decode_tok_s / pair['teacher'].decode_tok_s:.2f} x, "
            f"prefill {pair['student'].prefill_tok_s / pair['teacher'].prefill_tok_s:.2f} x, "
            f"cache {pair['student'].cache_bytes / pair['teacher'].cache_bytes:.1%} of the teacher's"
        )
    show("\n".join(lines))
