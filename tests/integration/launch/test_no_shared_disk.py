"""Hosts that share no disk with the run's supervisor: what they need is sent there, what they make comes back."""

from __future__ import annotations

import glob
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from helpers.apart import NEEDS_NAMESPACES, ssh_to_others, write_task
from shoal.checkpoint.wholeness import check_folder
from shoal.errors import LaunchError
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.runs import train
from shoal.observe.checkpoint_names import folder_name, step_folders

HERE = {"workers": 2, "threads": 1}
APART = {**HERE, "on": "ssh:other,first", "interface": "127.0.0.1"}
"""The first worker, which saves, is on the host that has neither the task nor the runs."""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "runs").mkdir()
    hidden = [tmp_path / "work", tmp_path / "runs"]
    monkeypatch.setenv(SSH_VARIABLE, ssh_to_others(tmp_path / "ssh", hidden))
    return write_task(tmp_path / "work")


def settings(tmp_path: Path) -> dict[str, Any]:
    return {"runs": tmp_path / "runs", "progress": False, "strategy": "data", "checkpoint": "every=2,keep=2"}


@NEEDS_NAMESPACES
def test_the_task_travels_and_what_it_makes_comes_home(target: str, tmp_path: Path) -> None:
    apart = train(target, cluster=APART, name="apart", **settings(tmp_path))
    told = (apart.folder / "events.jsonl").read_text()
    assert "sending the task to other: 3 files" in told and "to first" not in told
    kept = step_folders(apart.folder / "checkpoints")
    assert [path.name for path in kept] == [folder_name(4), folder_name(6)]
    assert check_folder(kept[-1]).step == 6
    assert {path.name for path in (apart.folder / "logs").iterdir()} == {"rank-0.log", "rank-1.log"}
    assert "rank 0 begins" in (apart.folder / "logs" / "rank-0.log").read_text()
    assert str(tmp_path / "runs") in told and "shoal-host-" not in told
    here = train(target, cluster=HERE, name="here", **settings(tmp_path))
    assert apart.digest == here.digest
    assert not [path for path in glob.glob(f"{tempfile.gettempdir()}/shoal-host-*/*") if "work" in path]


@NEEDS_NAMESPACES
def test_a_host_whose_disk_is_full_is_named_or_done_without(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = [tmp_path / "work", tmp_path / "runs"]
    monkeypatch.setenv(SSH_VARIABLE, ssh_to_others(tmp_path / "ssh-to-full", hidden, disk="4k"))
    found = r"Host other \(127\.0\.0\.1\) cannot take part: what is sent to it cannot be kept in .*disk is full"
    with pytest.raises(LaunchError, match=found):
        train(target, cluster=APART, name="refused", **settings(tmp_path))
    alone = train(target, cluster={**APART, "hosts": "1:2"}, name="alone", **settings(tmp_path))
    told = (alone.folder / "events.jsonl").read_text()
    assert re.search(f"{found}.* The run goes on without it", told)
    assert len(step_folders(alone.folder / "checkpoints")) == 2


@NEEDS_NAMESPACES
@pytest.mark.long
def test_a_checkpoint_travels_to_who_goes_on_from_it(target: str, tmp_path: Path) -> None:
    more = settings(tmp_path)
    train(target, cluster=HERE, name="begun", **more)
    del more["strategy"]
    resumed = train(resume="begun", cluster=APART, max_steps=12, **more)
    whole = train(target, cluster=HERE, name="whole", max_steps=12, **settings(tmp_path))
    assert resumed.digest == whole.digest
    weights = {**settings(tmp_path), "name": "from", "weights_from": "begun", "max_steps": 2}
    there = train(target, cluster=APART, **weights)
    assert there.digest == train(target, cluster=HERE, **{**weights, "name": "from-here"}).digest
