"""The passes of an explanation through a model: how many samples fit into one, how many have begun,
and whether anybody still waits for the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from bcosvit.machine import free_memory, stored_bytes


class Cancelled(Exception):
    """Nobody waits for the explanation any more."""


_is_cancelled: ContextVar[Callable[[], bool] | None] = ContextVar("_is_cancelled", default=None)
_progress: ContextVar[Callable[[int], None] | None] = ContextVar("_progress", default=None)


@contextmanager
def cancellable(is_cancelled: Callable[[], bool]) -> Iterator[None]:
    """While it lasts, explanations of this thread end early where nobody needs them any more.

    Args:
        is_cancelled: Is asked before each pass through a model; where it returns True,
            `Cancelled` is raised.
    """
    token = _is_cancelled.set(is_cancelled)
    try:
        yield
    finally:
        _is_cancelled.reset(token)


@contextmanager
def counting_passes(progress: Callable[[int], None]) -> Iterator[None]:
    """While it lasts, explanations of this thread tell how far they are.

    Args:
        progress: Is called with the number of passes that begin, as `Explainer.passes` counts
            them, by methods that take many.
    """
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def count_passes(number: int) -> None:
    """Tells that passes begin, and raises `Cancelled` if nobody waits for them any more."""
    check_cancelled()
    if (progress := _progress.get()) is not None:
        progress(number)


def check_cancelled() -> None:
    """Raises `Cancelled` if this thread's explanation is not needed any more."""
    is_cancelled = _is_cancelled.get()
    if is_cancelled is not None and is_cancelled():
        raise Cancelled


CHUNK_BYTES = 1_000_000_000
"""What one pass over several variants of an image may take on a CPU by default."""


def samples_at_once(run: Callable[[], Tensor], device: torch.device, most: int = 32) -> int:
    """Chooses how many samples a method computes in one pass.

    Args:
        run: Predicts one sample; what this pass stores for its gradient is measured.
        device: Where it is computed.
        most: The choice where memory does not matter; more would gain nothing.

    Returns:
        The number of samples whose passes take half of the memory that is free, and no more than
        `CHUNK_BYTES` on a CPU; 1 at least.
    """
    # The gradients of a few tensors come on top.
    each = max(1, 3 * stored_bytes(run) // 2)
    budget = free_memory(device) // 2
    if device.type == "cpu":
        budget = min(budget, CHUNK_BYTES)
    return max(1, min(most, budget // each))
