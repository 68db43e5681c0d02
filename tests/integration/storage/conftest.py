"""Runs whose disk fails below Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.disk_faults import DiskFaults, build_library
from helpers.warm_commands import WarmCommands
from shoal.launch.owner import ZygoteProcess, start_zygote

GUARD_S = 90.0


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> DiskFaults:
    """The disk of every command that `shoal` runs."""
    folder = tmp_path_factory.mktemp("disk-faults")
    return DiskFaults(build_library(folder), folder)


@pytest.fixture(scope="session")
def disk_zygote(disk: DiskFaults) -> Iterator[ZygoteProcess]:
    """Its processes write to the disk that may fail."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in disk.environment.items():
            patch.setenv(name, value)
        process = start_zygote()
    with process:
        yield process


@pytest.fixture(scope="session")
def shoal(disk: DiskFaults, disk_zygote: ZygoteProcess) -> Iterator[WarmCommands]:
    """`shoal(folder, "train", …)` runs the command there, on the disk that may fail."""
    commands = WarmCommands(disk_zygote, GUARD_S, **disk.environment)
    yield commands
    commands.close()


@pytest.fixture(autouse=True)
def whole_disk(disk: DiskFaults) -> Iterator[None]:
    """No fault outlives its test."""
    yield
    disk.quiet()
