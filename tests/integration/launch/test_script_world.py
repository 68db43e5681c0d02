"""Scripts in a world: what they find there, and which world was formed."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from statistics import median

import pytest

from shoal.errors import LaunchError, SpecError, WorkerFailed


def test_a_script_finds_what_torchrun_would_set(run_script) -> None:
    run_script(
        """
        import json, os, sys, torch
        seen = {"env": dict(os.environ), "argv": sys.argv, "name": __name__, "cwd": os.getcwd(),
                "path": sys.path[0], "threads": torch.get_num_threads()}
        json.dump(seen, open(f"seen-{os.environ['RANK']}.json", "w"))
        """,
        argv=("--lr", "0.1"),
        threads=3,
    )
    seen = [json.loads((run_script.folder / f"seen-{rank}.json").read_text()) for rank in range(2)]
    for rank, found in enumerate(seen):
        env = found["env"]
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert env[name] == str(rank), name
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert env[name] == "2", name
        for name in ("GROUP_RANK", "NODE_RANK"):
            assert env[name] == "0", name
        assert (env["SHOAL_ROLE"], env["SHOAL_RANK"]) == ("worker", str(rank))
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["OMP_NUM_THREADS"] == "3"
        assert found["threads"] == 3
        assert found["argv"] == [str(run_script.folder / "script.py"), "--lr", "0.1"]
        assert found["name"] == "__main__"
        assert found["cwd"] == found["path"] == str(run_script.folder)
    assert seen[0]["env"]["MASTER_PORT"] == seen[1]["env"]["MASTER_PORT"]


def test_torch_distributed_joins_from_the_environment(run_script) -> None:
    run_script(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([dist.get_rank() + 1.0])
        dist.all_reduce(total)
        print("sum", total.item())
        dist.destroy_process_group()
        """
    )
    assert run_script.log("rank-0") == run_script.log("rank-1") == "sum 3.0\n"


def test_the_world_that_was_formed_is_told_once(run_script) -> None:
    run_script("pass", workers=2, threads=1)
    (world,) = run_script.kinds("world")
    assert world.values == {
        "workers": 2,
        "spares": 0,
        "hosts": 1,
        "slots": 2,
        "strategy": "data",
        "threads": 1,
        "text": "2 workers on 1 host, 1 thread each, loopback only",
    }
    assert sorted(event.rank for event in run_script.kinds("done")) == [0, 1]


def test_a_process_works_milliseconds_after_its_fork(run_script) -> None:
    code = """
        import os, time
        started = int(open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        print(time.clock_gettime(time.CLOCK_BOOTTIME) - started, len(os.listdir("/proc/self/task")))
        """
    for _ in range(5):
        run_script(code, workers=1)
    lines = [line.split() for line in run_script.log("rank-0").splitlines()]
    assert len(lines) == 5
    # A fresh process needs 1.5 s and more to import torch; the limit leaves room for a busy machine.
    assert median(float(seconds) for seconds, _ in lines) < 0.5
    assert {threads for _, threads in lines} == {"2"}, "the script's thread and the beat"


def test_a_process_inherits_no_file_but_its_own(run_script) -> None:
    run_script(
        """
        import os
        files = [f"/proc/self/fd/{fd}" for fd in range(64)]
        print(*sorted(os.readlink(file) for file in files if os.path.lexists(file)), sep="\\n")
        """
    )
    for rank in range(2):
        lines = run_script.log(f"rank-{rank}").splitlines()
        # The beat reads its memory in /proc, and either thread may be importing something from Python's library.
        links = [link for link in lines if not link.startswith(("/proc/", sys.base_prefix))]
        log = str(run_script.folder / "run" / "logs" / f"rank-{rank}.log")
        assert [link.split(":")[0] for link in links] == [
            "/dev/null",
            "/memfd",  # memory that all share
            "/memfd",  # where its stacks are written if it hangs
            log,
            log,
            "socket",
        ]


def test_processes_differ_in_numpys_random_numbers_and_agree_in_torchs(run_script) -> None:
    run_script("import numpy, random, torch; print(numpy.random.rand(), random.random(), torch.rand(1).item())")
    first, second = (run_script.log(f"rank-{rank}").split() for rank in range(2))
    assert first[0] != second[0] and first[1] != second[1]
    assert first[2] == second[2]


def test_a_script_may_end_itself(run_script) -> None:
    assert run_script("import sys; sys.exit(0)") == {}
    with pytest.raises(WorkerFailed, match="Worker 1 ended with exit code 7") as raised:
        run_script("import os, sys; print('last words'); sys.exit(7 * int(os.environ['RANK']))")
    assert raised.value.global_rank == 1
    assert "last words" in raised.value.details


def test_exit_functions_run_and_threads_are_waited_for(run_script) -> None:
    run_script(
        """
        import atexit, threading
        go = threading.Event()
        threading.Thread(target=lambda: (go.wait(), print("thread"))).start()
        threading.Timer(0.1, go.set).start()
        atexit.register(print, "exit")
        """,
        workers=1,
    )
    assert run_script.log("rank-0") == "thread\nexit\n"


def test_a_fixed_port_is_used(run_script) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    run_script("import os; print(os.environ['MASTER_PORT'])", port=port, workers=1)
    assert run_script.log("rank-0") == f"{port}\n"


def test_a_fixed_port_in_use_is_told_before_anything_starts(run_script) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as holder,
        pytest.raises(LaunchError, match=f"port {holder.getsockname()[1]} cannot be used"),
    ):
        run_script("pass", port=holder.getsockname()[1])
    assert not (run_script.folder / "run").exists()


def test_spares_of_a_script_are_refused(run_script) -> None:
    with pytest.raises(SpecError, match="only training can use spares"):
        run_script("pass", spares=1)


def test_an_unwritable_run_folder_is_told(run_script) -> None:
    (run_script.folder / "run").write_text("a file in the way")
    with pytest.raises(LaunchError, match="choose another run folder"):
        run_script("pass")


def test_starting_a_zygote_waits_for_no_slow_import(run_script) -> None:
    code = (
        "import sys; from shoal.launch.owner import start_zygote; "
        "print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    )
    with os.popen(f'{sys.executable} -c "{code}"') as answer:
        assert answer.read() == "set()\n"


def test_one_run_leaves_nothing_in_the_zygote(run_script) -> None:
    files = Path(f"/proc/{run_script.zygote.pid}/fd")
    run_script("pass")
    before = sorted(os.readlink(file) for file in files.iterdir())
    run_script("pass")
    assert sorted(os.readlink(file) for file in files.iterdir()) == before
