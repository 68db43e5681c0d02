"""Hosts that share no disk with the run's supervisor: what they need is sent there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.apart import NEEDS_NAMESPACES, ssh_to_others, write_task
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.runs import train


@NEEDS_NAMESPACES
def test_the_task_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write_task(tmp_path / "work")
    monkeypatch.setenv(SSH_VARIABLE, ssh_to_others(tmp_path / "ssh", [tmp_path / "work"]))
    settings: dict[str, Any] = {"runs": tmp_path / "runs", "progress": False, "strategy": "data"}
    apart = train(
        target,
        cluster={"workers": 2, "threads": 1, "on": "ssh:first,other", "interface": "127.0.0.1"},
        name="apart",
        **settings,
    )
    told = (apart.folder / "events.jsonl").read_text()
    assert "sending the task to other: 3 files" in told and "to first" not in told
    here = train(target, cluster={"workers": 2, "threads": 1}, name="here", **settings)
    assert apart.digest == here.digest
