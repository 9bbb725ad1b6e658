"""Reports as self-contained HTML files, from the Jinja templates beside this file.

A page with many sections goes to disk as its sections are made, so that a report on thousands of
pictures needs no more memory than one on a few, and the file appears only when it is complete.
Pictures are inlined, there is no script, and a content security policy forbids the browser to load
anything. Templates escape all text that is not marked as HTML, e.g. names of files and classes.

A template's name is its path below the package, so that every package may have its own:
``report/templates/page.html.jinja``.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bcosvit.attribution import describe_method, method_title
from bcosvit.files import atomic
from bcosvit.messages import counted, percent
from bcosvit.report.charts import draw_chart, method_color

_MARK = Markup("<!-- sections -->")


@cache
def environment() -> Environment:
    """Returns the Jinja environment of all templates."""
    made = Environment(
        loader=PackageLoader("bcosvit", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "astuple": astuple,
        "cell": cell,
        "counted": counted,
        "draw_chart": draw_chart,
        "percent": percent,
        "pretty": lambda value: json.dumps(value, indent=2, ensure_ascii=False),
        "number": number,
        "signed": signed,
        "method_title": method_title,
        "method_color": method_color,
        "method": describe_method,
    }
    return made


def render(template: str, **values: Any) -> Markup:
    """Renders a template.

    Args:
        template: The template's path below the package.
        **values: What the template refers to.

    Returns:
        The result, marked as HTML.
    """
    return Markup(environment().get_template(template).render(values))


def macros(template: str) -> Any:
    """Returns a template as a module whose attributes are its macros, which return HTML."""
    return environment().get_template(template).module


def write_page(path: str | Path, template: str, **values: Any) -> None:
    """Renders a template to a file, which appears only when it is complete.

    Args:
        path: The HTML file.
        template: The template's path below the package.
        **values: What the template refers to.
    """
    with stream_page(path, template, **values):
        """There are no sections to add."""


@contextmanager
def stream_page(path: str | Path, template: str, **values: Any) -> Iterator[Callable[[str], None]]:
    """Writes a page whose sections are added one after the other.

    What comes before the sections is rendered at the beginning of the block, what comes after them
    at its end; a list among ``values`` may grow in between.

    Args:
        path: The HTML file, which appears if the block ends without an error.
        template: A template that extends ``report/templates/page.html.jinja``.
        **values: What the template refers to.

    Yields:
        A function that writes the HTML of one section.
    """
    with (
        atomic(path) as temporary,
        # Names of files need not be valid Unicode.
        temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file,
    ):
        before, _, _ = render(template, sections=_MARK, **values).partition(_MARK)
        file.write(before)
        yield lambda section: print(section, file=file)
        _, _, after = render(template, sections=_MARK, **values).partition(_MARK)
        file.write(after)


def signed(value: float, digits: int = 4) -> str:
    """Formats a number with its sign, and a minus that is as wide as a plus.

    Example:
        >>> signed(-1.5), signed(-1e-9)
        ('−1.5000', '+0.0000')
    """
    # A zero that is negative by rounding has no minus.
    return f"{round(value, digits) + 0.0:+.{digits}f}".replace("-", "−")


def number(value: float, digits: int = 3) -> str:
    """Formats a number as `signed` does, without a plus.

    Example:
        >>> number(-1.5), number(-1e-9)
        ('−1.500', '0.000')
    """
    return signed(value, digits).removeprefix("+")


def cell(value: object) -> str:
    """Formats a value of a table: numbers with four digits, and a dash for None.

    Example:
        >>> cell(-0.123456), cell(None), cell("a")
        ('−0.1235', '–', 'a')
    """
    if value is None:
        return "–"
    return f"{value:.4g}".replace("-", "−") if isinstance(value, float) else str(value)
