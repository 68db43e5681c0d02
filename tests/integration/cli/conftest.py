"""The command line, and one trained run for all who only read it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from helpers.commands import SMALL_TASK, Shoal
from helpers.warm_commands import WarmCommands


@pytest.fixture(scope="session")
def shoal_in(warm_commands: WarmCommands) -> Shoal:
    """`shoal_in(folder, "train", …)` runs the command there to its end."""

    def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        answer = warm_commands(folder, *words)
        assert answer.status is not None, f"it hangs: {answer.text}"
        return subprocess.CompletedProcess(words, answer.status, answer.out, answer.err)

    return run


@pytest.fixture
def shoal(shoal_in: Shoal, tmp_path: Path) -> Shoal:
    """`shoal("train", …)` runs the command in a fresh folder."""
    return lambda *words: shoal_in(tmp_path, *words)


@pytest.fixture(scope="session")
def trained(shoal_in: Shoal, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the small task."""
    folder = tmp_path_factory.mktemp("trained")
    answer = shoal_in(folder, "train", str(SMALL_TASK), "--workers", "2", "--epochs", "1", "--name", "done")
    assert answer.returncode == 0, answer.stderr
    return folder / "runs" / "done"
