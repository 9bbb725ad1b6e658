"""The command line; each command imports what it needs when it runs."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
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
    ``OSError`` such as a folder that cannot be written or a full disk. Ctrl-C and SIGTERM end the
    command as errors do, so that nothing stays behind that is not complete.
    """
    try:
        with _ended_by_signals():
            app()
    except _Ended as ended:
        _print_error(f"Stopped by {ended}; files that were not complete are removed.")
        raise SystemExit(128 + ended.number) from None
    except ValueError as error:
        _print_error(str(error))
        raise SystemExit(2) from None
    except OSError as error:
        what = f"{error.filename} cannot be used" if error.filename else "A file cannot be used"
        reason = error.strerror or error
        _print_error(f"{what} ({reason}); check the path, its permissions and the disk.")
        raise SystemExit(2) from None


class _Ended(BaseException):
    """A signal asked the process to end; nothing on the way takes it for an error."""

    def __init__(self, number: int) -> None:
        super().__init__("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        self.number = number


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Has both signals raise `_Ended`; the second one ends the process at once."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def end(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        raise _Ended(number)

    before = {number: signal.getsignal(number) for number in numbers}
    # Python allows it in the main thread alone, and where signals are ignored, they stay ignored.
    if threading.current_thread() is not threading.main_thread():
        before = {}
    before = {n: h for n, h in before.items() if h in (signal.SIG_DFL, signal.default_int_handler)}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_error(message: str) -> None:
    # Messages contain shapes and names, which may look like markup, or like commands to a terminal.
    message = "\n".join(for_terminal(line) for line in message.splitlines())
    Console(stderr=True).print(f"[bold red]Error:[/] {escape(message)}", highlight=False)
