"""`bcosvit doctor`."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from bcosvit.doctor import Findings


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Prints versions, devices, backends, extras and weights of this installation.

    Examples:

    bcosvit doctor

    bcosvit doctor --json > installation.json
    """
    from bcosvit.doctor import examine

    found = examine()
    if json:
        Console().print_json(data=found.as_dict())
        return
    Console().print(_table(found), highlight=False)


def _table(found: "Findings") -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, version in found.versions.items():
        table.add_row(name, version or "missing")
    table.add_section()
    for device, about in found.devices.items():
        table.add_row(device, about)
    table.add_row("torchvision", found.torchvision)
    table.add_row("ops", found.backend)
    table.add_row("CPU kernel", found.cpu_kernel)
    table.add_section()
    for name, extra in found.extras.items():
        lacks = f"lacks {', '.join(extra.missing)}: {extra.install}"
        table.add_row(f"extra {name}", escape(lacks) if extra.missing else "complete")
    table.add_section()
    for name, size in found.weights.items():
        note = ", the default" if name == found.default_weights else ""
        table.add_row("weights", f"{name} ({size / 2**20:.1f} MiB{note})")
    if not found.weights:
        table.add_row("weights", "none shipped: give --weights to every command")
    table.add_row("cache", f"{found.cache} ({found.cached / 2**20:.1f} MiB)")
    return table
