"""Progress with the time left: a bar in a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

QUIET = 2.0
"""Seconds after which plain lines begin."""
PAUSE = 10.0
"""Seconds between plain lines."""


def track(items: Sequence[T], what: str, console: "Console | None") -> Iterator[T]:
    """Yields items, and shows on a console how many are done and how long the others will take.

    Examples:
        >>> list(track([1, 2], "Counting", None))
        [1, 2]
    """
    if console is None:
        yield from items
    elif console.is_terminal:
        from rich.progress import track as bar

        yield from bar(items, what, console=console, transient=True)
    else:
        lines = PlainLines(what, console)
        for done, item in enumerate(items):
            lines(done, len(items))
            yield item


class PlainLines:
    """Says in plain lines how much is done, and how long the rest will take, every ``pause``
    seconds.

    Examples:
        >>> from rich.console import Console
        >>> PlainLines("Counting", Console())(1, 2)  # Nothing, since it has only begun.
    """

    def __init__(self, what: str, console: "Console", pause: float = PAUSE) -> None:
        self.what, self.console, self.pause = what, console, pause
        self.start = time.monotonic()
        self._said = self.start + QUIET - pause
        self._before: int | None = None

    def __call__(self, done: int, total: int) -> None:
        """Prints a line if it is time for one."""
        now = time.monotonic()
        if self._before is None:
            # What was done before does not count for the time left.
            self._before = done
        new = done - self._before
        if new > 0 and done < total and now - self._said >= self.pause:
            left = duration((now - self.start) / new * (total - done))
            _line(self.console, f"{self.what}: {done} of {total}, about {left} left")
            self._said = now


@contextmanager
def stages(
    shares: Mapping[str, float], console: "Console | None"
) -> Iterator[Callable[[str], None]]:
    """Shows which of several stages is at work, how long it has taken, and how long it will.

    Args:
        shares: The stages in their order, with what share of the time each usually takes.
        console: Where they are shown; None shows nothing.

    Yields:
        A function that is called with the name of each stage as it begins.
    """
    total, names = sum(shares.values()), list(shares)
    start = time.monotonic()

    def fraction(name: str) -> float:
        return sum(shares[each] for each in names[: names.index(name)]) / total

    if console is None:
        yield lambda name: None
    elif not console.is_terminal:

        def say(name: str) -> None:
            done, taken = fraction(name), time.monotonic() - start
            left = f", about {duration(taken / done * (1 - done))} left" if done else ""
            _line(console, f"{name} ({names.index(name) + 1} of {len(names)}{left})")

        yield say
    else:
        with console.status("") as status:
            yield _Ticking(status, names, fraction, start)


class _Ticking:
    """Writes the stage, and the time left as it passes, beside a spinner."""

    def __init__(
        self, status: object, names: Sequence[str], fraction: Callable[[str], float], start: float
    ) -> None:
        self.status, self.names, self.fraction, self.start = status, names, fraction, start
        self.name, self.expected = "", 0.0

    def __call__(self, name: str) -> None:
        done, now = self.fraction(name), time.monotonic()
        self.name = name
        self.expected = now + (now - self.start) / done * (1 - done) if done else 0.0
        # The spinner renders this object several times a second.
        self.status.update(self)  # type: ignore[attr-defined]

    def __rich__(self) -> str:
        now = time.monotonic()
        place = f"{self.name} ({self.names.index(self.name) + 1} of {len(self.names)})"
        left = self.expected - now
        text = f"{place}, {duration(now - self.start)}"
        return f"{text}, about {duration(left)} left" if left > 0 else text


def duration(seconds: float) -> str:
    """Writes a duration with one unit, or two.

    Examples:
        >>> duration(4.2), duration(75), duration(3700)
        ('4 s', '1 min 15 s', '1 h 1 min')
    """
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _line(console: "Console", text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
