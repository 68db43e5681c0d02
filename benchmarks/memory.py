"""What the workers of a host hold together: parameters and optimizer state once, gradients once per slot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.bars import BarFinding, Ceiling
from shoal.launch.local import LocalEngine
from shoal.launch.owner import start_zygote
from shoal.launch.supervisor import Supervisor
from shoal.observe import Event
from shoal.spec import Cluster, Job

WORKERS, STEPS, SAMPLED_AFTER = 4, 12, 4
PARAMETERS = 20_933_608
"""Of the benchmark's `mlp`, which is trained with momentum: one more number per parameter."""
CEILING = Ceiling(model="mlp", subject="memory of 4 workers", peer="2 + 4 copies", most=1.05, unit="")
"""Parameters and momentum once, gradients once per slot."""


@dataclass(frozen=True)
class Footprint:
    """Bytes that workers hold, each shared page counted once in all."""

    arena: int
    total: int

    @property
    def expected_arena(self) -> int:
        """Parameters, momentum, and a gradient per slot."""
        return (2 + WORKERS) * PARAMETERS * 4

    @property
    def private_copies(self) -> int:
        """What it would be if each worker had its own parameters, momentum and gradient."""
        return 3 * WORKERS * PARAMETERS * 4

    def finding(self) -> BarFinding:
        """Whether the arena is no larger than it has to be."""
        return BarFinding(ceiling=CEILING, values=(self.arena / self.expected_arena,))


def measure_memory() -> Footprint:
    """Train with four workers and look at their memory in the midst of it."""
    seen: list[Footprint] = []
    job = Job(
        target="benchmarks.tasks:task",
        args={"model": "mlp", "processes": WORKERS, "steps": STEPS},
        cluster=Cluster(workers=WORKERS, threads=1),
    )
    with start_zygote() as zygote:

        def look(event: Event) -> None:
            if event.kind == "steps" and event.values["steps"][-1][0] >= SAMPLED_AFTER and not seen:
                workers = [child.pid for child in psutil.Process(zygote.pid).children()]
                seen.append(Footprint(sum(map(_arena_pss, workers)), sum(map(_total_pss, workers))))

        Supervisor(job, look, LocalEngine(zygote)).run()
    return seen[0]


def _total_pss(pid: int) -> int:
    return _sum_pss(Path(f"/proc/{pid}/smaps_rollup").read_text())


def _arena_pss(pid: int) -> int:
    """The shares of this process in the pages of the arena it maps."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
    return sum(_sum_pss(mapping) for mapping in mappings if "memfd:shoal-arena" in mapping)


def _sum_pss(text: str) -> int:
    return 1024 * sum(int(kilobytes) for kilobytes in re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE))
