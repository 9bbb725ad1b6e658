"""What the page asks, answered for any user, as HTML; Gradio is not known here.

The server keeps nothing of a user: what belongs to one is in the components of their own page, and
comes and goes with every event. Uploads are checked by Gradio each time, and what the page notes
beside them is checked by `Visit.of`, since a page can send whatever it likes.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bcosvit.report.explain_html import TOP
from bcosvit.report.html import Html
from bcosvit.report.pieces import percent
from bcosvit.web import panels
from bcosvit.web.answers import Answers, Box, Picture
from bcosvit.web.exports import export

OWN, JOINT = "Independent", "Joint"


@dataclass(frozen=True, kw_only=True)
class Visit:
    """What one user looks at."""

    paths: Sequence[str]
    """All uploads, whether they can be read or not."""
    at: int
    """The one that is shown; −1 where none is."""
    labels: Mapping[int, int]
    """The classes chosen for uploads, where one was."""

    @classmethod
    def of(cls, paths: Sequence[str], note: Any, classes: int) -> "Visit":
        """From what a page sends."""
        try:
            visit = cls(
                paths=paths,
                at=int(note["at"]),
                labels={int(at): int(label) for at, label in note["labels"].items()},
            )
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ValueError("The page sent a note that is not its own: load it again.") from None
        if not all(0 <= label < classes for label in visit.labels.values()):
            raise ValueError(f"The model has {classes} classes, another was chosen: choose again.")
        if not -1 <= visit.at < len(visit.paths):
            raise ValueError("A picture was chosen that is no longer there: choose another.")
        return visit

    def note(self) -> dict[str, Any]:
        """What the page sends back, but for the uploads."""
        return {"at": self.at, "labels": {str(at): label for at, label in self.labels.items()}}

    def with_label(self, label: int) -> "Visit":
        """The same with a class chosen for the picture that is shown."""
        return replace(self, labels={**self.labels, self.at: label})


START = Visit(paths=(), at=-1, labels={}).note()


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Answers to what is asked with the page's controls, for any user."""

    answers: Answers

    def visit(self, paths: Sequence[str] | None, note: Any) -> Visit:
        return Visit.of(self.answers.limited(paths), note, len(self.answers.predictor.class_names))

    def chosen(self, visit: Visit, at: int) -> tuple[Picture, int]:
        """A picture and the class to explain."""
        picture = self.answers.open(visit.paths[at])
        surest = self.answers.predict(picture).top(1)[0]
        return picture, visit.labels.get(at, surest)

    def receive(self, paths: Sequence[str] | None) -> tuple[Visit | None, Html]:
        """New pictures, if any can be read, and the list of them with what cannot."""
        pictures: dict[int, tuple[Picture, str]] = {}
        problems = []
        for at, path in enumerate(self.answers.limited(paths)):
            try:
                picture = self.answers.open(path)
            except ValueError as error:
                problems.append(str(error))
                continue
            found = self.answers.predict(picture)
            entry = self.answers.entry(found, found.top(1)[0])
            pictures[at] = picture, f"{entry['class']}, {percent(entry['probability'])}"
        visit = Visit(paths=paths or (), at=min(pictures), labels={}) if pictures else None
        return visit, panels.strip(pictures, problems)

    def classes(self, visit: Visit) -> Html:
        """The surest classes of the picture shown, and the chosen one if it is another."""
        picture, label = self.chosen(visit, visit.at)
        found = self.answers.predict(picture)
        listed = dict.fromkeys([*found.top(TOP), label])
        return panels.class_list([self.answers.entry(found, each) for each in listed], label)

    def look(
        self, paths: list[str] | None, note: Any, alpha: float, scale: str, *edges: int | None
    ) -> list[Html]:
        """Title, pictures, sums and region."""
        visit = self.visit(paths, note)
        if visit.at < 0:
            return [Html()] * 4
        picture, label = self.chosen(visit, visit.at)
        shown = self.answers.explain(picture, label, joint=scale == JOINT)
        entry = self.answers.entry(shown.found, label)
        seen = panels.views(shown, entry["class"], alpha, Box.of(edges))
        if not self.answers.exact:
            return [panels.title(entry), seen, Html(), Html()]
        sums = panels.sums_card(self.answers.sums(picture, label))
        return [panels.title(entry), seen, sums, self.measure(visit, *edges)]

    def measure(self, visit: Visit, *edges: int | None) -> Html:
        """What the box contributes, or what is wrong with it."""
        box = Box.of(edges)
        if box is None:
            return panels.empty("No region yet.")
        picture, label = self.chosen(visit, visit.at)
        try:
            return panels.region_card(self.answers.region(picture, label, box))
        except ValueError as error:
            return panels.problem(str(error))

    def compare(self, paths: list[str] | None, note: Any, methods: list[str], scale: str) -> Html:
        """Maps of other methods for the same class."""
        visit = self.visit(paths, note)
        if visit.at < 0 or not methods:
            return Html()
        picture, label = self.chosen(visit, visit.at)
        name, joint = self.answers.predictor.class_names[label], scale == JOINT
        maps = [self.answers.explain(picture, label, each, joint=joint) for each in methods]
        return panels.gallery([panels.map_of(each, name) for each in maps])

    def save(self, kind: str, visit: Visit, methods: list[str], folder: Path) -> Path:
        """A file about all pictures of the visit that can be read."""
        chosen = []
        for at in range(len(visit.paths)):
            with suppress(ValueError):
                chosen.append(self.chosen(visit, at))
        used = ",".join([self.answers.methods[0], *methods])
        return export(self.answers, chosen, used, kind, folder)
