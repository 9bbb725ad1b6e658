"""Progress on a terminal and elsewhere."""

import io

from rich.console import Console

from bcosvit import progress
from bcosvit.progress import PlainLines, stages, track


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


def test_plain_lines_say_how_long_the_rest_takes(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    console = Console(file=io.StringIO(), width=100)
    for _ in track(range(10), "Explaining", console):
        clock.now += 6
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "Explaining: 1 of 10, about 54 s left"
    assert lines[1] == "Explaining: 3 of 10, about 42 s left"


def test_stages(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    console = Console(file=io.StringIO(), width=100)
    with stages({"Reading": 1, "Writing": 3}, console) as begin:
        begin("Reading")
        clock.now += 5
        begin("Writing")
    assert console.file.getvalue().splitlines() == [
        "Reading (1 of 2)",
        "Writing (2 of 2, about 15 s left)",
    ]


def test_nothing_without_a_console():
    with stages({"Reading": 1}, None) as begin:
        begin("Reading")
    assert list(track([1, 2], "Counting", None)) == [1, 2]


def test_a_terminal_shows_the_stage():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with stages({"Reading": 1, "Writing": 3}, console) as begin:
        begin("Reading")
        begin("Writing")
    assert "Writing (2 of 2)" in console.file.getvalue()


def test_plain_lines_of_what_was_begun_before(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    console = Console(file=io.StringIO(), width=100)
    lines = PlainLines("Features", console, pause=20)
    for done in range(60, 101, 10):
        lines(done, 100)
        clock.now += 10
    # Ten in ten seconds, whatever was done before; none at the end.
    assert console.file.getvalue().splitlines() == [
        "Features: 70 of 100, about 30 s left",
        "Features: 90 of 100, about 10 s left",
    ]
