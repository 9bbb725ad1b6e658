"""How a report was made: the command, the versions and the machine."""

import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bcosvit.messages import counted


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a reader needs to make the same report again; the end of every page shows it."""

    command: str
    versions: Mapping[str, str]
    config: Mapping[str, Any]
    """The config of the model and all other settings, fit for JSON."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Provenance":
        """Returns the provenance of a report that this process makes."""
        return cls(command=command_line(), versions=versions(), config=config)


def command_line() -> str:
    """Returns the command that started this process, ready to be pasted into a shell."""
    program = Path(sys.argv[0]).name
    # `python -m bcosvit` is the same command.
    return shlex.join(["bcosvit" if program == "__main__.py" else program, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Returns the versions of the packages that numbers depend on."""
    import bcosvit

    return {
        "bcosvit": bcosvit.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
    }


def machine(device: torch.device) -> str:
    """Describes a device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = counted(torch.get_num_threads(), "thread")
    return f"{device.type}, {threads}, {platform.machine()}"
