"""Where a report comes from: the command and the versions at its foot, and the machine."""

import platform
import shlex
import sys
from pathlib import Path

import numpy as np
import torch


def command_line() -> str:
    """The command that this process was started by, fit to be pasted into a shell."""
    program = Path(sys.argv[0]).name
    # `python -m bcosvit` is the same command by another door.
    return shlex.join(["bcosvit" if program == "__main__.py" else program, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    import bcosvit

    return {
        "bcosvit": bcosvit.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
    }


def machine(device: torch.device) -> str:
    """What computed it, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads, {platform.machine()}"
