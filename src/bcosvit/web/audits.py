"""An audit as pages of the server: the report, and the pictures of its classes and clusters.

The report is the file that `bcosvit audit` has written. On the server its pictures are links: each
opens an explanation by the model that is served, and each cluster opens a list of its pictures.
"""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from markupsafe import escape
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Mount, Route

from bcosvit.auditing.report import PICTURES, REPORT, read_summary
from bcosvit.auditing.run import SOURCE, open_pictures
from bcosvit.files import read_regular
from bcosvit.messages import counted
from bcosvit.report.explain import ReportInfo, html_report
from bcosvit.report.images import photo_bytes, photo_image
from bcosvit.report.provenance import Provenance
from bcosvit.web.service import ExplanationService

AT_ONCE = 200
"""Pictures that a list shows."""

POLICY = "default-src 'none'; img-src data: 'self'; style-src 'unsafe-inline'"
"""Nothing runs on these pages, whoever has written the report."""

REPORT_BYTES, SOURCE_BYTES = 50_000_000, 1_000_000
"""Of a report, which is smaller than 20 MB, and of the note where the data are."""

_FILES = {".csv": "text/csv", ".parquet": "application/octet-stream", ".json": "application/json"}


def audit_routes(service: ExplanationService, folder: str | Path) -> Mount:
    """Makes the pages of an audit.

    Args:
        service: The model; it should be the one that was audited.
        folder: What `bcosvit audit` has written.

    Returns:
        The pages below ``/audit``.

    Raises:
        ValueError: If the folder holds no finished audit, or the data are not there any more.
    """
    pages = _Pages(service, Path(folder))
    return Mount(
        "/audit",
        routes=[
            Route("/", pages.report),
            Route("/picture/{index}", pages.picture),
            Route("/thumbnail/{index}", pages.thumbnail),
            Route("/list/{name}", pages.list),
            Route("/{file:path}", pages.file),
        ],
    )


class _Pages:
    def __init__(self, service: ExplanationService, folder: Path) -> None:
        self.service, self.folder = service, folder
        summary = read_summary(folder)
        try:
            self.lists, fingerprint = _lists(summary), str(summary["settings"]["data"])
            source: dict[str, Any] = json.loads(read_regular(folder / SOURCE, SOURCE_BYTES))
            opened = {name: source[name] for name in ("data", "split", "limit", "seed")}
        # Whatever is where something else is expected.
        except (
            *(OSError, ValueError, LookupError, TypeError, AttributeError),
            *(ArithmeticError, RecursionError),
        ) as error:
            raise ValueError(
                f"The audit in {folder} is damaged ({error!r}); run the audit again."
            ) from error
        self.pictures, _ = open_pictures(service.predictor, **opened)
        if self.pictures.fingerprint() != fingerprint:
            raise ValueError(
                f"The data of the audit {folder} are not what they were; run the audit again."
            )

    def report(self, request: Request) -> Response:
        try:
            page = read_regular(self.folder / REPORT, REPORT_BYTES)
        except (OSError, ValueError):
            return Response("The report cannot be read.", 404)
        # What are pictures in the file are links here, and so are the names of clusters.
        page = _linked(
            page,
            r'<figure class="example" data-picture="(\d{1,12})">\s*<div[^<>]*>',
            "</div>",
            '{start}<a href="picture/{name}" style="display: contents">{inside}</a>{end}',
        )
        page = re.sub(
            r"<b>Cluster ([\d.]{1,24})</b>", r'<b><a href="list/\1">Cluster \1</a></b>', page
        )
        page = _linked(
            page,
            r'<details class="class" data-class="(\d{1,12})"',
            "</summary>",
            '{start}{inside} <a href="list/class-{name}">Pictures</a>{end}',
        )
        page = page.replace(
            "<h3>The worst mistakes</h3>",
            '<h3>The worst mistakes <a href="list/mistakes">All</a></h3>',
        )
        policy = "img-src data: 'self'; style-src"
        return _page(re.sub(r"img-src [^;]*; style-src", policy, page, count=1))

    def _index(self, request: Request) -> int | None:
        """Which picture is asked for, if there is one."""
        given = request.path_params["index"]
        is_number = re.fullmatch("[0-9]{1,12}", given) is not None
        return int(given) if is_number and int(given) < len(self.pictures) else None

    def picture(self, request: Request) -> Response:
        if (index := self._index(request)) is None:
            return Response("There is no such picture.", 404)
        predictor = self.service.predictor
        try:
            image, label, key = self.pictures[index]
        except (OSError, ValueError):
            return Response("The picture cannot be read any more.", 404)
        predicted = predictor.explain(image, methods=[]).top(1)[0]
        found = predictor.explain(image, list(dict.fromkeys([predicted, label])), name=key)
        methods = list(found.attributions)
        info = ReportInfo(
            predictor=predictor,
            methods=methods,
            provenance=Provenance.of({"model": predictor.config}),
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "page.html")
            with html_report(path, info) as add:
                add(0, found)
            page = path.read_text(encoding="utf-8")
        return _page(page.replace("<main>", '<main><p><a href="../">Report</a></p>', 1))

    def thumbnail(self, request: Request) -> Response:
        if (index := self._index(request)) is None:
            return Response("There is no such picture.", 404)
        try:
            data = photo_bytes(photo_image(self.pictures[index][0]))
        except (OSError, ValueError):
            return Response("The picture cannot be read any more.", 404)
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        return Response(data, media_type=f"image/{kind}")

    def list(self, request: Request) -> Response:
        if request.path_params["name"] not in self.lists:
            return Response("There is no such list.", 404)
        title, indices = self.lists[request.path_params["name"]]
        shown = "".join(
            f'<a href="../picture/{index}"><img loading="lazy" alt="Picture {index}" '
            f'src="../thumbnail/{index}"></a>'
            for index in indices[:AT_ONCE]
        )
        style = (
            ":root{color-scheme:light dark}body{font:1rem/1.5 system-ui,sans-serif;margin:0 auto;"
            "max-width:72rem;padding:1rem}a{color:light-dark(#b3161f,#ff8a86)}h1{font-size:1.4rem}"
            "main{display:grid;gap:.5rem;grid-template-columns:repeat(auto-fill,minmax(7rem,1fr))}"
            "img{width:100%;aspect-ratio:1;display:block;border-radius:.3rem;background:#8883}"
        )
        count = counted(len(indices), "picture")
        if len(indices) > AT_ONCE:
            count += f", the first {AT_ONCE} of them here"
        return _page(
            f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" '
            f'content="width=device-width"><title>{escape(title)}</title><style>{style}</style>'
            f'<p><a href="../">Report</a></p><h1>{escape(title)}: {count}</h1>'
            f"<main>{shown}</main></html>"
        )

    def file(self, request: Request) -> Response:
        path = Path(request.path_params["file"])
        allowed = len(path.parts) == 1 and path.suffix in _FILES
        inside = len(path.parts) == 2 and path.parts[0] == PICTURES and path.suffix == ".jpg"
        full = (self.folder / path).resolve()
        # A link leads to files that are not the audit's.
        own = full.is_relative_to(self.folder.resolve()) and full.is_file()
        if ".." in path.parts or not (allowed or inside) or not own:
            return Response("There is no such file.", 404)
        return FileResponse(full, media_type=_FILES.get(path.suffix, "image/jpeg"))


def _linked(page: str, start: str, end: str, link: str) -> str:
    """Makes links of what lies between a start, whose group is a name, and the next end.

    Each part of the page is looked at once, whatever somebody else has written into it.
    """
    marks = list(re.finditer(start, page))
    borders = [*(mark.start() for mark in marks), len(page)]
    parts = [page[: borders[0]]]
    for mark, border in zip(marks, borders[1:], strict=True):
        rest = page[mark.end() : border]
        inside, found, after = rest.partition(end)
        fields = {"start": mark[0], "name": mark[1], "inside": inside, "end": end}
        parts.append(link.format(**fields) + after if found else mark[0] + rest)
    return "".join(parts)


def _page(content: str) -> HTMLResponse:
    return HTMLResponse(content, headers={"content-security-policy": POLICY})


def _lists(summary: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """The lists of pictures, each with its title, by name."""
    lists = {
        "mistakes": ("Mistakes", summary["mistakes"]),
        **{key: (f"Cluster {key}", each) for key, each in summary["clusters"].items()},
        **{
            f"class-{each['label']}": (each["class"], each["pictures"])
            for each in summary["classes"]
        },
    }
    return {
        name: (str(title), [int(index) for index in indices])
        for name, (title, indices) in lists.items()
    }
