"""A short way to train the small tasks of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.training import Train, Trained
from shoal.launch.owner import ZygoteProcess

TASKS = Path(__file__).with_name("small_tasks.py")


@pytest.fixture(scope="session")
def made_once() -> dict[str, Trained]:
    """What `Train.once` has trained."""
    return {}


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess, made_once: dict[str, Trained]) -> Train:
    return Train(TASKS, tmp_path, zygote, made_once=made_once)
