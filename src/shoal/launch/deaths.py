"""Why a process ended, as far as the system knows."""

from __future__ import annotations

import signal
from pathlib import Path

from shoal.launch.engine import Member

_CGROUPS = Path("/sys/fs/cgroup")
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


class MemoryWatch:
    """Tells whether the kernel has killed for want of memory since this object was made."""

    def __init__(self) -> None:
        self._before = count_oom_kills()

    def ran_out(self) -> bool:
        """Whether it has. Asking starts a new period, so that one kill explains one death."""
        now = count_oom_kills()
        rose = now > self._before
        self._before = now
        return rose


def count_oom_kills() -> int:
    """Processes that the kernel has killed for want of memory: on this machine, and in our cgroup."""
    places = [Path("/proc/vmstat"), *_cgroup_files()]
    return sum(_read_count(place) for place in places)


def explain_death(member: Member, *, ran_out_of_memory: bool) -> str:
    """One sentence about a process that ended without a word of its own."""
    who = member.name.capitalize()
    where = f" Its output is in {member.log_name}." if member.log_name else ""
    code = member.exit_code
    assert code is not None
    if code >= 0:
        return f"{who} ended with exit code {code} before its work was done.{where}"
    if ran_out_of_memory:
        return (
            f"{who} was killed because memory ran out ({signal_name(-code)}); use a smaller batch_size, "
            f"accumulate=2 or more, or fewer workers.{where}"
        )
    if -code in _CRASHES:
        return f"{who} crashed in native code ({signal_name(-code)}).{where}"
    return f"{who} was killed from outside ({signal_name(-code)}).{where}"


def signal_name(signum: int) -> str:
    """`SIGKILL` for 9, and so on."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def _cgroup_files() -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroup v2
            files.append(_CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return files


def _read_count(place: Path) -> int:
    try:
        lines = place.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
