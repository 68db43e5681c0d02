"""Measure variants side by side: fresh processes, interleaved over rounds."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.fresh import surroundings
from benchmarks.measurement import Measurement
from benchmarks.variants import VARIANTS, CommandBuilder
from shoal.bench.laps import rotated
from shoal.errors import LaunchError, unknown
from shoal.spec.checks import require_count

RUN_TIMEOUT_S = 900


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """One variant's measurements, one per round."""

    variant: str
    model: str
    rounds: tuple[Measurement, ...]

    @property
    def processes(self) -> int:
        """Processes that trained."""
        return self.rounds[0].processes

    @property
    def loss(self) -> float:
        """The last step's loss, of the first round."""
        return self.rounds[0].loss

    @property
    def step_s(self) -> float:
        """The median over rounds of the median step."""
        return statistics.median(run.step_s for run in self.rounds)

    @property
    def samples_per_s(self) -> float:
        """The median over rounds."""
        return statistics.median(run.samples_per_s for run in self.rounds)

    @property
    def spread(self) -> float:
        """How much rounds differ: slowest to fastest, over the median; of a single round, how its steps do."""
        if len(self.rounds) == 1:
            return self.rounds[0].spread
        speeds = [run.samples_per_s for run in self.rounds]
        return (max(speeds) - min(speeds)) / self.samples_per_s

    def ratios_to(self, other: SpeedRow) -> list[float]:
        """How many times the other's speed, round by round: both met the same noise of the machine."""
        return [
            ours.samples_per_s / theirs.samples_per_s
            for ours, theirs in zip(self.rounds, other.rounds, strict=True)
        ]


def compare(
    model: str,
    names: Sequence[str],
    *,
    rounds: int = 3,
    processes: int = 2,
    steps: int | None = None,
    variants: Mapping[str, CommandBuilder] = VARIANTS,
    on_measured: Callable[[Measurement], None] | None = None,
) -> list[SpeedRow]:
    """Measure each named variant once per round; `on_measured` is told of each as it comes."""
    require_count("bench", "rounds", rounds)
    for name in names:
        if name not in variants:
            raise unknown("bench: variant", name, variants)
    # All of them before the first run: a variant that refuses the model, or lacks what it needs, says so at once.
    commands = {name: variants[name](model, processes, steps) for name in names}
    runs: dict[str, list[Measurement]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in rotated(names, turn):
            measurement = run_command(commands[name])
            runs[name].append(measurement)
            if on_measured is not None:
                on_measured(measurement)
    return [SpeedRow(variant=name, model=model, rounds=tuple(runs[name])) for name in names]


def run_command(command: Sequence[str], timeout_s: float = RUN_TIMEOUT_S) -> Measurement:
    """Run one measurement to its end."""
    # A group of its own, so that whatever it started can be ended with it.
    process = subprocess.Popen(
        command,
        env=surroundings(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    written = " ".join(command)
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"bench: `{written}` did not end within {timeout_s} s; run it by hand to see why."
        ) from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        last = "\n".join(errors.strip().splitlines()[-15:])
        raise LaunchError(f"bench: `{written}` failed with status {process.returncode}; it said:\n{last}")
    return Measurement.from_output(output)
