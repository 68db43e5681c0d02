"""Peers that live in environments of their own: what they need is not what Shoal's torch needs.

`python -m benchmarks.environment [flower]` makes one, `.venv-tensorflow` or `.venv-flower` beside the sources;
`SHOAL_TENSORFLOW_PYTHON` or `SHOAL_FLOWER_PYTHON` names the interpreter of another one.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fresh import ROOT
from shoal.errors import LaunchError, SpecError

MARKER = "ready"
"""Written last, so that an installation that was broken off is not taken for one."""


@dataclass(frozen=True, kw_only=True)
class PeerEnvironment:
    """Where a peer is installed, and how."""

    peer: str
    requirement: str
    how: str
    """The command that installs it."""
    has_our_torch: bool = False
    """Whether it trains with the torch of this interpreter, which pip might exchange for one with CUDA."""

    @property
    def variable(self) -> str:
        return f"SHOAL_{self.peer.upper()}_PYTHON"

    @property
    def folder(self) -> Path:
        """Beside the sources."""
        return ROOT / f".venv-{self.peer.lower()}"

    @property
    def hint(self) -> str:
        return f"`{self.how}` installs it, or {self.variable}=/path/to/python names an interpreter that has it"

    def python(self) -> Path | None:
        """The interpreter that has the peer, or None where there is none yet."""
        if named := os.environ.get(self.variable):
            if not os.access(named, os.X_OK) or not Path(named).is_file():
                raise SpecError(
                    f"bench: {self.variable}={named} is no program that can be run; "
                    f"set it to the Python that has {self.peer}, or unset it."
                )
            return Path(named)
        return self.folder / "bin" / "python" if (self.folder / MARKER).exists() else None

    def require_python(self) -> Path:
        """The interpreter that has the peer, or an error that says how to get it."""
        if (python := self.python()) is None:
            raise LaunchError(
                f"bench: {self.peer}'s peer needs {self.peer}, which is not in {self.folder.name}; {self.hint}."
            )
        return python

    def make(self) -> Path:
        """Make the environment unless it is there; returns its interpreter."""
        if (python := self.python()) is not None:
            return python
        python = self.folder / "bin" / "python"
        for command in (
            [sys.executable, "-m", "venv", str(self.folder)],
            [str(python), "-m", "pip", "install", "-q", self.requirement],
        ):
            if status := subprocess.run(command, check=False).returncode:
                raise LaunchError(
                    f"bench: `{' '.join(command)}` failed with status {status}; what it said is above. "
                    f"Without {self.peer} the benchmark leaves its rows out."
                )
        if self.has_our_torch:
            self._add_our_packages()
        (self.folder / MARKER).touch()
        return python

    def _add_our_packages(self) -> None:
        """Behind its own: what it has itself is not ours."""
        import torch

        packages = Path(torch.__file__).parents[1]
        (own,) = self.folder.glob("lib/python*/site-packages")
        (own / "shoal-torch.pth").write_text(f"{packages}\n", encoding="utf-8")


def tensorflow_requirement(machine: str) -> str:
    """TensorFlow without its CUDA libraries; other machines than x86-64 have it under its plain name."""
    return "tensorflow-cpu==2.21.*" if machine == "x86_64" else "tensorflow==2.21.*"


TENSORFLOW = PeerEnvironment(
    peer="TensorFlow", requirement=tensorflow_requirement(platform.machine()), how="make bench-peers"
)
FLOWER = PeerEnvironment(
    peer="Flower",
    requirement="flwr[simulation]==1.41.*",
    how="python -m benchmarks.environment flower",
    has_our_torch=True,
)


def main(argv: Sequence[str]) -> None:
    """Make what is named, or TensorFlow's."""
    known = {one.peer.lower(): one for one in (TENSORFLOW, FLOWER)}
    for name in argv or ["tensorflow"]:
        if name not in known:
            raise SpecError(f"bench: there is no peer {name!r}; there are {', '.join(known)}.")
        print(f"{known[name].peer}'s interpreter: {known[name].make()}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (LaunchError, SpecError) as error:
        sys.exit(str(error))
