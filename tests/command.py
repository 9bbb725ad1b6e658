"""The installed command, run as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path


def bcosvit(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = Path(sys.executable).parent / "bcosvit"
    return subprocess.run(
        [command, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "COLUMNS": "200"},
        **options,
    )
