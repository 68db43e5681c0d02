"""An observer of its own: how often each sample was applied, read off the weights of a model that counts."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from helpers.commands import command, environment
from helpers.counting_task import SAMPLES
from shoal.checkpoint.model_file import load_tensors
from shoal.launch.owner import ZygoteProcess

TASK = Path(__file__).with_name("counting_task.py")
GUARD_S = 120.0
_NAMES = {
    "worker": ("shoal-worker-", "shoal-spare-"),
    "server": ("shoal-server-",),
    "coordinator": ("shoal-coordina",),
}
"""As the kernel cuts them; who was a spare goes on under that name."""


def applied(model: Path) -> list[int]:
    """By sample: how often the model was moved by it."""
    (rows,) = load_tensors(model).values()
    assert torch.equal(rows, rows[:, :1].expand_as(rows)), "a sample was applied to a part of the model only"
    counts = rows[:, 0]
    assert torch.equal(counts, counts.round()), "something was applied in part"
    return [int(count) for count in counts]


class CountedRun:
    """A run of the counting model as a process of its own, in `folder`, which can be killed and resumed."""

    def __init__(self, folder: Path, zygote: ZygoteProcess, *words: str) -> None:
        self.path = folder / "runs" / "counted"
        self._folder = folder
        self._env = environment(zygote)
        self._process = self._start("train", str(TASK), "--name", "counted", "--arg", f"signs={folder}", *words)

    def sign(self, name: str) -> Path:
        """A file by which the task and its observer talk."""
        return self._folder / name

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait for what must come while the run goes on; the time is a guard against hangs, no more."""
        deadline = time.monotonic() + GUARD_S
        while not holds():
            assert self._process.poll() is None, f"the run ended before {what}: {self._said()}"
            assert time.monotonic() < deadline, f"waited {GUARD_S:.0f} s in vain until {what}"
            time.sleep(0.005)

    def mark(self) -> None:
        """From here on, `await_steps` waits for new ones."""
        self._told_before = self.events("steps")

    def await_steps(self, tells: int = 1) -> None:
        """Wait until the run has told so often of steps."""
        self.wait_until(lambda: self.events("steps") >= self._told_before + tells, "it has taken steps")

    def kill_and_resume(self) -> None:
        """`kill -9` to the supervisor, once there is something to go on from."""
        saved = self.path / "checkpoints"
        self.wait_until(lambda: any(saved.glob("step-*/manifest.json")), "there is a checkpoint")
        self._process.kill()
        self._process.wait()
        self._process = self._start("train", "--resume", "counted")
        self.await_steps()

    def events(self, kind: str) -> int:
        """How many of a kind were told."""
        try:
            return (self.path / "events.jsonl").read_text(errors="replace").count(f'"kind": "{kind}"')
        except FileNotFoundError:
            return 0

    def finish(self) -> dict[str, object]:
        """Let it run as fast as it can to its end; its results."""
        self.sign("hurry").touch()
        _, said = self._process.communicate(timeout=GUARD_S)
        assert self._process.returncode == 0, said
        results: dict[str, object] = json.loads((self.path / "result.json").read_text())
        return results

    def close(self) -> None:
        """Whatever happened, leave nothing running."""
        self._process.kill()
        self._process.wait()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _said(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.read()

    def _start(self, *words: str) -> subprocess.Popen[str]:
        self.mark()
        return subprocess.Popen(
            command(*words),
            cwd=self._folder,
            env=self._env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


class Assault:
    """Does harm to a run at random moments; what was done is counted."""

    def __init__(self, run: CountedRun, zygote: ZygoteProcess, chance: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._run = run
        self._zygote = zygote
        self._chance = chance

    def strike(self, kind: str, role: str = "worker") -> None:
        """Kill, stop or blow up one process of this role, somewhere in what it does, once the run goes on."""
        # Before a process has been measured for a while, it takes half a minute to be missed.
        self._run.await_steps(tells=4 if kind == "stop" else 1)
        lost = self._run.events("lost")
        time.sleep(self._chance.uniform(0.0, 0.25))
        self._hit(kind, role)
        self._run.wait_until(lambda: self._run.events("lost") > lost, "the loss was told")
        self._run.mark()

    def strike_early(self, role: str = "worker") -> None:
        """Kill a process of this role, perhaps one that has just been started in another's place."""
        time.sleep(self._chance.uniform(0.0, 0.5))
        self._hit("kill", role)
        self._run.mark()

    def _hit(self, kind: str, role: str) -> None:
        self.done[kind] += 1
        if kind == "raise":
            self._run.sign("bomb").touch()
            self._run.wait_until(self._run.sign("burst").exists, "the bomb burst")
            self._run.sign("burst").unlink()
            return
        victims = self._living(role)
        victim = victims[self._chance.randrange(len(victims))]
        victim.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        self._run.wait_until(lambda: not victim.is_running(), f"the {role} was ended")

    def _living(self, role: str) -> list[psutil.Process]:
        found: list[psutil.Process] = []

        def look() -> bool:
            children = psutil.Process(self._zygote.pid).children()
            found[:] = [one for one in children if _name(one).startswith(_NAMES[role])]
            return bool(found)

        self._run.wait_until(look, f"there is a {role}")
        return sorted(found, key=lambda one: one.pid)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def assert_each_once(results: dict[str, object], counts: list[int], epochs: int) -> None:
    """What the weights say, and what the run says of itself."""
    audit = results["audit"]
    assert isinstance(audit, dict) and audit["clean"], audit
    assert len(counts) == SAMPLES
    assert Counter(counts) == {epochs: SAMPLES}, "by its weights"
