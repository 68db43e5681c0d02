"""What to adjust, as pure functions of measurements. Each changes its mind only for a clear reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

SMOOTHING = 0.3
"""Weight of the newest measurement in a smoothed one."""
SHARE_CHANGE = 0.15
"""Shares stay as they are while every one is within this part of what it should be."""
LEAST_SHARE = 0.1
WAITING_DOMINATES = 0.3
"""A bound is raised where workers wait for more than this part of their time."""
LOSS_MOVES = 0.02
"""A loss that moved by less than this part has neither risen nor fallen."""
RATE_CHANGE = 0.2
DIVERGED = 4.0
"""A smoothed loss above so many times the best is not learning any more."""
HOPELESS = 1 / 20
"""A worker below this part of the median speed is better replaced."""


def smoothed(before: float | None, measured: float) -> float:
    """The running value after one more measurement."""
    return measured if before is None else before + SMOOTHING * (measured - before)


def shares_by_speed(speeds: Mapping[int, float], current: Mapping[int, float]) -> dict[int, float] | None:
    """Each rank's share of the data in proportion to its speed, 1 being an equal one; None to leave them alone."""
    if len(speeds) < 2 or any(speed <= 0 or not math.isfinite(speed) for speed in speeds.values()):
        return None
    mean = sum(speeds.values()) / len(speeds)
    raised = {rank: max(LEAST_SHARE, speed / mean) for rank, speed in speeds.items()}
    total = sum(raised.values())
    shares = {rank: share * len(speeds) / total for rank, share in raised.items()}
    now = {rank: current.get(rank, 1.0) for rank in shares}
    if current.keys() <= shares.keys() and all(
        abs(shares[rank] - now[rank]) <= SHARE_CHANGE * now[rank] for rank in shares
    ):
        return None
    return shares


def next_bound(bound: int, start: int, *, waiting: float, loss: float, loss_before: float) -> int:
    """The staleness bound: one more where waiting dominates and the loss falls, one less where the loss rises.

    It stays between 1 and four times what the run started with.
    """
    change = (loss - loss_before) / abs(loss_before) if loss_before else 0.0
    if change > LOSS_MOVES:
        return max(1, bound - 1)
    if waiting > WAITING_DOMINATES and change < -LOSS_MOVES:
        return min(4 * start, bound + 1)
    return bound


def rate_by_delay(mean_delay: float, workers: int, current: float) -> float:
    """The factor of the learning rate for gradients that are late by so many updates; near `current` it stays.

    With n workers a delay of n - 1 is what asynchrony costs anyway; the factor is 1/2 where it is n.
    """
    wanted = 1.0 / (1.0 + mean_delay / max(1, workers))
    return wanted if abs(wanted - current) > RATE_CHANGE * current else current


def is_diverging(loss: float, *, first: float, best: float) -> bool:
    """Whether a smoothed loss has left the ground: no number, or far above the best.

    Noise around a loss that is nearly zero is no divergence, so it must also be above half of the first.
    """
    if not math.isfinite(loss):
        return True
    return best > 0 and loss > max(DIVERGED * best, first / 2)


def has_diverged(loss: float, *, first: float) -> bool:
    """Whether a run that is over has learnt nothing: its loss ended above where it began by more than that was.

    A loss may be negative: what has fallen below it has not risen.
    """
    return not math.isfinite(loss) or loss - first > abs(first)


def hopeless(speeds: Mapping[int, float]) -> set[int]:
    """The ranks that are so slow that waiting for them is pointless."""
    if len(speeds) < 2:
        return set()
    least = HOPELESS * median(speeds.values())
    return {rank for rank, speed in speeds.items() if speed < least}
