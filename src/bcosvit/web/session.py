"""What one user has chosen, and what the page shows for it; Gradio is not used here.

The server stores nothing about a user: the state is in the components of the user's own page, and
is sent with every event. Gradio checks the uploads each time, and `Selection.of` checks the rest,
since a page can send anything.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup
from torch import Tensor

from bcosvit.attribution.passes import cancellable
from bcosvit.predictor import Sums
from bcosvit.report.explain import TOP
from bcosvit.report.images import contribution_scales
from bcosvit.web import render
from bcosvit.web.render import fragments
from bcosvit.web.service import Box, ClassMap, ExplanationService, Upload

INDEPENDENT, JOINT = "Independent", "Joint"

TICK = 0.5
"""Seconds between two looks at how far a slow method is."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The uploads of one user, and what is chosen of them."""

    paths: Sequence[str]
    """All uploads, including those that cannot be read."""
    current: int
    """The index of the upload that is shown; −1 if there is none."""
    labels: Mapping[int, int]
    """The classes that are chosen for uploads, by index."""

    @classmethod
    def of(cls, paths: Sequence[str], state: Any, num_classes: int) -> "Selection":
        """Reads what a page sends.

        Args:
            paths: The uploads.
            state: What `state` returned before.
            num_classes: How many classes the model has.

        Raises:
            ValueError: If the state is not valid.
        """
        try:
            selection = cls(
                paths=paths,
                current=int(state["current"]),
                labels={int(index): int(label) for index, label in state["labels"].items()},
            )
        except (TypeError, KeyError, ValueError, AttributeError):
            raise ValueError("The page sent an invalid state: load it again.") from None
        if not all(0 <= label < num_classes for label in selection.labels.values()):
            raise ValueError(f"The model has only {num_classes} classes: choose another class.")
        if not -1 <= selection.current < len(selection.paths):
            raise ValueError("The chosen picture has been removed: choose another.")
        return selection

    def state(self) -> dict[str, Any]:
        """Returns what the page sends back together with the uploads, fit for JSON."""
        return {
            "current": self.current,
            "labels": {str(index): label for index, label in self.labels.items()},
        }

    def with_label(self, label: int) -> "Selection":
        """Returns the same with a class chosen for the picture that is shown."""
        return replace(self, labels={**self.labels, self.current: label})


EMPTY = Selection(paths=(), current=-1, labels={}).state()


@dataclass(frozen=True, kw_only=True)
class PageEvents:
    """Computes what the page shows after each event, for any user."""

    service: ExplanationService

    def selection(self, paths: Sequence[str] | None, state: Any) -> Selection:
        """Reads and checks what a page sends."""
        num_classes = len(self.service.predictor.class_names)
        return Selection.of(self.service.check_count(paths), state, num_classes)

    def chosen(self, selection: Selection, index: int) -> tuple[Upload, int]:
        """Returns a picture and the class to explain."""
        upload = self.service.open(selection.paths[index])
        most_confident = self.service.predict(upload).top(1)[0]
        return upload, selection.labels.get(index, most_confident)

    def upload(self, paths: Sequence[str] | None) -> tuple[Selection | None, Markup]:
        """Reads new uploads; returns None as the selection if none can be read."""
        pictures, problems = [], []
        for index, path in enumerate(self.service.check_count(paths)):
            try:
                upload = self.service.open(path)
            except ValueError as error:
                problems.append(str(error))
                continue
            found = self.service.predict(upload)
            entry = self.service.entry(found, found.top(1)[0])
            pictures.append(render.thumbnail(index, upload, entry))
        listed = fragments.thumbnails(pictures, problems)
        if not pictures:
            return None, listed
        return Selection(paths=paths or (), current=pictures[0].index, labels={}), listed

    def classes(self, selection: Selection) -> Markup:
        """Lists the most confident classes of the picture, and the chosen one."""
        upload, label = self.chosen(selection, selection.current)
        found = self.service.predict(upload)
        listed = dict.fromkeys([*found.top(TOP), label])
        return fragments.class_list([self.service.entry(found, each) for each in listed], label)

    def show(
        self,
        paths: list[str] | None,
        state: Any,
        alpha: float,
        scale: str,
        versus: int | None,
        *edges: int | None,
    ) -> list[Markup]:
        """Returns title, pictures, sums and region; ``versus`` is a class to compare with."""
        selection = self.selection(paths, state)
        if selection.current < 0:
            return [Markup()] * 4
        upload, label = self.chosen(selection, selection.current)
        shown = self.service.explain(upload, label, joint=scale == JOINT)
        entry = self.service.entry(shown.found, label)
        if versus is not None and versus >= 0 and self.service.exact is not None:
            return self.rather(upload, label, int(versus), alpha, Box.of(edges))
        views = render.views(shown, entry["class"], alpha, Box.of(edges))
        title = fragments.title(entry, shown.found.notes)
        if self.service.exact is None:
            return [title, views, Markup(), Markup()]
        sums = fragments.sums(self.service.sums(upload, label))
        return [title, views, sums, self.region(selection, *edges)]

    def rather(
        self, upload: Upload, label: int, versus: int, alpha: float, box: Box | None
    ) -> list[Markup]:
        """Returns what `show` does, for a class rather than another one."""
        if not versus < len(self.service.predictor.class_names):
            raise ValueError("There is no such class to compare with: choose another.")
        both = [self.service.explain(upload, each) for each in (label, versus)]
        name, other = (
            self.service.entry(each.found, k)["class"]
            for each, k in zip(both, (label, versus), strict=True)
        )
        shown, sums = difference(*both)
        incomplete = [note for each in both if (note := each.found.incompleteness)]
        text = f"{name} rather than {other}"
        return [
            # A sentence for each of the two, unless it is the same.
            fragments.rather(name, other, sums.logit, list(dict.fromkeys(incomplete))),
            render.views(shown, text, alpha, box),
            fragments.sums(sums),
            fragments.empty(
                "Regions are measured for one class: choose “nothing” to compare with."
            ),
        ]

    def region(self, selection: Selection, *edges: int | None) -> Markup:
        """Returns what the box contributes, or what is wrong with the box."""
        box = Box.of(edges)
        if box is None:
            return fragments.empty("No region yet.")
        upload, label = self.chosen(selection, selection.current)
        try:
            return fragments.region(self.service.region(upload, label, box))
        except ValueError as error:
            return fragments.problem(str(error))

    def compare(
        self,
        paths: list[str] | None,
        state: Any,
        methods: Sequence[str],
        scale: str,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[Markup | None, Markup]]:
        """Explains the same class by other methods, the fast ones first.

        Args:
            paths: The uploads.
            state: What is chosen of them.
            methods: Names of methods.
            scale: `INDEPENDENT` or `JOINT`.
            is_cancelled: Says whether what is still missing is not wanted any more.

        Yields:
            The maps so far, or None where they are the same as before, and how far the method at
            work is; the latter is empty at the end.

        Raises:
            Cancelled: The rest is not wanted any more.
        """
        selection = self.selection(paths, state)
        if selection.current < 0 or not methods:
            yield Markup(), Markup()
            return
        upload, label = self.chosen(selection, selection.current)
        name, joint = self.service.predictor.class_names[label], scale == JOINT
        maps: dict[str, ClassMap] = {}

        def gallery() -> Markup:
            return render.gallery([maps[each] for each in methods if each in maps], name)

        for method in sorted(methods, key=self.service.is_slow):

            def explain(progress: Callable[[float], None], method: str = method) -> ClassMap:
                with cancellable(is_cancelled):
                    return self.service.explain(
                        upload, label, method, joint=joint, progress=progress
                    )

            if not self.service.is_slow(method):
                maps[method] = explain(lambda share: None)
                continue
            shown: Markup | None = gallery()
            job = _Job(explain)
            while not job.is_done(TICK):
                yield shown, render.working(method, job.share, job.seconds_left)
                shown = None
            maps[method] = job.result()
        yield gallery(), Markup()

    def save(self, kind: str, selection: Selection, methods: list[str], folder: Path) -> Path:
        """Writes a file about all uploads that can be read."""
        chosen = []
        for index in range(len(selection.paths)):
            with suppress(ValueError):
                chosen.append(self.chosen(selection, index))
        used = ",".join([self.service.methods[0], *methods])
        return self.service.write_file(chosen, used, kind, folder)


class _Job:
    """A slow explanation in a thread of its own, which ends early where it is cancelled.

    Args:
        run: Computes it, and tells the share that is done.
    """

    def __init__(self, run: Callable[[Callable[[float], None]], ClassMap]) -> None:
        self._found: ClassMap | Exception | None = None
        self._began: float | None = None
        self.share = 0.0
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[Callable[[float], None]], ClassMap]) -> None:
        try:
            self._found = run(self._tell)
        except Exception as error:
            self._found = error

    def _tell(self, share: float) -> None:
        # Before the first pass it may wait for others.
        if self._began is None:
            self._began = time.monotonic()
        self.share = share

    @property
    def seconds_left(self) -> float | None:
        """By what the passes so far have taken; None before the first one."""
        if self._began is None or not self.share:
            return None
        return (time.monotonic() - self._began) * (1 / self.share - 1)

    def is_done(self, seconds: float) -> bool:
        """Waits for the end, but no longer than this."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> ClassMap:
        """Returns the explanation, or raises what its computation raised."""
        if isinstance(self._found, Exception):
            raise self._found
        assert self._found is not None
        return self._found


def difference(one: ClassMap, other: ClassMap) -> tuple[ClassMap, Sums]:
    """What speaks for one class rather than another: the difference of two rows of W(x).

    Args:
        one: The exact map of the class.
        other: That of the other class, of the same picture.

    Returns:
        The map, and the terms that sum to the difference of the logits.
    """
    pair = [(each.found.attributions[each.method], each.row) for each in (one, other)]

    def subtracted(name: str) -> Tensor | None:
        first, second = (getattr(found, name) for found, _ in pair)
        return None if first is None else (first[pair[0][1]] - second[pair[1][1]])[None]

    map_ = one.map - other.map
    found = replace(
        one.found.attributions[one.method],
        map=map_[None],
        target=one.found.target[one.row][None],
        weights=subtracted("weights"),
        residual=subtracted("residual"),
        logit=subtracted("logit"),
        bias=0.0,
    )
    explanation = replace(one.found, target=found.target, attributions={one.method: found})
    shown = ClassMap(
        found=explanation,
        method=one.method,
        row=0,
        scale=contribution_scales(map_[None], joint=False)[0],
    )
    return shown, explanation.sums(0)
