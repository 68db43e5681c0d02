"""What has been measured so far, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console

from benchmarks.bandwidth import measure_bandwidth
from benchmarks.bars import BarClaim, BarFinding, BarVerdict, judge
from benchmarks.chaos import compare_under_faults
from benchmarks.compare import SpeedRow, compare
from benchmarks.contests import compare_stragglers
from benchmarks.environment import TENSORFLOW
from benchmarks.measurement import Measurement
from benchmarks.memory import Footprint, measure_memory
from benchmarks.ordeal import Ordeal
from benchmarks.overheads import measure_books, measure_checkpoints
from benchmarks.reading import measure_reading
from benchmarks.startup import measure_startup
from benchmarks.table import ordeals_table, rows_table, verdicts_table
from benchmarks.trainer_overhead import compare_trainer
from benchmarks.variants import TENSORFLOW_OPTIONS
from benchmarks.watched import measure_watching
from shoal.observe.wording import memory

STARTUP_PROCESSES = (2, 4)


@dataclass
class Session:
    """What has been measured so far."""

    console: Console
    rows: dict[str, list[SpeedRow]] = field(default_factory=dict)
    """By comparison: only rows of one were measured side by side."""
    verdicts: list[BarVerdict | BarFinding | BarClaim] = field(default_factory=list)
    ordeals: list[Ordeal] = field(default_factory=list)
    footprint: Footprint | None = None

    def measure_training(self, model: str, rounds: int, steps: int | None) -> None:
        names = ["ddp", "ddp_tuned", "data"]
        if model == "mlp":
            names += ["single", "data_without_journal"]
        rows = compare(model, names, rounds=rounds, steps=steps, on_measured=self._tell)
        self._keep("Speed", rows, judge(rows))

    def measure_servers(self, rounds: int, steps: int | None) -> None:
        names = ["ddp", *self._tensorflow_variants(), "ps_asp", "ps_asp_2", "ps_bsp"]
        rows = compare("mlp", names, rounds=rounds, steps=steps, on_measured=self._tell)
        self._keep("Parameter servers", rows, judge(rows))

    def measure_stragglers(self, rounds: int, steps: int | None) -> None:
        rows, verdicts = compare_stragglers(rounds=rounds, steps=steps, on_measured=self._tell)
        self._keep("With a slow worker", rows, verdicts)

    def _keep(self, comparison: str, rows: list[SpeedRow], verdicts: Sequence[BarVerdict | BarFinding]) -> None:
        self.rows.setdefault(comparison, []).extend(rows)
        self.verdicts += verdicts

    def _tensorflow_variants(self) -> list[str]:
        """TensorFlow's rows where it is installed, else one line that says how to get them."""
        if TENSORFLOW.python() is not None:
            return list(TENSORFLOW_OPTIONS)
        self.console.print(f"TensorFlow's parameter server is left out: {TENSORFLOW.hint}.", style="dim")
        return []

    def measure_trainer(self, model: str, rounds: int, steps: int | None) -> None:
        if model == "conv":
            return
        rows, verdicts = compare_trainer(model, rounds=rounds, steps=steps, on_measured=self._tell)
        self._keep("Speed", rows, verdicts)

    def measure_memory(self) -> None:
        self.footprint = found = measure_memory()
        self.verdicts.append(found.finding())
        self.console.print(
            f"mlp memory of 4 workers: {memory(found.arena)} shared, {memory(found.total)} in all; "
            f"private copies would take {memory(found.private_copies)}",
            style="dim",
        )

    def measure_bandwidth(self, rounds: int) -> None:
        self.verdicts += measure_bandwidth(rounds, self._tell_bandwidth)

    def measure_checkpoints(self, rounds: int) -> None:
        self.verdicts += measure_checkpoints(rounds, on_measured=self._tell_speed)
        self.verdicts.append(measure_books(rounds, on_measured=self._tell_speed))

    def measure_reading(self, rounds: int) -> None:
        self.verdicts += measure_reading(rounds, on_measured=self._tell_speed)

    def measure_watching(self, rounds: int) -> None:
        self.verdicts.append(measure_watching(rounds, on_measured=self._tell_speed))

    def measure_chaos(self, seconds: float, every_s: float, runs: Sequence[str]) -> None:
        ordeals, verdicts = compare_under_faults(
            seconds, every_s=every_s, runs=runs, on_measured=self._tell_ordeal
        )
        self.ordeals += ordeals
        self.verdicts += verdicts

    def measure_startup(self, rounds: int) -> None:
        for processes in STARTUP_PROCESSES:
            self.verdicts.append(measure_startup(processes, rounds, self._tell_start))

    def show(self) -> None:
        for comparison, rows in self.rows.items():
            self.console.print(rows_table(rows, title=comparison))
        if self.ordeals:
            self.console.print(ordeals_table(self.ordeals))
        self.console.print(verdicts_table(self.verdicts))

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": {comparison: [asdict(row) for row in rows] for comparison, rows in self.rows.items()},
            "verdicts": [{**asdict(verdict), "met": verdict.met} for verdict in self.verdicts],
            "chaos": [asdict(ordeal) for ordeal in self.ordeals],
            "memory": None if self.footprint is None else asdict(self.footprint),
        }

    def _tell(self, run: Measurement) -> None:
        self.console.print(
            f"{run.model:<7} {run.variant:<21} {run.step_s * 1e3:>9.2f} ms  {run.samples_per_s:>9,.0f} samples/s",
            style="dim",
        )

    def _tell_ordeal(self, ordeal: Ordeal) -> None:
        self.console.print(
            f"{ordeal.name:<31}{sum(ordeal.faults.values()):>3} faults  {ordeal.kept:>6.1%} kept, "
            f"{ordeal.kept_by_timeline:.1%} by its timeline  "
            f"next step {ordeal.to_next_step_s:>5.2f} s",
            style="dim",
        )

    def _tell_speed(self, name: str, samples_per_s: float) -> None:
        self.console.print(f"{name:<40} {samples_per_s:>9,.0f} samples/s in all", style="dim")

    def _tell_bandwidth(self, name: str, bytes_per_s: float) -> None:
        self.console.print(f"bandwidth: {name:<25} {bytes_per_s / 1e9:>6.2f} GB/s", style="dim")

    def _tell_start(self, name: str, seconds: float) -> None:
        self.console.print(f"first step: {name:<20} {seconds:>7.2f} s", style="dim")
