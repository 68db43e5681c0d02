"""TensorFlow lives in an environment of its own: what it needs is not what torch needs.

`python -m benchmarks.environment` makes it, in `.venv-tensorflow` beside the sources; `SHOAL_TENSORFLOW_PYTHON`
names the interpreter of another one.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from benchmarks.fresh import ROOT
from shoal.errors import LaunchError, SpecError

PYTHON_VARIABLE = "SHOAL_TENSORFLOW_PYTHON"
FOLDER = ".venv-tensorflow"
MARKER = "ready"
"""Written last, so that an installation that was broken off is not taken for one."""
HINT = f"`make bench-peers` installs it, or {PYTHON_VARIABLE}=/path/to/python names an interpreter that has it"


def tensorflow_python() -> Path | None:
    """The interpreter that has TensorFlow, or None where there is none yet."""
    if named := os.environ.get(PYTHON_VARIABLE):
        if not os.access(named, os.X_OK) or not Path(named).is_file():
            raise SpecError(
                f"bench: {PYTHON_VARIABLE}={named} is no program that can be run; "
                "set it to the Python that has TensorFlow, or unset it."
            )
        return Path(named)
    folder = environment_folder()
    return folder / "bin" / "python" if (folder / MARKER).exists() else None


def require_tensorflow_python() -> Path:
    """The interpreter that has TensorFlow, or an error that says how to get it."""
    if (python := tensorflow_python()) is None:
        raise LaunchError(f"bench: TensorFlow's peer needs TensorFlow, which is not in {FOLDER}; {HINT}.")
    return python


def environment_folder() -> Path:
    """Beside the sources."""
    return ROOT / FOLDER


def requirement(machine: str) -> str:
    """TensorFlow without its CUDA libraries; other machines than x86-64 have it under its plain name."""
    return "tensorflow-cpu==2.21.*" if machine == "x86_64" else "tensorflow==2.21.*"


def make_environment() -> Path:
    """Make the environment unless it is there; returns its interpreter."""
    if (python := tensorflow_python()) is not None:
        return python
    folder = environment_folder()
    python = folder / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", requirement(platform.machine())],
    ):
        if status := subprocess.run(command, check=False).returncode:
            raise LaunchError(
                f"bench: `{' '.join(command)}` failed with status {status}; what it said is above. "
                "Without TensorFlow the benchmark leaves its rows out."
            )
    (folder / MARKER).touch()
    return python


if __name__ == "__main__":
    try:
        print(f"TensorFlow's interpreter: {make_environment()}")
    except (LaunchError, SpecError) as error:
        sys.exit(str(error))
