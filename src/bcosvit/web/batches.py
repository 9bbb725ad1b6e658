"""Requests of several users that are computed in one pass."""

import contextvars
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Event, Semaphore
from typing import Generic, TypeVar

from bcosvit.attribution.base import check_cancelled

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Request(Generic[Item, Result]):
    item: Item
    done: Event = field(default_factory=Event)
    result: list[Result] = field(default_factory=list)
    error: BaseException | None = None


class Batches(Generic[Item, Result]):
    """Computes what several threads ask for together, in the order in which they ask.

    A thread that gets a turn computes for all that wait, itself among them. Nobody waits for
    others while there is a turn, unless requests have come together before: then a batch waits for
    more of them until its deadline. A request whose user has left is not computed, unless it is
    under way. Where a batch fails, its requests are computed one by one, so that each fails or
    succeeds on its own.

    Args:
        compute: Returns the results of some items.
        turn: How many batches may be computed at the same time.
        most: Items of one batch, which bounds memory.
        deadline: Seconds that a batch may wait for more items.

    Example:
        >>> double = Batches(lambda items: [2 * item for item in items], Semaphore(1))
        >>> double("numbers", 21)
        42
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Item]], Sequence[Result]],
        turn: Semaphore,
        most: int = 8,
        deadline: float = 0.01,
    ) -> None:
        self.compute, self.turn, self.most, self.deadline = compute, turn, most, deadline
        self._waiting: dict[Hashable, list[_Request[Item, Result]]] = {}
        self._changed = Condition()
        self._last = 1

    def __call__(self, kind: Hashable, item: Item) -> Result:
        """Returns the result of an item.

        Args:
            kind: Only items of the same kind share a batch.
            item: What is asked for.

        Raises:
            Cancelled: Nobody waits for the result any more.
        """
        mine: _Request[Item, Result] = _Request(item)
        with self._changed:
            self._waiting.setdefault(kind, []).append(mine)
            self._changed.notify_all()
        try:
            while not mine.done.is_set():
                check_cancelled()
                if self.turn.acquire(timeout=0.1):
                    try:
                        self._next(kind, mine)
                    finally:
                        self.turn.release()
        finally:
            with self._changed:
                self._forget(kind, [mine])
        if mine.error is not None:
            raise mine.error
        return mine.result[0]

    def _next(self, kind: Hashable, mine: _Request[Item, Result]) -> None:
        """Computes the oldest requests of a kind, unless somebody else has done so meanwhile."""
        end = time.monotonic() + self.deadline
        with self._changed:
            while self._last > 1 and not self._is_full(kind) and not mine.done.is_set():
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch = [] if mine.done.is_set() else self._waiting.get(kind, [])[: self.most]
            self._forget(kind, batch)
            self._last = len(batch) or self._last
        if batch:
            # In a context of its own: that one user leaves, or looks at the progress of a slow
            # method, is nothing to the others.
            contextvars.Context().run(self._answer, batch)

    def _is_full(self, kind: Hashable) -> bool:
        return len(self._waiting.get(kind, [])) >= self.most

    def _forget(self, kind: Hashable, requests: list[_Request[Item, Result]]) -> None:
        left = [each for each in self._waiting.get(kind, []) if each not in requests]
        self._waiting[kind] = left
        if not left:
            del self._waiting[kind]

    def _answer(self, batch: list[_Request[Item, Result]]) -> None:
        try:
            results = self.compute([each.item for each in batch])
            for each, result in zip(batch, results, strict=True):
                each.result.append(result)
        except Exception as error:
            if len(batch) == 1:
                batch[0].error = error
            else:
                for each in batch:
                    each.result.clear()
                    self._answer([each])
        finally:
            for each in batch:
                each.done.set()
