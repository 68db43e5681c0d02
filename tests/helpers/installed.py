"""Packages of others, installed beside Shoal for the time of a test."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from helpers.warm_commands import WarmCommands


def shoal_beside(
    commands: WarmCommands, folder: Path, module: Path, brought: str, group: str = "shoal.strategies"
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
        # Workers look where the command looks for modules, whatever zygote they are forked from.
        answer = commands(folder, *words, site=site)
        assert answer.status == 0, answer.text
        return answer.out

    return run
