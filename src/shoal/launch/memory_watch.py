"""Whether memory has run out on this machine."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


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
    files = [Path("/proc/vmstat"), *_cgroup_files()]
    return sum(_read_count(file) for file in files)


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


def _read_count(file: Path) -> int:
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
