"""One made-up run that every reader of events is shown."""

import math

import pytest

from shoal.observe import Event

TOTAL_STEPS = 200
BATCH = 64


@pytest.fixture
def run_events() -> list[Event]:
    """200 steps at 100 a second on 3 workers; worker 2 dies at step 120 and a spare takes its place."""
    events = [Event.of("world", values={"workers": 3, "spares": 1, "slots": 3, "strategy": "data", "threads": 1})]
    events += [Event.of("state", rank, {"state": "training", "step": 0}) for rank in range(3)]
    for step in range(1, TOTAL_STEPS + 1):
        loss = 2 * math.exp(-step / 40) * (1 + 0.2 * math.sin(step))
        values = {"steps": [[step, loss]], "samples": BATCH * step, "lr": 0.1, "total_steps": TOTAL_STEPS}
        events.append(Event.of("steps", 0, {**values, "epoch": 1 + (step - 1) // 50}))
        if step % 50 == 0:
            results = {"loss": 2 * math.exp(-step / 38), "accuracy": 1 - math.exp(-step / 50)}
            events.append(Event.of("evaluation", values={"step": step, "results": results}))
            events += [
                Event.of("beat", rank, {"step": step, "rss": (300 + rank) * 1_000_000}) for rank in range(3)
            ]
        if step == 120:
            events.append(Event.of("lost", values={"rank": 2, "reason": "killed by signal 9"}))
            events.append(Event.of("replaced", values={"rank": 2, "spare": 0, "seconds": 0.125}))
    events.append(
        Event.of("saved", 0, {"path": "/runs/mine/model.safetensors", "digest": "xxh3:0123456789abcdef"})
    )
    ending = {"results": {"loss": 0.0104, "accuracy": 0.9817}, "seconds": 2.5, "samples_per_s": 6400.0}
    events.append(Event.of("finished", values=ending))
    return [Event(event.what, event.rank, 1_700_000_000 + 0.01 * at) for at, event in enumerate(events)]
