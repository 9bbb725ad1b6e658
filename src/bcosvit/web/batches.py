"""Requests of several users that are computed in one pass."""

import itertools
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event, Lock
from typing import Generic, TypeVar

from bcosvit.attribution.passes import check_cancelled

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class _Request(Generic[Item, Result]):
    number: int
    kind: Hashable
    item: Item
    done: Event = field(default_factory=Event)
    result: list[Result] = field(default_factory=list)
    error: BaseException | None = None


class Batches(Generic[Item, Result]):
    """Computes what several threads ask for together, in the order in which they ask.

    Nobody waits for others while a worker is idle: a batch is what has come while earlier ones
    were computed. A request whose user has left is not computed, unless it is under way. Where a
    batch fails, its requests are computed one by one, so that each fails or succeeds on its own.

    The workers are threads of their own: each thread that computes keeps memory for its next time,
    and so many that ask would keep it many times.

    Args:
        compute: Returns the results of some items.
        workers: How many batches may be computed at the same time.
        most: Items of one batch, which bounds memory.

    Example:
        >>> double = Batches(lambda items: [2 * item for item in items])
        >>> double("numbers", 21)
        42
    """

    def __init__(
        self,
        compute: Callable[[Sequence[Item]], Sequence[Result]],
        workers: int = 1,
        most: int = 8,
    ) -> None:
        self.compute, self.most = compute, most
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="batches")
        self._waiting: dict[Hashable, list[_Request[Item, Result]]] = {}
        self._numbers = itertools.count()
        self._lock = Lock()

    def __call__(self, kind: Hashable, item: Item) -> Result:
        """Returns the result of an item.

        Args:
            kind: Only items of the same kind share a batch.
            item: What is asked for.

        Raises:
            Cancelled: Nobody waits for the result any more.
        """
        with self._lock:
            mine: _Request[Item, Result] = _Request(next(self._numbers), kind, item)
            self._waiting.setdefault(kind, []).append(mine)
        try:
            # One for each request, so that none is left over; some find nothing to do.
            self._workers.submit(self._next)
            while not mine.done.wait(0.1):
                check_cancelled()
        finally:
            with self._lock:
                self._forget([mine])
        if mine.error is not None:
            raise mine.error
        return mine.result[0]

    def _next(self) -> None:
        """Computes the oldest request, together with others of its kind."""
        with self._lock:
            if not self._waiting:
                return
            oldest = min(self._waiting.values(), key=lambda waiting: waiting[0].number)
            batch = oldest[: self.most]
            self._forget(batch)
        self._answer(batch)

    def _forget(self, requests: list[_Request[Item, Result]]) -> None:
        for each in requests:
            waiting = self._waiting.get(each.kind, [])
            if each in waiting:
                waiting.remove(each)
                if not waiting:
                    del self._waiting[each.kind]

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
