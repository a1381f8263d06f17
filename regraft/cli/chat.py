"""regraft chat."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from regraft.cli.common import Device, prepare, say, show


def command(
    model: Annotated[str, typer.Argument(help="The converted model.")],
    against: Annotated[str | None, typer.Option("--against", help="The teacher (default: its source).")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this one prompt and stop.")] = None,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="Longest answer.")] = 80,
    device: Device = "auto",
) -> None:
    """Ask teacher and converted model the same, side by side; each line of input is a prompt of its own.

    Examples:

        regraft chat runs/quickstart-1a2b3c4d/final

        regraft chat half --prompt "What is a hash table?"
    """
    from regraft import api
    from regraft.convert.sources import load_source
    from regraft.eval.samples import continue_greedily

    prepare()
    student = load_source(model, device=device)
    teacher = load_source(against or api._source_of(student.model, model), device=device)
    tokenizer = student.tokenizer

    def answer(text: str) -> None:
        for name, loaded in (("teacher", teacher), ("student", student)):
            show(f"{name}: {continue_greedily(loaded.model, tokenizer, text, new_tokens).strip()}")

    if prompt is not None:
        answer(prompt)
        return
    say("one prompt a line; an empty line or Ctrl-D ends")
    for line in sys.stdin:
        if not line.strip():
            break
        answer(line.strip())
