"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from shoal.launch.owner import ZygoteProcess

GUARD_S = 60.0
SMALL_TASK = Path(__file__).parents[1] / "integration" / "cli" / "small_task.py"

Shoal = Callable[..., "subprocess.CompletedProcess[str]"]


def command(*words: str) -> list[str]:
    """`shoal` and these words."""
    return [sys.executable, "-m", "shoal.cli", *words]


def environment(zygote: ZygoteProcess) -> dict[str, str]:
    """What a `shoal` process needs to use a warm zygote."""
    return {**os.environ, "SHOAL_ZYGOTE": zygote.name, "COLUMNS": "80"}
