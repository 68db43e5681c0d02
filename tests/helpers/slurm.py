"""A real Slurm of two nodes on this machine: its daemons run as this user, who must be root, without systemd."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from helpers.launchers import free_port

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "sinfo", "scontrol")
START_S = 60.0
_SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.%n.pid
SlurmctldLogFile={folder}/log.ctld
SlurmdLogFile={folder}/log.%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=20
SchedulerParameters=sched_interval=1,sched_min_interval=0
SlurmctldPort={ctld}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=1000
PartitionName=p Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Why there can be no Slurm here; nothing where there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"{', '.join(missing)} not installed (slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


@dataclass
class TwoNodes:
    """Its daemons, each a child of this process; `with` starts and ends them."""

    folder: Path
    given: Mapping[str, str] = field(default_factory=dict)
    """What its jobs find in their environment besides."""
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """With which its commands find it."""
        return {**os.environ, **self.given, "SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def __enter__(self) -> TwoNodes:
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        settings = _SETTINGS.format(
            host=socket.gethostname().partition(".")[0],
            folder=self.folder,
            ctld=free_port(),
            first=free_port(),
            second=free_port(),
        )
        (self.folder / "slurm.conf").write_text(settings)
        try:
            self._start_all(key)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in reversed(self.daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *words: str) -> str:
        """What a command of Slurm's says."""
        return subprocess.run(
            words, env=self.env, capture_output=True, text=True, check=True, timeout=START_S
        ).stdout.strip()

    def state_of(self, job: str) -> str:
        """What has become of a job."""
        words = self.ask("scontrol", "show", "job", job, "--oneliner").split()
        return next(word.partition("=")[2] for word in words if word.startswith("JobState="))

    def wait_for(self, is_so: Callable[[], bool], what: str, seconds: float = START_S) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
            time.sleep(0.1)

    def _start_all(self, key: Path) -> None:
        socket_path = self.folder / "munge.socket"
        self._start(
            "munged",
            *("--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/log.munged"),
            *(f"--seed-file={self.folder}/munge.seed", "--num-threads=2"),
        )
        self.wait_for(socket_path.exists, "munged")
        self._start("slurmctld", "-D", "-c")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node)
        self.wait_for(self._are_idle, "two idle nodes")

    def _are_idle(self) -> bool:
        try:
            return self.ask("sinfo", "-h", "-o", "%D %t") == "2 idle"
        except subprocess.SubprocessError:
            assert all(daemon.poll() is None for daemon in self.daemons), "a daemon has ended"
            return False

    def _start(self, name: str, *words: str) -> None:
        program = shutil.which(name, path=_path())
        assert program is not None
        with open(self.folder / f"out.{name}", "ab") as output:
            self.daemons.append(
                subprocess.Popen([program, *words], env=self.env, stdout=output, stderr=output, cwd=self.folder)
            )
