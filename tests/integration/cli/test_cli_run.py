"""`shoal run`: any script in a world, its output live, its exit status ours."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from helpers.commands import GUARD_S, SMALL_TASK, command, environment


def test_output_is_shown_by_rank(shoal, tmp_path):
    (tmp_path / "hello.py").write_text(
        "import os, sys\n"
        "print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], *sys.argv[1:])\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    answer = shoal("run", "--workers", "2", "hello.py", "--lr", "0.1")
    assert answer.returncode == 0, answer.stderr
    assert sorted(answer.stdout.splitlines()) == [
        "[0] rank 0 of 2 --lr 0.1",
        "[0] to stderr",
        "[1] rank 1 of 2 --lr 0.1",
        "[1] to stderr",
    ]
    assert answer.stderr.splitlines()[0].startswith("2 workers on 1 host")
    alone = shoal("run", "hello.py", "--help")
    assert alone.stdout.splitlines() == ["rank 0 of 1 --help", "to stderr"]


def test_output_is_shown_while_the_script_runs(zygote, tmp_path):
    (tmp_path / "ask.py").write_text(
        "import os, pathlib, time\n"
        "print('waiting')\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.01)\n"
        "print('going', end='')\n"
    )
    process = subprocess.Popen(
        command("run", "--workers", "2", "ask.py"),
        cwd=tmp_path,
        env=environment(zygote),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {"[0] waiting\n", "[1] waiting\n"}
        (tmp_path / "go").touch()
        out, _ = process.communicate(timeout=GUARD_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert sorted(out.splitlines()) == ["[0] going", "[1] going"], "a last line without an end is shown, too"


def test_servers_are_started_for_a_strategy_that_has_some(shoal, tmp_path):
    shutil.copy(SMALL_TASK, tmp_path)
    (tmp_path / "served.py").write_text(
        "import shoal, small_task\n"
        "with shoal.Trainer(small_task.task()) as trainer:\n"
        "    outcome = trainer.fit()\n"
        "print(outcome.reason, outcome.step)\n"
    )
    answer = shoal("run", "--strategy", "ps:servers=2", "served.py")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "[0] finished 26\n", "each writes after its name, also where one worker has servers"
    assert answer.stderr.splitlines()[0].startswith("1 worker, 2 servers and a coordinator on 1 host")
    refused = shoal("run", "--strategy", "ps:servers=0", "served.py")
    assert refused.returncode != 0 and "servers" in refused.stderr


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        ("sys.exit(7)", 7, "Worker 1 ended with exit code 7"),
        ("os.kill(os.getpid(), 9)", 137, "Worker 1 was killed from outside (SIGKILL)"),
        ("raise ValueError('the reason')", 1, "Worker 1 failed: ValueError: the reason"),
    ],
)
def test_the_exit_status_is_the_failing_ranks(shoal, tmp_path, ending, status, message):
    (tmp_path / "fail.py").write_text(
        f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {ending}\ntime.sleep(600)\n"
    )
    answer = shoal("run", "--workers", "2", "fail.py")
    assert answer.returncode == status
    assert message in answer.stderr and answer.stderr.count("error:") == 1
    tracebacks = int("raise" in ending)
    assert answer.stdout.count("[1] Traceback") == tracebacks and "Traceback" not in answer.stderr
