"""Which requests are computed for whom, as Gradio's queue knows it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gradio as gr
from gradio.context import LocalContext

from bcosvit.web.service import Limits

JOBS = "bcosvit_jobs"
"""The attribute of a Gradio app that its `Jobs` are stored as."""

PATIENCE = 10.0
"""Seconds after which a request whose result nobody waits for is given up."""


class Jobs:
    """The requests of all users.

    Args:
        blocks: The Gradio app.
        limits: How many requests may wait.
    """

    FULL = "Queue is full: too many requests wait; try again in a minute."

    def __init__(self, blocks: gr.Blocks, limits: Limits) -> None:
        self.blocks, self.limits = blocks, limits
        self._direct = 0
        self._open: Counter[str] = Counter()

    @property
    def _queue(self) -> Any:
        return self.blocks._queue

    def has_event(self, event: str) -> bool:
        """Whether there is, or will be, a result that nobody has read."""
        return any(event in ids for ids in self._queue.pending_event_ids_session.values())

    def has_session(self, session: str) -> bool:
        """Whether a page has asked for something."""
        return session in self._queue.pending_messages_per_session

    def is_full(self) -> bool:
        """Whether so many requests wait that no more are accepted."""
        running = sum(job is not None for job in self._queue.active_jobs)
        return (
            len(self._queue) + running + self._direct >= self.limits.queue + self.limits.concurrency
        )

    @contextmanager
    def direct(self) -> Iterator[None]:
        """While it lasts a request waits that does not stand in Gradio's queue."""
        self._direct += 1
        try:
            yield
        finally:
            self._direct -= 1

    def is_heard(self, event: Any) -> bool:
        """Whether somebody waits for the result of an event."""
        return event.session_hash in self._open or event._id in self._open

    @contextmanager
    def listening(self, stream: str) -> Iterator[None]:
        """While it lasts somebody waits for the results of an event or a session."""
        self._open[stream] += 1
        try:
            yield
        finally:
            self._open[stream] -= 1
            if not self._open[stream]:
                del self._open[stream]


def has_left() -> Callable[[], bool]:
    """Returns a function that says whether the client of this thread's request has hung up."""
    blocks, event_id = LocalContext.blocks.get(None), LocalContext.event_id.get(None)
    if blocks is None or event_id is None:
        return lambda: False
    event: Any = blocks._queue.event_ids_to_events.get(event_id)
    jobs: Jobs | None = getattr(blocks, JOBS, None)

    def left() -> bool:
        if event is None:
            return False
        if not event.alive:
            return True
        late = time.monotonic() - event.enqueue_time > PATIENCE
        return late and jobs is not None and not jobs.is_heard(event)

    return left
