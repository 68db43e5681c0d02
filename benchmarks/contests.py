"""Who waits for a slow worker: strategies side by side, with one worker slow all the time or each in turn.

Under a lasting straggler `ssp` is no faster than `bsp`, by its definition: once the others are as far ahead as
they may, they wait. With `shares=speed` the slow one gets less of the data, and they need not. Both are measured
to be seen, not judged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from benchmarks.bars import Bar, BarVerdict, judge
from benchmarks.compare import SpeedRow, compare
from benchmarks.measurement import Measurement
from benchmarks.variants import CommandBuilder, peer_command, shoal_command

MODEL = "small_mlp"


@dataclass(frozen=True, kw_only=True)
class Contest:
    """One kind of straggler, who meets it, and who must win."""

    straggler: str
    label: str
    """What the tables call it."""
    strategies: dict[str, str]
    """Variants of Shoal beside DDP."""
    bars: tuple[Bar, ...]

    @property
    def variants(self) -> dict[str, CommandBuilder]:
        """The command of each."""
        commands: dict[str, CommandBuilder] = {"ddp": functools.partial(peer_command, "ddp")}
        for name, strategy in self.strategies.items():
            commands[name] = functools.partial(shoal_command, name, strategy)
        return {name: functools.partial(_slowed, command, self.straggler) for name, command in commands.items()}

    def judge(self, rows: Iterable[SpeedRow]) -> tuple[list[SpeedRow], list[BarVerdict]]:
        """The rows with the contest's label in place of the model's name, and its verdicts."""
        labelled = [replace(row, model=self.label) for row in rows]
        return labelled, judge(labelled, self.bars)


CONTESTS = (
    Contest(
        straggler="lasting",
        label="lasting 4x",
        strategies={
            "ps_asp": "ps:sync=asp",
            "ps_bsp": "ps:sync=bsp",
            "ps_ssp_3": "ps:sync=ssp:3",
            "ps_ssp_3_speed": "ps:sync=ssp:3,shares=speed",
        },
        bars=(
            Bar("lasting 4x", "ps_asp", "ddp", 1.8),
            Bar("lasting 4x", "ps_ssp_3", "ps_bsp"),
            Bar("lasting 4x", "ps_ssp_3_speed", "ps_ssp_3"),
        ),
    ),
    Contest(
        straggler="alternating",
        label="alternating 4x",
        strategies={"ps_bsp": "ps:sync=bsp", "ps_ssp_3": "ps:sync=ssp:3"},
        bars=(Bar("alternating 4x", "ps_ssp_3", "ps_bsp", 1.3),),
    ),
)


def compare_stragglers(
    *, rounds: int, steps: int | None, on_measured: Callable[[Measurement], None] | None = None
) -> tuple[list[SpeedRow], list[BarVerdict]]:
    """Every contest, one after the other."""
    rows, verdicts = list[SpeedRow](), list[BarVerdict]()
    for contest in CONTESTS:
        variants = contest.variants
        found = compare(
            MODEL, list(variants), rounds=rounds, steps=steps, variants=variants, on_measured=on_measured
        )
        labelled, judged = contest.judge(found)
        rows += labelled
        verdicts += judged
    return rows, verdicts


def _slowed(command: CommandBuilder, straggler: str, model: str, processes: int, steps: int | None) -> list[str]:
    return [*command(model, processes, steps), "--straggler", straggler]
