"""`--hosts 1:4`: a run begins when the least are there, takes in those that come, and goes on without those that
leave; every sample is applied once in each epoch all the while."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from helpers.counting import TASK as COUNTING
from helpers.counting import applied
from helpers.ray_nodes import GrowingRay
from shoal.errors import LaunchError
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.runs import start

EPOCHS = 60


@pytest.fixture(autouse=True)
def one_zygote_for_all(zygote: ZygoteProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)


@pytest.fixture
def reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Any name is a host, on which an agent starts once there is a file of that name, here."""
    script = tmp_path / "ssh"
    script.write_text(f'#!/bin/sh\nuntil [ -e {tmp_path}/"$1" ]; do sleep 0.1; done\nexec sh -c "exec $2"\n')
    script.chmod(0o755)
    monkeypatch.setenv(SSH_VARIABLE, str(script))
    return tmp_path


def counting(folder: Path, on: str, hosts: str, workers: int, **more: Any) -> dict[str, Any]:
    args = {"signs": str(folder), "epochs": EPOCHS, "pause_s": 0.02}
    cluster = {"workers": workers, "threads": 1, "on": on, "hosts": hosts, **more}
    return {"target": str(COUNTING), "args": args, "runs": folder / "runs", "cluster": cluster}


def test_a_host_that_comes_late_is_taken_in_and_one_may_leave(reached: Path) -> None:
    (reached / "127.0.0.1").touch()
    told: list[str] = []
    with start(**counting(reached, "ssh:127.0.0.1,localhost", "1:2", workers=2)) as live:
        for event in live.events():
            if event.kind == "world":
                assert event.what.text.startswith("1 worker on 1 host (127.0.0.1, of 1 to 2), 1 thread each")
            elif event.kind == "steps" and not told:
                (reached / "localhost").touch()
                told.append("begun")
            elif event.kind == "scaled":
                with pytest.raises(LaunchError, match="This run was started with --hosts 1:2, and 3 hosts are"):
                    live.scale(hosts="+1")
                live.scale(hosts="-1")
            elif event.kind == "replaced":
                (reached / "hurry").touch()
            if event.kind in ("host", "replaced", "host_added", "scaled"):
                told.append(event.kind)
        run = live.wait()
    assert told == ["begun", "host_added", "scaled", "host", "replaced"]
    assert run.results["audit"]["clean"]
    assert Counter(applied(run.folder / "model.safetensors")) == {EPOCHS: 256}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["data", "ps:servers=2,sync=asp"])
def test_a_host_that_was_added_to_the_file_is_asked_by_itself(strategy: str, reached: Path) -> None:
    for name in ("127.0.0.1", "localhost", "127.0.0.2"):
        (reached / name).touch()
    listed = reached / "hosts"
    listed.write_text("127.0.0.1\n")
    settings = counting(reached, f"hosts:{listed}", "1:4", workers=4)
    settings["args"] |= {"pause_s": 0.1}
    with start(**settings, strategy=strategy) as live:
        for event in live.events():
            if event.kind == "world":
                listed.write_text("127.0.0.1\nlocalhost\n")
            elif event.kind == "host_added":
                assert event.what.name == "localhost"
                (reached / "hurry").touch()
        run = live.wait()
    told = (run.folder / "events.jsonl").read_text()
    assert told.count('"host_added"') == 1 and run.results["audit"]["clean"]
    assert Counter(applied(run.folder / "model.safetensors")) == {EPOCHS: 256}


@pytest.mark.long
def test_a_cluster_of_rays_grows_because_a_run_wants_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own autoscaler adds a node for what the run asks for, and the run takes it in."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install shoal[ray]")
    with GrowingRay() as cluster:
        for name, value in cluster.env.items():
            monkeypatch.setenv(name, value)
        settings = counting(tmp_path, f"ray:{cluster.address}", "1:2", workers=2)
        settings["args"] |= {"pause_s": 0.4}
        with start(**settings) as live:
            for event in live.events():
                if event.kind == "scaled":
                    (tmp_path / "hurry").touch()
            run = live.wait()
    told = (run.folder / "events.jsonl").read_text()
    assert told.count('"host_added"') == 1 and '"scaled"' in told and run.results["audit"]["clean"]
    assert Counter(applied(run.folder / "model.safetensors")) == {EPOCHS: 256}
