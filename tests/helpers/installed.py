"""Packages of others, installed beside Shoal for the time of a test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from helpers.commands import GUARD_S, command, environment
from shoal.launch.owner import ZygoteProcess


def shoal_beside(
    folder: Path, module: Path, brought: str, zygote: ZygoteProcess, group: str = "shoal.strategies"
) -> Callable[..., str]:
    """`shoal("train", …)`, run in `folder`; a package brings `module` with `name = module:Class` for `group`."""
    site, name = folder / "site", module.stem
    site.mkdir()
    shutil.copy(module, site)
    information = site / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{brought}\n")

    def run(*words: str) -> str:
        # The zygote has not got the package, and its children look for packages where this command does.
        known = environment(zygote)
        paths = os.pathsep.join(filter(None, (str(site), known.get("PYTHONPATH"))))
        answer = subprocess.run(
            command(*words),
            cwd=folder,
            env={**known, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=GUARD_S,
            check=False,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout

    return run
