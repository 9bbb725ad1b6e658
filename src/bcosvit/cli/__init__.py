"""The table of commands, nothing else; a command imports what it needs when it runs."""

import typer
from rich.console import Console
from rich.markup import escape

from bcosvit.cli.bcosify import bcosify
from bcosvit.cli.doctor import doctor
from bcosvit.cli.evaluate import evaluate
from bcosvit.cli.explain import explain
from bcosvit.cli.export import export
from bcosvit.cli.info import info
from bcosvit.cli.reproduce import reproduce
from bcosvit.cli.serve import serve
from bcosvit.cli.train import train

app = typer.Typer(
    help="Vision transformers that explain themselves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

for command in (explain, train, evaluate, reproduce, export, bcosify, serve, info, doctor):
    app.command()(command)


@app.callback()
def _root() -> None:
    """Vision transformers that explain themselves."""


def main() -> None:
    """Runs the command line; a ``ValueError`` is the user's to mend, so it is one red sentence."""
    try:
        app()
    except ValueError as error:
        # Messages quote shapes and names, which may look like markup.
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False)
        raise SystemExit(2) from None
