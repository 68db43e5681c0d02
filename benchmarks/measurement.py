"""What one measured run reports: one line of JSON on its standard output."""

from __future__ import annotations

import itertools
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
    """The time of a step of all processes: the median; where they do not go in lockstep, the mean."""
    spread: float
    """How much steps differ: the middle half's width over the median."""
    samples_per_s: float
    """Samples of all processes together."""
    loss: float
    """The last step's loss, to see that variants train the same model."""
    began_at: float = 0.0
    ended_at: float = 0.0
    """When the measured steps did, by the system's clock; 0 where nobody has noted it."""
    steps: int = 0
    """How many they were."""

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


Timeline = Sequence[tuple[float, int]]
"""A time in seconds, and the samples of all processes that were committed by then."""


def summarise(
    *,
    variant: str,
    model: str,
    processes: int,
    batch_per_process: int,
    step_times_s: Sequence[float],
    loss: float,
    ended_at: float = 0.0,
) -> Measurement:
    """The measurement of a run whose measured steps took these times."""
    step_s = statistics.median(step_times_s)
    return Measurement(
        variant=variant,
        model=model,
        processes=processes,
        step_s=step_s,
        spread=_width_of_middle_half(step_times_s) / step_s,
        samples_per_s=batch_per_process * processes / step_s,
        loss=loss,
        began_at=ended_at - sum(step_times_s) if ended_at else 0.0,
        ended_at=ended_at,
        steps=len(step_times_s),
    )


def summarise_timeline(
    timeline: Timeline, *, variant: str, model: str, processes: int, batch: int, window: range, loss: float
) -> Measurement:
    """The measurement of a run whose processes do not go in lockstep: samples of all over the seconds they took.

    `batch` counts the samples of one step of all processes. Only what was committed in the `window`, in samples,
    counts: before it the run warms up, after it some may have run out of work.
    """
    inside = [(when, samples) for when, samples in timeline if window.start <= samples <= window.stop]
    if len(inside) < 2 or inside[0][1] == inside[-1][1]:
        raise LaunchError(
            f"bench: {variant} on {model} left {len(inside)} marks between sample {window.start} and "
            f"{window.stop}, too few to measure; take more steps."
        )
    (begin, first), (end, last) = inside[0], inside[-1]
    step_s = batch * (end - begin) / (last - first)
    steps_s = [
        batch * (after - before) / (more - fewer)
        for (before, fewer), (after, more) in itertools.pairwise(inside)
        if more > fewer
    ]
    return Measurement(
        variant=variant,
        model=model,
        processes=processes,
        step_s=step_s,
        spread=_width_of_middle_half(steps_s) / step_s,
        samples_per_s=batch / step_s,
        loss=loss,
    )


def _width_of_middle_half(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower
