"""A strategy that Shoal has never heard of, from an installed package, does all that Shoal's own do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.commands import SMALL_TASK
from helpers.installed import shoal_beside
from shoal.launch.owner import ZygoteProcess

MODULE = Path(__file__).with_name("plain_strategy.py")
Shoal = Callable[..., str]


@pytest.fixture
def shoal(tmp_path: Path, zygote: ZygoteProcess) -> Shoal:
    """`shoal("train", …)` with the package installed; its output."""
    return shoal_beside(tmp_path, MODULE, "plain = plain_strategy:Plain", zygote)


def test_it_has_sixty_lines_and_nobody_names_it() -> None:
    assert len(MODULE.read_text(encoding="utf-8").splitlines()) <= 60
    source = Path(__file__).parents[2] / "src"
    assert not [path for path in source.rglob("*.py") if "plain_strategy" in path.read_text(encoding="utf-8")]


def test_it_does_all_that_others_do(shoal: Shoal, tmp_path: Path) -> None:
    two = ("--workers", "2", "--strategy", "plain")
    words = ("train", str(SMALL_TASK), *two, "--checkpoint", "every=10", "--name", "mine", "--json")
    trained: dict[str, Any] = json.loads(shoal(*words))
    assert trained["audit"]["clean"] and trained["steps"] == 26
    resumed: dict[str, Any] = json.loads(shoal("train", "--resume", "mine@10", "--json"))
    assert (resumed["steps"], resumed["digest"]) == (26, trained["digest"])
    explained = " ".join(shoal("train", str(SMALL_TASK), *two, "--explain").split())
    assert "2 workers with the whole model fill 2 slots; all take the same step" in explained
    assert "2 slots, 20 steps computes what one process computes" in shoal("verify", str(SMALL_TASK), *two)
    evaluated = json.loads(shoal("evaluate", "mine", "--json"))
    assert evaluated["results"]["loss"] == pytest.approx(trained["results"]["loss"])
    shoal("predict", "mine", "--out", "outputs.npy", "--workers", "2")
    assert len(np.load(tmp_path / "outputs.npy")) > 0
