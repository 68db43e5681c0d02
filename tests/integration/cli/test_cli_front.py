"""The front of the command line: help, version, wrong words, and the doctor."""

from __future__ import annotations

import json
import subprocess

import pytest

import shoal as package
from helpers.commands import GUARD_S, command
from shoal.cli.checks import check_accelerator, check_cores, check_extras


@pytest.mark.parametrize(
    ("words", "status", "text"), [(["--version"], 0, f"shoal {package.__version__}\n"), (["trian"], 2, "Usage")]
)
def test_the_program_itself(words, status, text):
    """Other tests fork the command from a process that is warm; this is how a user starts it."""
    answer = subprocess.run(command(*words), capture_output=True, text=True, timeout=GUARD_S, check=False)
    assert answer.returncode == status and text in answer.stdout + answer.stderr


def test_version_and_help(shoal):
    assert shoal("--version").stdout == f"shoal {package.__version__}\n"
    answer = shoal("--help")
    assert answer.returncode == 0
    for verb in ("train", "evaluate", "predict", "export", "run", "scale", "verify", "bench", "doctor"):
        assert verb in answer.stdout
    answer = shoal("train", "--help")
    assert answer.returncode == 0 and "--workers" in answer.stdout and "shoal train digits.py" in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    "words", [["trian"], ["train"], ["train", "x.py", "--wrokers", "2"], ["train", "--workers", "x"]]
)
def test_wrong_words_are_refused(shoal, words):
    answer = shoal(*words)
    assert answer.returncode == 2
    assert "Traceback" not in answer.stderr and "Usage" in answer.stderr


def test_the_doctor_finds_this_machine_fit(shoal):
    answer = shoal("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(answer.stdout)}
    assert answer.returncode == 0, answer.stdout
    assert set(checks) == {
        "python",
        "torch",
        "allocator",
        "shared memory",
        "cores",
        "memory",
        "disk",
        "open files",
        "loopback",
        "GPUs",
        "accelerators",
        "processor",
        "compiler",
        "extras",
        "processes",
        "futex",
    }
    assert all(check["status"] in ("ok", "warn") for check in checks.values())
    assert all(check["advice"] for check in checks.values() if check["status"] != "ok")


def test_accelerators_that_torch_knows_and_nobody_uses_are_left_out():
    assert check_accelerator("cuda", 2).status == check_accelerator("", 0).status == "ok"
    found = check_accelerator("xpu", 2)
    assert (found.status, found.found) == ("warn", "torch finds 2 x xpu") and "left out" in found.advice


def test_the_doctor_says_what_to_do(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "512")
    found = check_cores()
    assert found.status == "warn" and "Unset OMP_NUM_THREADS" in found.advice
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'shoal[report,sklearn,tensorboard]'" in check_extras().advice
