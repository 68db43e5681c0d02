"""What users get wrong: one clear sentence, at most one traceback, an exit status, and nothing left running."""

from __future__ import annotations

import socket
import subprocess
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import shoal
from shoal.cli.app import run
from shoal.errors import SpecError
from shoal.launch.owner import ZygoteProcess

GUARD_S = 10.0
TASK = """
import torch, shoal
from torch import nn

class Samples:
    def __len__(self): return 64
    def __getitem__(self, number): return torch.full((4,), number / 64), number % 2

def task(**changes):
    given = dict(
        model=lambda: nn.Linear(4, 2),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=Samples(),
        batch_size=16,
    )
    return shoal.Task(**{**given, **changes})
"""
# What each mistake adds to the good task above, and what the message must say.
MISTAKES = {
    "data set without a length": (
        """
        class Endless:
            def __getitem__(self, number): return torch.zeros(4), 0
        def wrong(): return task(train=Endless())
        """,
        ["train set (Endless)", "no length", "__len__"],
    ),
    "vector loss": (
        "def wrong(): return task(loss=lambda o, t: nn.functional.cross_entropy(o, t, reduction='none'))",
        ["loss", "one number", "mean"],
    ),
    "NaN": ("def wrong(): return task(loss=lambda o, t: o.sum() * float('nan'))", ["loss", "nan", "step 1"]),
    "no parameters": (
        "def wrong(): return task(model=nn.Flatten, optimizer=lambda params: None)",
        ["model", "no parameters"],
    ),
    "batch smaller than workers": (
        "def wrong(): return task(batch_size=1)",
        ["batch_size=1", "2 workers", "larger batch_size"],
    ),
    "raises at import": ("raise KeyError('the reason')", ["failed", "KeyError", "the reason"]),
    "out of memory": (
        "def wrong(): return task(model=lambda: nn.Linear(2**20, 2**22))",
        ["out of memory", "batch_size"],
    ),
    "no task returned": ("def wrong(): return 3", ["wrong", "must return a shoal.Task", "int"]),
    "missing factory": ("", ["task.py", "no 'wrong'", "def wrong()"]),
}


@dataclass
class Attempt:
    """A command line that should fail, run in this process with real workers."""

    zygote: ZygoteProcess
    folder: Path
    capfd: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> tuple[int, str]:
        """The exit status and the message; checks what holds for every mistake."""
        status = run(words, self.zygote)
        out, message = self.capfd.readouterr()
        assert status != 0
        assert message.count("error:") == 1, message
        assert (out + message).count("Traceback") <= 1, out + message
        sentence = message.partition("error:")[2].strip().splitlines()[0]
        assert (out + message).count(sentence) == 1, "it is told more than once"
        assert not self._left_after_a_while(), "processes are left"
        return status, message

    def task(self, extra: str) -> str:
        """A file with the good task and what is added to it."""
        path = self.folder / "task.py"
        path.write_text(TASK + textwrap.dedent(extra))
        return "task.py"

    def _left_after_a_while(self) -> str:
        children = Path(f"/proc/{self.zygote.pid}/task/{self.zygote.pid}/children")
        deadline = time.monotonic() + GUARD_S
        while (left := children.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left


@pytest.fixture
def attempt(tmp_path, zygote, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Attempt(zygote, tmp_path, capfd)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_task(attempt, mistake):
    extra, words = MISTAKES[mistake]
    status, message = attempt("train", f"{attempt.task(extra)}:wrong", "--workers", "2", "--plain")
    assert status == 1
    for word in words:
        assert word in message, message
    traceback_wanted = mistake == "raises at import"
    assert ("Traceback" in message) == traceback_wanted
    if traceback_wanted:
        assert 'task.py", line' in message
        assert "site-packages" not in message and "/shoal/" not in message, "frames of ours say nothing"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--strategy", "dta"], ["strategy 'dta'", "Did you mean 'data'?"]),
        (["--strategy", "data:vai=ring"], ["key 'vai'", "via", "batchnorm"]),
        (["--strategy", "data:via=rong"], ["'rong'", "Did you mean 'ring'?"]),
        (["--workers", "0"], ["workers", "at least 1", "0"]),
        (["--workers", "4", "--slots", "2"], ["slots=2", "workers=4"]),
        (["--arg", "width"], ["--arg", "name=value", "'width'"]),
        (["--epochs", "0"], ["epochs", "at least 1"]),
        (["--name", "a/b"], ["'a/b'", "folder name"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_mistakes_on_the_command_line(attempt, words, expected):
    status, message = attempt("train", attempt.task(""), "--plain", *words)
    assert status in (1, 2)
    for word in expected:
        assert word in message, message


def test_wrong_factory_argument(attempt):
    target = attempt.task("def wrong(width=3): return task()")
    _, message = attempt("train", f"{target}:wrong", "--arg", "widht=4", "--plain")
    assert "widht" in message and "its arguments are: width" in message


def test_missing_files(attempt):
    assert attempt("train", "absent.py") == (
        2,
        f"error: There is no file 'absent.py' in {attempt.folder}; check the path.\n",
    )
    status, message = attempt("train", "no.such.module:task", "--plain")
    assert status == 1 and "no module 'no.such.module'" in message
    status, message = attempt("evaluate", "absent")
    assert status == 2 and "'absent' is not a run's path" in message
    status, message = attempt("run", "absent.py")
    assert status == 2 and "no script 'absent.py'" in message


def test_port_in_use(attempt):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        words = ["--workers", "2", "--strategy", "data:via=ring", "--port", port, "--plain"]
        status, message = attempt("train", attempt.task(""), *words)
    assert status == 1 and f"port {port}" in message and "another port" in message


def test_full_disk(attempt):
    disk = attempt.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        target = attempt.task("def wrong(): return task(model=lambda: nn.Linear(4, 20000))")
        status, message = attempt("train", f"{target}:wrong", "--workers", "2", "--runs", str(disk), "--plain")
        assert status == 1 and "disk is full" in message and str(disk) in message
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_unreadable_predictions(attempt):
    assert run(["train", attempt.task(""), "--name", "done", "--plain", "--max-steps", "2"], attempt.zygote) == 0
    attempt.capfd.readouterr()
    status, message = attempt("predict", "done", "--out", "x.txt", "--data", "train")
    assert status == 2 and "'.txt'" in message and ".jsonl" in message
    status, message = attempt("predict", "done", "--out", "x.csv")
    assert status == 1 and "no test set" in message
    (attempt.folder / "runs" / "done" / "model.safetensors").write_bytes(b"torn")
    status, message = attempt("evaluate", "done", "--data", "train")
    assert status == 1 and "not a whole safetensors file" in message


def test_function_of_a_notebook():
    def task():
        raise AssertionError("never called")

    with pytest.raises(SpecError, match="%%writefile"):
        shoal.train(task)
