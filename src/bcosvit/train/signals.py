"""Ctrl-C and SIGTERM ask a run to stop; it does so between two steps, with everything saved."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class Stopped(Exception):
    """The run was asked to stop, and has saved what it had; the message says how to go on.

    It is empty in all processes of a run but the first.
    """


class Signals:
    """Remembers that the process was asked to stop.

    Only the first time: then the usual handlers are back, so that a second Ctrl-C stops at once.
    """

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        """Takes over both signals, Lightning's own handlers included, where Python allows it."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)

    def release(self) -> None:
        """Gives both signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        for caught in (signal.SIGINT, signal.SIGTERM):
            signal.signal(caught, signal.default_int_handler)
        # Printing may wait for a lock that the interrupted code holds; this cannot.
        os.write(2, b"\nStopping after this step; again to stop at once, without saving.\n")
