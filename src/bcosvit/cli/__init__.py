"""The command line; each command imports what it needs when it runs."""

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from bcosvit import __version__
from bcosvit.cli import (
    audit,
    bcosify,
    calibrate,
    doctor,
    evaluate,
    explain,
    export,
    info,
    reproduce,
    serve,
    train,
)
from bcosvit.cli.names import ListingCommand
from bcosvit.messages import for_terminal

app = typer.Typer(
    help="Vision transformers that explain themselves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

for command in (
    explain.explain,
    train.train,
    evaluate.evaluate,
    audit.audit,
    calibrate.calibrate,
    reproduce.reproduce,
    export.export,
    bcosify.bcosify,
    serve.serve,
    info.info,
    doctor.doctor,
):
    app.command(cls=ListingCommand)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bcosvit {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Vision transformers that explain themselves."""


def main() -> None:
    """Runs the command line.

    Errors that the user can correct are printed as one sentence: a ``ValueError``, or an
    ``OSError`` such as a folder that cannot be written or a full disk.
    """
    try:
        app()
    except ValueError as error:
        _print_error(str(error))
        raise SystemExit(2) from None
    except OSError as error:
        what = f"{error.filename} cannot be used" if error.filename else "A file cannot be used"
        reason = error.strerror or error
        _print_error(f"{what} ({reason}); check the path, its permissions and the disk.")
        raise SystemExit(2) from None


def _print_error(message: str) -> None:
    # Messages contain shapes and names, which may look like markup, or like commands to a terminal.
    message = "\n".join(for_terminal(line) for line in message.splitlines())
    Console(stderr=True).print(f"[bold red]Error:[/] {escape(message)}", highlight=False)
