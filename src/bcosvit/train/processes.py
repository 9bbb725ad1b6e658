"""What a run says when one of its processes is killed.

A run has one process per device, and each of them may have processes that read images. The system
may kill any of them, mostly because memory ran out. The others would wait for it: in a collective
operation until its timeout, which is half an hour with NCCL. Lightning's own observer ends the
first process without a message, so it is replaced by threads that say what happened.
"""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import subprocess_script

PERIOD = 1.0
"""Seconds between two looks at the other processes."""


class ProcessWatch(Callback):
    """Ends this process of a run, with one sentence, when another one has ended before its time.

    The first process watches those that it has started, and they watch the first one. Processes
    that were started by ``torchrun`` or SLURM are watched by it. ``command`` is how the run is
    continued.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self._done = threading.Event()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        launcher = trainer.strategy.launcher
        if not isinstance(launcher, subprocess_script._SubprocessScriptLauncher):
            return
        count = trainer.world_size
        if launcher.procs:
            self._start(lambda: _first_dead(launcher.procs, count))
        elif isinstance(launcher.cluster_environment, LightningEnvironment) and count > 1:
            parent, rank = os.getppid(), trainer.global_rank
            # Only one process speaks for all that are left.
            self._start(lambda: _orphaned(parent, count, speaks=rank == 1))

    def _start(self, look: Callable[[], str | None]) -> None:
        def watch() -> None:
            while not self._done.wait(PERIOD):
                if (found := look()) is not None:
                    end(f"{found}; {saved(self.command)}" if found else "")

        threading.Thread(target=watch, daemon=True, name="bcosvit-processes").start()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._done.set()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # An error in a collective operation may be the first sign that a process is gone; then the
        # thread has a better message. Other errors have their own.
        if not is_lost_connection(exception):
            self._done.set()


def _first_dead(processes: Sequence["subprocess.Popen[bytes]"], count: int) -> str | None:
    for number, process in enumerate(processes, start=1):
        code = process.poll()
        if code:
            for other in processes:
                other.kill()
            return f"Process {number + 1} of {count} of this run (pid {process.pid}) {_how(code)}"
    return None


def _orphaned(parent: int, count: int, *, speaks: bool) -> str | None:
    if os.getppid() == parent:
        return None
    return f"The first of {count} processes of this run (pid {parent}) was killed" if speaks else ""


def _how(code: int) -> str:
    if code > 0:
        return f"ended with the code {code}, for the reason that it gave"
    name = signal.Signals(-code).name
    memory = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
    return f"was killed ({name}){memory}"


def saved(command: str) -> str:
    """The end of a sentence: what is left, and how to go on."""
    return f"what was saved before is untouched: continue with {command}."


def end(message: str) -> None:
    """Ends this process now: the main thread may be waiting for a process that has ended."""
    if message:
        os.write(2, f"Error: {message}\n".encode())
    os._exit(1)


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective operation failed because another process is gone."""
    signs = r"gloo|NCCL|closed by peer|reset by peer|Broken pipe|c10d|ProcessGroup"
    return isinstance(error, RuntimeError) and re.search(signs, str(error)) is not None


def killed_reader(error: BaseException) -> str | None:
    """What is to be said where a process that reads images was killed; None for other errors."""
    found = re.search(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)", str(error))
    if found is None or not isinstance(error, RuntimeError):
        return None
    return (
        f"A process that reads images (pid {found[1]}) was killed, perhaps because memory ran out"
    )


@contextmanager
def without_lightnings_observer() -> Iterator[None]:
    """Lightning's observer of processes would kill the first one before it has spoken."""
    name = "_launch_process_observer"
    before = getattr(subprocess_script, name, None)
    if before is None:
        yield
        return
    setattr(subprocess_script, name, lambda processes: None)
    try:
        yield
    finally:
        setattr(subprocess_script, name, before)
