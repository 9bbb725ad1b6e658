"""`bcosvit serve`."""

import signal
import threading
from typing import Annotated

import typer
from rich.console import Console

from bcosvit.cli.options import Device, Weights
from bcosvit.shipped import DEFAULT


def serve(
    weights: Weights = DEFAULT,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the page is served.")] = 7860,
    host: Annotated[
        str, typer.Option(help="127.0.0.1 for this machine alone, 0.0.0.0 for its network.")
    ] = "127.0.0.1",
    device: Device = "auto",
    max_upload: Annotated[int, typer.Option(min=1, help="Megabytes of a file.")] = 20,
    max_pixels: Annotated[int, typer.Option(min=1, help="Pixels of a picture.")] = 50_000_000,
    max_pictures: Annotated[int, typer.Option(min=1, help="Pictures at once.")] = 16,
    queue: Annotated[int, typer.Option(min=1, help="Requests that may wait.")] = 100,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Requests that use the model at the same time.")
    ] = 2,
    keep: Annotated[
        int, typer.Option(min=1, help="Seconds after which uploads are deleted.")
    ] = 3600,
    upload_timeout: Annotated[
        int, typer.Option(min=1, help="Seconds in which all of a request must arrive.")
    ] = 60,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name by which the page may be opened; may be repeated."),
    ] = None,
    root_path: Annotated[
        str | None, typer.Option(help="The path or address that a proxy serves the page at.")
    ] = None,
    audit: Annotated[
        str | None,
        typer.Option(help="A folder of `bcosvit audit`, whose report is served at /audit/."),
    ] = None,
) -> None:
    """Serves a page and an HTTP API that explain pictures, until Ctrl-C.

    Examples:

    bcosvit serve

    bcosvit serve --weights best.safetensors --host 0.0.0.0 --port 80
    --max-upload 5 --concurrency 4 --device cuda
    """
    from bcosvit.messages import require

    require("bcosvit.web.app", extra="web", purpose="Serving")
    from bcosvit.predictor import Predictor
    from bcosvit.web.app import serving
    from bcosvit.web.service import ExplanationService, Limits

    limits = Limits(
        megabytes=max_upload,
        pixels=max_pixels,
        pictures=max_pictures,
        queue=queue,
        concurrency=concurrency,
        seconds=keep,
        upload_seconds=upload_timeout,
    )
    service = ExplanationService(predictor=Predictor.load(weights, device), limits=limits)
    # Before there are uploads, so that they are always deleted.
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with serving(
        service,
        host=host,
        port=port,
        root_path=root_path,
        allow_hosts=allow_host or (),
        audit=audit,
    ) as address:
        Console().print(f"{address} (press Ctrl-C to stop)", highlight=False, soft_wrap=True)
        if audit is not None:
            Console().print(f"{address}audit/ (the audit)", highlight=False, soft_wrap=True)
        stop.wait()
