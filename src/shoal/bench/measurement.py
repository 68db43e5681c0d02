"""What one measured run reports: one line of JSON on its standard output."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from shoal.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of one variant, in fresh processes."""

    variant: str
    model: str
    processes: int
    step_s: float
    """The median time of a step."""
    spread: float
    """How much steps differ: the middle half's width over the median."""
    samples_per_s: float
    """Samples of all processes together."""
    loss: float
    """The last step's loss, to see that variants train the same model."""

    def to_json(self) -> str:
        """This measurement as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_output(cls, output: str) -> Measurement:
        """The measurement in the last line that a run printed."""
        lines = output.strip().splitlines()
        try:
            return cls(**json.loads(lines[-1]))
        except (IndexError, TypeError, json.JSONDecodeError):
            found = lines[-1] if lines else "nothing"
            raise LaunchError(f"bench: a run should end with one line of JSON, found {found!r}.") from None


def summarise(
    *,
    variant: str,
    model: str,
    processes: int,
    batch_per_process: int,
    step_times_s: Sequence[float],
    loss: float,
) -> Measurement:
    """The measurement of a run whose measured steps took these times."""
    step_s = statistics.median(step_times_s)
    lower, _, upper = (
        statistics.quantiles(step_times_s, n=4, method="inclusive") if len(step_times_s) > 1 else [step_s] * 3
    )
    return Measurement(
        variant=variant,
        model=model,
        processes=processes,
        step_s=step_s,
        spread=(upper - lower) / step_s,
        samples_per_s=batch_per_process * processes / step_s,
        loss=loss,
    )
