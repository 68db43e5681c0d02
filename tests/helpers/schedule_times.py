"""How long a pipeline's schedule takes on paper, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.layout.schedules import Action, Actions, Kind

Costs = Mapping[Kind, float]
UNIT_COSTS: Costs = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """How a schedule runs where every action takes a known time and sending takes none."""

    duration: float
    busy: tuple[float, ...]
    """By worker: how long it computes."""
    ends: Mapping[Action, float]
    held: tuple[int, ...]
    """By worker: the most micro-batches of which it keeps activations at a time, over its stages."""

    @property
    def bubble(self) -> float:
        """The share of all workers' time in which they wait."""
        return 1 - sum(self.busy) / (self.duration * len(self.busy))


def simulate(schedule: Sequence[Actions], costs: Costs | Callable[[Action], float] = UNIT_COSTS) -> Simulation:
    """Run a schedule on paper; ValueError where its workers would wait for each other for ever."""
    cost = costs if callable(costs) else lambda action: costs[action.kind]
    last = max(action.stage for actions in schedule for action in actions)
    ends: dict[Action, float] = {}
    clocks, positions = [0.0] * len(schedule), [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for worker, actions in enumerate(schedule):
            while positions[worker] < len(actions):
                action = actions[positions[worker]]
                ready = _ready_at(action, last, ends)
                if ready is None:
                    break
                clocks[worker] = ends[action] = max(clocks[worker], ready) + cost(action)
                positions[worker] += 1
                moved = True
    waiting = [
        actions[position] for actions, position in zip(schedule, positions, strict=True) if position < len(actions)
    ]
    if waiting:
        raise ValueError(f"the schedule never ends: {waiting} wait for each other")
    return Simulation(
        duration=max(clocks),
        busy=tuple(sum(map(cost, actions)) for actions in schedule),
        ends=ends,
        held=tuple(map(_most_held, schedule)),
    )


def _ready_at(action: Action, last: int, ends: Mapping[Action, float]) -> float | None:
    """When all that an action needs is there; None: not yet known."""
    stage, microbatch = action.stage, action.microbatch
    forward = Action(Kind.FORWARD, stage, microbatch)
    if action.kind is Kind.FORWARD:
        needed = [Action(Kind.FORWARD, stage - 1, microbatch)] if stage else []
    elif action.kind is Kind.BACKWARD_WEIGHT:
        needed = [Action(Kind.BACKWARD_INPUT, stage, microbatch)]
    else:
        later = [Action(action.kind, stage + 1, microbatch)] if stage < last else []
        needed = [forward, *later]
    if any(one not in ends for one in needed):
        return None
    return max((ends[one] for one in needed), default=0.0)


def _most_held(actions: Actions) -> int:
    held = most = 0
    for action in actions:
        if action.kind is Kind.FORWARD:
            held += 1
            most = max(most, held)
        elif action.kind is not Kind.BACKWARD_INPUT:  # the weights' gradients need them still
            held -= 1
    return most
