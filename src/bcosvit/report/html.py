"""Reports as one self-contained HTML file, written piece by piece.

A page goes to disk as its parts are made, so that a report on thousands of pictures needs no more
memory than one on a few, and takes its place only when it is complete. Pictures are inlined, there
is no script, and a content security policy forbids the browser to load anything whatever: a report
can be mailed, archived and opened offline, and a file name cannot smuggle anything into it.

Functions here return ``Html`` and escape every other text that they are given.
"""

import base64
import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bcosvit.files import atomic
from bcosvit.report.figures import COARSE
from bcosvit.report.style import CSS

_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


class Html(str):
    """Text that is safe to write as it is."""

    __slots__ = ()


Write = Callable[[Html], None]


@contextmanager
def page(path: str | Path, title: str, lead: Html, foot: Html) -> Iterator[Write]:
    """Yields a function that appends between lead and foot; the file appears if all goes well."""
    with (
        atomic(path) as temporary,
        # File names need not be valid Unicode.
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):

        def write(content: Html) -> None:
            file.write(content)
            file.write("\n")

        write(
            Html(
                f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
                f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
                f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
                f"<title>{text(title)}</title>\n"
                # Browsers ask a server for an icon unless the page brings one.
                f'<link rel="icon" href="data:,">\n'
                f"<style>{CSS}</style>\n</head>\n<body>\n<main>\n<h1>{text(title)}</h1>\n{lead}"
            )
        )
        yield write
        write(Html(f"</main>\n{foot}\n</body>\n</html>"))


def text(value: object) -> Html:
    """Any value as text; ``Html`` as it is."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def element(tag: str, *content: Html, **attributes: str | None) -> Html:
    """``<tag class="…">content</tag>``; a trailing underscore is for names that Python keeps."""
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{given}>{''.join(content)}</{tag}>")


def paragraph(value: object, class_: str | None = None) -> Html:
    return element("p", text(value), class_=class_)


def picture(data: bytes, alt: str, size: tuple[int, int]) -> Html:
    """An inlined PNG or JPEG file; ``size`` is its width and height in pixels."""
    width, height = size
    kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
    # Enlarged pixels stay visible as such: they are what was measured.
    coarse = ' class="coarse"' if width <= COARSE else ""
    source = base64.b64encode(data).decode("ascii")
    return Html(
        f'<img{coarse} width="{width}" height="{height}" alt="{html.escape(alt)}" '
        f'decoding="async" src="data:image/{kind};base64,{source}">'
    )


def figure(content: Html, *caption: Html, wide: bool = False) -> Html:
    """A picture and what stands below it; a ``wide`` one takes a whole row of charts."""
    drawn = element("div", content, class_="scroll") if wide else content
    return element(
        "figure", drawn, element("figcaption", *caption), class_="wide" if wide else None
    )


def scale(colors: str, ends: Sequence[str]) -> Html:
    """A color bar with its numbers, lowest first."""
    strip = element("i", style=f"background: linear-gradient(90deg, {colors})")
    numbers = element("span", *(element("span", text(end)) for end in ends))
    return element("div", strip, numbers, class_="scale")


def bar(share: float) -> Html:
    """A bar for a number that stands beside it as text."""
    filled = element("i", style=f"width: {100 * min(max(share, 0), 1):.2f}%")
    return element("span", filled, class_="bar", aria_hidden="true")


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numbers: Sequence[int] = (),
    chosen: Sequence[int] = (),
    class_: str | None = None,
) -> Html:
    """A table whose first column heads its rows.

    ``numbers`` are the columns to align right, ``chosen`` the rows to point out.
    """

    def kind(column: int) -> str | None:
        return "number" if column in numbers else None

    head = element(
        "tr",
        *(
            element("th", text(name), scope="col", class_=kind(column))
            for column, name in enumerate(header)
        ),
    )
    body = [
        element(
            "tr",
            *(
                element(
                    "td" if column else "th",
                    text(value),
                    scope=None if column else "row",
                    class_=kind(column),
                )
                for column, value in enumerate(row)
            ),
            aria_current="true" if number in chosen else None,
        )
        for number, row in enumerate(rows)
    ]
    whole = element(
        "table",
        element("caption", text(caption)),
        element("thead", head),
        element("tbody", *body),
        class_=class_,
    )
    # A box that scrolls must be reachable by keyboard, and named.
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def definitions(values: Mapping[str, object]) -> Html:
    """Names and values, one pair a line."""
    pairs = [
        Html(element("dt", text(name)) + element("dd", text(value)))
        for name, value in values.items()
    ]
    return element("dl", *pairs)


def foot(command: str, config: Mapping[str, Any], versions: Mapping[str, str]) -> Html:
    """What a reader needs to make the same report again."""
    stored = json.dumps(config, indent=2, ensure_ascii=False)
    return element(
        "footer",
        element("h2", text("How this report was made")),
        element("pre", element("code", text(command))),
        definitions(versions),
        element(
            "details",
            element("summary", text("Config")),
            element("pre", element("code", text(stored))),
        ),
    )
