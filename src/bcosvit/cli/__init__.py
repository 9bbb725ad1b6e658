"""The table of commands, nothing else; a command imports what it needs when it runs."""

import typer
from rich.console import Console
from rich.markup import escape

from bcosvit.cli import (
    bcosify,
    doctor,
    evaluate,
    explain,
    export,
    info,
    reproduce,
    serve,
    train,
)

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
    reproduce.reproduce,
    export.export,
    bcosify.bcosify,
    serve.serve,
    info.info,
    doctor.doctor,
):
    app.command(cls=train.TrainCommand if command is train.train else None)(command)


@app.callback()
def _root() -> None:
    """Vision transformers that explain themselves."""


def main() -> None:
    """Runs the command line; a ``ValueError`` is the user's to mend, so it is one red sentence.

    So is what the system refuses: a folder that cannot be written, a full disk.
    """
    try:
        app()
    except ValueError as error:
        _tell(str(error))
        raise SystemExit(2) from None
    except OSError as error:
        refused = f"{error.filename} cannot be used" if error.filename else "The system refused"
        _tell(f"{refused} ({error.strerror or error}); check the path, its rights and the disk.")
        raise SystemExit(2) from None


def _tell(message: str) -> None:
    # Messages quote shapes and names, which may look like markup.
    Console(stderr=True).print(f"[bold red]Error:[/] {escape(message)}", highlight=False)
