"""Scripts whose processes are on several hosts: agents of this machine, each with processes of its own."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.apart import NEEDS_NAMESPACES, ssh_to_others
from helpers.commands import GUARD_S, environment
from shoal.launch.engines.ssh import SSH_VARIABLE
from shoal.launch.owner import ZYGOTE_VARIABLE, ZygoteProcess
from shoal.launch.scripts import run_script
from shoal.observe.happenings import LineSaid
from shoal.spec import Cluster

LONG_TEXT = 3_000_000


def test_processes_know_their_hosts_and_all_they_print_is_shown(shoal, tmp_path):
    (tmp_path / "where.py").write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE')\n"
        "print(*[os.environ[name] for name in names], int(total), *sys.argv[1:])\n"
        f"print('x' * {LONG_TEXT})\n"
        "dist.barrier()\n"  # for with the last of them the others end
        "dist.destroy_process_group()\n"
        "if os.environ['RANK'] == '2':\n    raise SystemExit(5)\n"
    )
    answer = shoal("run", "--on", "local:2", "-n", "3", "where.py", "--lr", "1")
    lines = sorted(answer.stdout.splitlines(), key=lambda line: (line[1], -len(line)))
    assert lines[1::2] == ["[0] 0 0 2 0 2 3 --lr 1", "[1] 1 1 2 0 2 3 --lr 1", "[2] 2 0 1 1 2 3 --lr 1"]
    assert [len(line) for line in lines[::2]] == [LONG_TEXT + 4] * 3
    assert "3 workers on 2 hosts (host-0, host-1)" in answer.stderr
    assert answer.returncode == 5 and "Worker 2 ended with exit code 5" in answer.stderr


def test_a_script_for_horovod_computes_over_hosts(shoal, tmp_path):
    (tmp_path / "sums.py").write_text(
        "import torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.arange(300_000.0) + hvd.rank(), op=hvd.Sum)\n"
        "assert torch.equal(total, 3 * torch.arange(300_000.0) + 3)\n"
        "hvd.shutdown()\n"
        "hvd.init()\n"  # another meeting
        "print(hvd.allgather_object(hvd.rank()), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous())\n"
    )
    answer = shoal("run", "--horovod", "--on", "local:2", "-n", "3", "sums.py")
    assert answer.returncode == 0, answer.stderr
    ranks = "[0, 1, 2]"
    expected = [f"[0] {ranks} 0 2 False", f"[1] {ranks} 0 1 False", f"[2] {ranks} 1 2 False"]
    assert sorted(answer.stdout.splitlines()) == expected


@pytest.mark.long
def test_horovodruns_hosts_are_filled_in_their_order(zygote: ZygoteProcess, tmp_path: Path):
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/reached\nexec sh -c "exec $2"\n')
    ssh.chmod(0o755)
    (tmp_path / "train.py").write_text(
        "import os, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "print(hvd.rank(), hvd.cross_rank(), hvd.local_rank(), os.environ['HOROVOD_LOG_LEVEL'])\n"
    )
    words = ["-np", "3", "-H", "127.0.0.1:2,127.0.0.2:2,127.0.0.3:2", "python", "train.py"]
    answer = subprocess.run(
        [sys.executable, "-m", "shoal.horovod.run", *words],
        cwd=tmp_path,
        env={**environment(zygote), SSH_VARIABLE: str(ssh), "HOROVOD_LOG_LEVEL": "info"},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.splitlines()) == ["[0] 0 0 0 info", "[1] 1 0 1 info", "[2] 2 1 0 info"]
    assert sorted((tmp_path / "reached").read_text().split()) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.long
@NEEDS_NAMESPACES
def test_a_script_travels_with_what_lies_beside_it(
    zygote: ZygoteProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ZYGOTE_VARIABLE, zygote.name)
    monkeypatch.setenv(SSH_VARIABLE, ssh_to_others(tmp_path / "ssh", [tmp_path / "work"]))
    work = tmp_path / "work"
    work.mkdir()
    (work / "names.py").write_text("OWN = 'found'\n")
    (work / "script.py").write_text("import os, names\nprint(names.OWN, os.environ['GROUP_RANK'])\n")
    cluster = Cluster(workers=2, threads=1, on="ssh:first,other", interface="127.0.0.1")
    shown, told = io.BytesIO(), []
    run_script(work / "script.py", cluster=cluster, stream=shown, on_event=told.append)
    assert sorted(shown.getvalue().decode().splitlines()) == ["[0] found 0", "[1] found 1"]
    lines = [event.what.text for event in told if isinstance(event.what, LineSaid)]
    assert len(lines) == 1 and lines[0].startswith("sending the task to other: 2 files")


@pytest.mark.long
def test_what_needs_one_host_is_refused_where_there_are_two(shoal, tmp_path):
    (tmp_path / "trainer.py").write_text(
        "import shoal, torch\nfrom shoal import kv\n"
        "rows, nn = torch.ones(4, 1), torch.nn\n"
        "task = shoal.Task(model=lambda: nn.Linear(1, 1), loss=nn.functional.mse_loss, train=(rows, rows),\n"
        "    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch_size=1)\n"
        "for make in (lambda: shoal.Trainer(task).fit(), lambda: kv.create('dist_async')):\n"
        "    try:\n        make()\n"
        "    except shoal.errors.ShoalError as error:\n        print(error)\n"
    )
    answer = shoal("run", "--on", "local:2", "-n", "2", "trainer.py")
    assert answer.returncode == 0 and answer.stdout.count("Start all of them on one host") == 4, answer.stdout
    for words, sentence in [
        (("--servers", "1"), "shoal kv serve"),
        (("--horovod", "-n", "1:2"), "come and go on one host"),
        (("--strategy", "ps"), "would share one host's memory"),
    ]:
        answer = shoal("run", "--on", "local:2", *words, "trainer.py")
        assert answer.returncode == 2 and sentence in answer.stderr, answer.stderr
