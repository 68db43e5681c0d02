"""A checkpoint of any strategy and number of workers is resumed under any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.training import Train, Trained, largest_difference
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster


@dataclass(frozen=True)
class Way:
    """A strategy, with so many workers."""

    workers: int
    strategy: str
    kind: str = "exact"
    """`exact`: as one process with the same slots, bit for bit; `close`: it sums in another order; `timed`: it
    depends on timing."""
    pieces: int = 1
    """A slot's batch is cut into so many."""
    dropout: float = 0.2
    """None where several processes compute one pass, and would draw other numbers than one."""

    @property
    def cluster(self) -> Cluster:
        return Cluster(workers=self.workers, threads=1)


WAYS = {
    "one process": Way(1, "data"),
    "arena of 2": Way(2, "data:via=arena"),
    "asp of 2": Way(2, "ps:servers=2,sync=asp", "timed"),
    "ring of 2": Way(2, "data:via=ring", "close"),
    "bsp of 4": Way(4, "ps:servers=2"),
    "ssp of 2": Way(2, "ps:servers=1,sync=ssp:3", "timed"),
    "bsp of 1": Way(1, "ps:servers=3"),
    "quorum of 4": Way(4, "ps:sync=quorum:3/4", "timed"),
    "arena of 4": Way(4, "data:via=arena"),
    "backend of 2": Way(2, "data:via=backend", "close"),
    "alternate of 2": Way(2, "ps:sync=alternate:2", "timed"),
    "bsp of 2 over tcp": Way(2, "ps:servers=2,wire=tcp"),
    "asp of 4 over tcp": Way(4, "ps:servers=2,sync=asp,wire=tcp", "timed"),
    "arena of 1": Way(1, "data:via=arena"),
    "relay of 2": Way(2, "data:partition=relay", "close"),
}
CUT_WAYS = {
    "sharded of 2": Way(2, "sharded", "close"),
    "pipeline of 2": Way(2, "pipeline:microbatches=3", "close", pieces=3, dropout=0.0),
    "tensor of 2": Way(2, "tensor", "close", dropout=0.0),
    "sharded of 4": Way(4, "sharded:stage=1", "close"),
    "mesh of 4": Way(4, "mesh:data=2,pipeline=2,microbatches=2", "close", pieces=2, dropout=0.0),
}
ALL_WAYS = WAYS | CUT_WAYS
MORE_STEPS = 4
SAVE = "every=1000"
"""Only the last step of each run is saved."""


@pytest.fixture
def train(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("resumed_tasks.py"), tmp_path, zygote)


def begin(train: Train, way: Way) -> Trained:
    steps = {"max_steps": MORE_STEPS + 1}
    return train("everything", workers=way.workers, strategy=way.strategy, checkpoint=SAVE, overrides=steps)


def go_on(train: Train, saved: Trained, name: str) -> Trained:
    """Resume the last checkpoint of a run in another way, and hold the result to what the way promises."""
    way, step = ALL_WAYS[name], saved.results["steps"]
    steps, args = {"max_steps": step + MORE_STEPS, "accumulate": 1}, {"dropout": way.dropout}
    resumed = train.resume(saved, step, strategy=way.strategy, cluster=way.cluster, overrides=steps, args=args)
    assert resumed.results["steps"] == step + MORE_STEPS
    assert resumed.state.keys() == saved.state.keys() and len(resumed.state) == 3 * 5, (
        "AdamW's, of five parameters"
    )
    audit = resumed.results["audit"]
    assert audit["clean"]
    if "cells" in audit:
        slots = resumed.job.num_slots  # where a quorum came before, those since then
        assert MORE_STEPS * slots <= audit["cells"] <= resumed.results["steps"] * slots
    one = {"strategy": "data:via=arena", "cluster": Cluster(workers=1, threads=1)}
    steps["accumulate"] = way.pieces
    alone = train.resume(saved, step, slots=resumed.job.num_slots, overrides=steps, args=args, **one)
    # One process with one slot is the plain torch loop, whose norm for clipping is summed in another order.
    is_plain_loop = way.strategy == "data" and resumed.job.num_slots == 1
    if way.kind == "exact" and not is_plain_loop:
        assert resumed.digests() == alone.digests()
        assert resumed.losses() == alone.losses()
    elif way.kind == "close" or is_plain_loop:
        assert largest_difference(resumed.model, alone.model) < 1e-3
        assert largest_difference(resumed.state, alone.state) < 1e-2
    else:
        assert resumed.results["results"]["loss"] == pytest.approx(alone.results["results"]["loss"], rel=0.5)
    return resumed


def wander(train: Train, names: list[str]) -> None:
    """Each resumes what the one before has left: every way is once resumed from, and once resumed to."""
    run = begin(train, WAYS["one process"])
    for name in [*names, "one process"]:
        run = go_on(train, run, name)


def test_one_model_wanders_through_many_of_them(train: Train) -> None:
    wander(train, ["arena of 2", "asp of 2", "ring of 2", "bsp of 2 over tcp"])


@pytest.mark.long
def test_one_model_wanders_through_all_of_them(train: Train) -> None:
    wander(train, list(WAYS)[1:])


def test_a_model_is_cut_and_put_together_again(train: Train) -> None:
    run = begin(train, WAYS["arena of 2"])
    for name in ("pipeline of 2", "sharded of 2", "arena of 2"):
        run = go_on(train, run, name)


@pytest.mark.long
@pytest.mark.parametrize("source", ALL_WAYS)
def test_all_pairs(train: Train, source: str) -> None:
    saved = begin(train, ALL_WAYS[source])
    for name in ALL_WAYS:
        go_on(train, saved, name)
