"""Wires the commands together; each lives in a file of its own and imports what it needs when it runs."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from regraft import __version__
from regraft.cli.common import State
from regraft.errors import UserError


class Commands(TyperGroup):
    """The commands; Ctrl-C in one of them is answered with the command that goes on."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            resumable = ctx.invoked_subcommand in ("run", "distill")
            told = "finished steps and checkpoints are kept. Continue" if resumable else "nothing is kept. Repeat"
            print(f"\nstopped; {told}: {_typed()}", file=sys.stderr)
            raise typer.Exit(130) from None


def _typed() -> str:
    """This process's command as it can be typed again."""
    name = "python -m regraft" if Path(sys.argv[0]).name == "__main__.py" else "regraft"
    return shlex.join([*name.split(), *sys.argv[1:]])


app = typer.Typer(
    cls=Commands,
    name="regraft",
    help="Replace the softmax attention of a pretrained language model, teach the replacement, prove what was kept.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

# command -> (module, panel)
COMMANDS = {
    "inspect": "Look",
    "ls": "Look",
    "cat": "Look",
    "cp": "Look",
    "plan": "Look",
    "env": "Look",
    "select": "Make",
    "convert": "Make",
    "distill": "Make",
    "run": "Make",
    "export": "Make",
    "eval": "Judge",
    "verify": "Judge",
    "bench": "Judge",
    "report": "Judge",
    "chat": "Judge",
}


def _version(value: bool) -> None:
    if value:
        typer.echo(f"regraft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show tracebacks and library warnings.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Print results only.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Never use the network.")] = False,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads (default: all).")] = None,
) -> None:
    """Options for every command, given before its name."""
    State.verbose, State.quiet, State.threads = verbose, quiet, threads
    if offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if not verbose:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


for _name, _panel in COMMANDS.items():
    _module = import_module(f"regraft.cli.{'evaluate' if _name == 'eval' else _name}")
    app.command(name=_name, rich_help_panel=_panel)(_module.command)


def main() -> None:
    """The entry point: user errors in three lines with exit code 2, everything else with a traceback and 1."""
    try:
        app(standalone_mode=True)
    except UserError as error:
        _fail(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            _unexpected()
        _fail(UserError("the disk is full", where=str(error.filename or ""), fix="free some space, then repeat"))
    except Exception:
        _unexpected()


def _fail(error: UserError) -> None:
    if State.verbose:
        traceback.print_exc()
    print(error, file=sys.stderr)
    sys.exit(2)


def _unexpected() -> None:
    traceback.print_exc()
    print("This is a fault of regraft. Please report it with the output of: regraft env", file=sys.stderr)
    sys.exit(1)
