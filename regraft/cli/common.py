"""What several commands share: global options, output, value parsing."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated, Any

import typer

from regraft.errors import UserError


class State:
    """The global options of this call."""

    verbose = False
    quiet = False
    threads: int | None = None
    # of several processes (torchrun, accelerate launch), the first speaks for all
    speaks = os.environ.get("RANK", "0") == "0"


Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:N or mps.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Change a recipe value: key.path=value (repeatable).")]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run the source's own code.")]
Pickle = Annotated[bool, typer.Option("--allow-pickle", help="Open pickled weights (they can run code).")]


def prepare() -> None:
    """Before a command that computes: threads and quiet libraries."""
    import logging
    import warnings

    import torch

    if State.threads is not None:
        torch.set_num_threads(State.threads)
    if not State.verbose:
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        warnings.filterwarnings("ignore")
        logging.getLogger("lm_eval").setLevel(logging.ERROR)


def say(text: str) -> None:
    """Progress, on stderr, unless --quiet."""
    if State.speaks and not State.quiet:
        print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """A result, on stdout."""
    if State.speaks:
        print(text, flush=True)


def show_json(value: Any) -> None:
    """A result as JSON on stdout."""
    print(json.dumps(value, indent=1, default=str))


def parse_pairs(pairs: list[str] | None, where: str) -> dict[str, Any]:
    """`name=value` arguments as a dict with YAML values."""
    import yaml

    parsed = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator:
            raise UserError(f"'{pair}' is not name=value", where=where, fix=f"for example: {where} window=128")
        parsed[name] = yaml.safe_load(value)
    return parsed


def parse_sizes(text: str, where: str) -> list[int]:
    """`1k,4k` or `1024,4096` as numbers; here k is 1024, since contexts come in powers of two."""
    sizes = []
    for part in text.split(","):
        part = part.strip().lower()
        number = part.removesuffix("k")
        if not number.isdigit() or int(number) == 0:
            raise UserError(f"'{part}' is not a context length", where=where, fix="for example: 1k,4k,16k")
        sizes.append(int(number) * (1024 if part.endswith("k") else 1))
    return sizes
