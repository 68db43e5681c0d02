"""When a process of a run fails: one cause, told once, and nobody left working."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from helpers.observed import ObservedEngine
from shoal.errors import Interrupted, LaunchError, WorkerFailed
from shoal.launch import zygote_line
from shoal.launch.owner import ZygoteProcess, start_zygote
from shoal.launch.stacks import explain_state
from shoal.launch.supervisor import run_job
from shoal.observe import Event
from shoal.spec import Cluster, Job


def test_the_failing_ranks_traceback_is_told_once(run_script) -> None:
    with pytest.raises(WorkerFailed) as raised:
        run_script(
            """
            import os, time
            def divide():
                return 1 / 0
            if os.environ["RANK"] == "1":
                divide()
            while True:
                time.sleep(0.01)
            """
        )
    assert raised.value.global_rank == 1
    assert str(raised.value) == "Worker 1 failed: ZeroDivisionError: division by zero"
    lines = raised.value.details.splitlines()
    assert lines[1].endswith("in <module>") and "script.py" in lines[1], "our own frames come first"
    assert lines[-1] == "ZeroDivisionError: division by zero"
    (failed,) = run_script.kinds("failed")
    assert failed.rank == 1 and failed.values["traceback"] == raised.value.details


def test_a_failure_of_all_ranks_is_told_once(run_script) -> None:
    with pytest.raises(WorkerFailed, match="ValueError: all of us"):
        run_script("raise ValueError('all of us')", workers=3)
    assert len(run_script.kinds("failed")) == 1


def test_a_syntax_error_shows_the_users_line_alone(run_script) -> None:
    with pytest.raises(WorkerFailed) as raised:
        run_script("x = = 1", workers=1)
    assert "x = = 1" in raised.value.details
    assert "shoal" not in raised.value.details.replace(str(run_script.folder), "")


@pytest.mark.parametrize(
    "code", ["raise MemoryError", "import torch; torch.empty(2**60, dtype=torch.uint8)"], ids=["python", "torch"]
)
def test_want_of_memory_is_told_without_a_traceback(run_script, code: str) -> None:
    with pytest.raises(WorkerFailed, match=r"Worker 0 ran out of memory .*smaller batch_size") as raised:
        run_script(code, workers=1)
    assert raised.value.details == ""


def test_an_error_of_shoals_own_is_a_sentence(run_script) -> None:
    with pytest.raises(WorkerFailed, match=r"^a clear sentence\.$") as raised:
        run_script("import shoal; raise shoal.ShoalError('a clear sentence.')", workers=1)
    assert raised.value.details == ""


def test_a_missing_script_is_told(zygote: ZygoteProcess) -> None:
    with pytest.raises(WorkerFailed, match=r"'nowhere\.py' is not a file"):
        run_job(Job(target="nowhere.py", purpose="script"), lambda event: None, zygote)


def test_a_killed_worker_is_told_with_its_signal_and_last_output(run_script) -> None:
    with pytest.raises(WorkerFailed, match=r"Worker 1 was killed from outside \(SIGKILL\)") as raised:
        run_script(
            """
            import os, signal, time
            if os.environ["RANK"] == "1":
                print("last words")
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(0.01)
            """
        )
    assert raised.value.global_rank == 1
    assert raised.value.details == "last words"


def test_the_kill_is_told_and_not_what_it_did_to_the_others(run_script) -> None:
    with pytest.raises(WorkerFailed, match="Worker 0 was killed") as raised:
        run_script(
            """
            import os, signal, torch, torch.distributed as dist
            dist.init_process_group("gloo")
            for step in range(1000):
                if step == 3 and dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.all_reduce(torch.ones(4))
            """
        )
    assert raised.value.global_rank == 0


def test_a_crash_in_native_code_shows_where(run_script) -> None:
    with pytest.raises(WorkerFailed, match=r"Worker 0 crashed in native code \(SIGSEGV\)") as raised:
        run_script("import ctypes; ctypes.string_at(0)", workers=1)
    assert "script.py" in raised.value.details, "faulthandler names the line"


def test_a_stopped_worker_is_noticed(run_script) -> None:
    with pytest.raises(WorkerFailed, match=r"Worker 0 hung .* for 1\.\d s: it is stopped") as raised:
        run_script(
            "import os, signal, time; time.sleep(0.6); os.kill(os.getpid(), signal.SIGSTOP)",
            workers=1,
            hang_timeout_s=1.6,
        )
    assert raised.value.global_rank == 0


def test_a_worker_that_ignores_sigterm_is_ended_too(run_script) -> None:
    with pytest.raises(WorkerFailed, match="ValueError"):
        run_script(
            """
            import os, pathlib, signal, time
            if os.environ["RANK"] == "0":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                pathlib.Path("pid").write_text(str(os.getpid()))
                while True:
                    time.sleep(0.01)
            while not pathlib.Path("pid").exists():
                time.sleep(0.01)
            raise ValueError
            """
        )
    pid = int((run_script.folder / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_a_worker_started_ends_with_it(run_script) -> None:
    run_script(
        """
        import os, pathlib, time
        if (pid := os.fork()) == 0:
            time.sleep(600)
        pathlib.Path("grandchild").write_text(str(pid))
        os._exit(0)
        """,
        workers=1,
    )
    _wait_until_gone(int((run_script.folder / "grandchild").read_text()))


def test_ctrl_c_stops_the_script(run_script) -> None:
    pressed = []

    def press(event) -> None:
        if not pressed and len(list(run_script.folder.glob("working-*"))) == 2:
            pressed.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="stopped on request"):
        run_script(
            """
            import os, pathlib, time
            try:
                pathlib.Path(f"working-{os.environ['RANK']}").touch()
                while True:
                    time.sleep(0.01)
            except KeyboardInterrupt:
                print("tidy end")
                raise
            """,
            on_event=press,
        )
    assert run_script.log("rank-0") == run_script.log("rank-1") == "tidy end\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_ends_at_once(run_script) -> None:
    def press(event) -> None:
        if event.kind == "beat" and (run_script.folder / "deaf").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="ended at once"):
        run_script(
            """
            import pathlib, signal, time
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            pathlib.Path("deaf").touch()
            while True:
                time.sleep(0.01)
            """,
            on_event=press,
            workers=1,
        )


def _wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}"):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("when", ["before it forks", "while workers run"])
def test_a_stopped_zygote_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Nothing could be started without it, and no end be noticed."""
    script = tmp_path / "wait.py"
    script.write_text("import time\ntime.sleep(600)\n")
    job = Job(target=str(script), purpose="script", cluster=Cluster(workers=2, threads=1))
    stopped: list[int] = []
    with start_zygote() as zygote:

        def stop(event: Event | None) -> None:
            if not stopped and (event is None or event.kind == "world"):
                monkeypatch.setattr(zygote_line, "PULSE_S", 0.2)
                monkeypatch.setattr(zygote_line, "SILENT_S", 1.0)
                os.kill(zygote.pid, signal.SIGSTOP)
                stopped.append(zygote.pid)

        if when == "before it forks":
            stop(None)
        engine = ObservedEngine(zygote)
        with pytest.raises(LaunchError, match="The zygote, from which workers are forked, has not answered"):
            engine.run(job, stop)
        assert stopped
        pids = [process.pid for process in engine.host.processes.values() if process.pid is not None]
        assert len(pids) == (0 if when == "before it forks" else 2)
        assert all(explain_state(pid) == "it has ended" for pid in pids)
        os.kill(zygote.pid, signal.SIGKILL)  # Stopped, it would not hear for seconds that it should end.
