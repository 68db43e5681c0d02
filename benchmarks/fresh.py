"""Fresh processes of this benchmark: what is measured never runs in a process that has run before."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Where `benchmarks` is, which is not installed."""


def module_command(module: str, *words: str) -> list[str]:
    """The command that runs one of the modules of this benchmark."""
    return [sys.executable, "-m", f"benchmarks.{module}", *words]


def surroundings(**more: str) -> dict[str, str]:
    """The environment of a fresh process: it finds this benchmark wherever it is started, and has one thread."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **threads, **more}
