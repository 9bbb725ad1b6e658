"""`bcosvit audit`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.options import (
    BatchSize,
    Data,
    Device,
    Limit,
    Masks,
    MaskValue,
    NumWorkers,
    Seed,
    Split,
    Weights,
)


def audit(
    weights: Weights,
    data: Data,
    out: Annotated[str, typer.Option(help="A folder for the evidence, the report and its tables.")],
    masks: Masks = None,
    mask_value: MaskValue = None,
    split: Split = "val",
    limit: Limit = None,
    grid: Annotated[
        int | None, typer.Option(min=2, max=64, help="Cells along a side of a picture.")
    ] = None,
    pairs: Annotated[int, typer.Option(min=12, help="Transfers that test a suspicion.")] = 48,
    batch_size: BatchSize = None,
    seed: Seed = 0,
    num_workers: NumWorkers = 0,
    processes: Annotated[int, typer.Option(min=1, help="Processes that collect evidence.")] = 1,
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="N/COUNT",
            help="The part of the evidence to collect, e.g. 1/4 on the first of four machines "
            "that share the folder.",
        ),
    ] = None,
    device: Device = "auto",
    json: Annotated[
        bool, typer.Option("--json", help="Print what was found as JSON, nothing else.")
    ] = False,
) -> None:
    """Finds out what decisions on a whole data set are made of, and which cues a class depends on.

    A run that was interrupted continues where it was.

    Examples:

    bcosvit audit --weights best.safetensors --data photos/ --out audit

    bcosvit audit --weights best.safetensors --data photos/ --masks trimaps/
    --mask-value 1,3 --processes 4 --out audit
    """
    from rich.markup import escape
    from rich.table import Table

    from bcosvit.auditing.report import REPORT
    from bcosvit.auditing.run import audit as run_audit
    from bcosvit.machine import keep_freed_memory
    from bcosvit.messages import counted, percent
    from bcosvit.settings import parse_values

    keep_freed_memory()
    found = run_audit(
        weights,
        data,
        out=out,
        masks=masks,
        mask_values=parse_values(mask_value),
        split=split,
        limit=limit,
        grid=grid,
        pairs=pairs,
        batch_size=batch_size,
        seed=seed,
        num_workers=num_workers,
        processes=processes,
        shard=_parse_shard(shard),
        device=device,
        console=Console(stderr=True),
    )
    if found is None:
        Console().print("Other shards are missing; the last one to finish writes the report.")
        return
    if json:
        Console().print_json(data=found.summary())
        return
    table = Table(
        *("Suspicion", "Class", "Copied", "Control", "Removed", "Control", "p"),
        caption="Copied: pictures that turn into the class when they get the cue. "
        "Removed: pictures that leave it when they lose the cue. "
        "Control: the same with other places.",
        caption_justify="left",
    )
    for each in found.suspicions[:5]:
        numbers = (each.turned, each.turned_control, each.lost, each.lost_control)
        style = "bold red" if each.significant else None
        row = [each.cue.name, escape(each.class_name)]
        row += [percent(number) for number in numbers]
        table.add_row(*row, f"{each.p_corrected:.2g}", style=style)
    if found.suspicions:
        Console().print(table)
    Console().print(
        f"{counted(len(found.significant), 'significant suspicion')} of "
        f"{counted(len(found.suspicions), 'candidate')}, "
        f"{counted(len(found.mistakes), 'mistake')} in "
        f"{counted(len(found.evidence), 'picture')}.",
        highlight=False,
    )
    Console().print(str(Path(out, REPORT)), highlight=False, soft_wrap=True, markup=False)


def _parse_shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"{text!r} is no shard; write its number and their count, e.g. 1/4.")
    return int(number) - 1, int(count)
