"""The plan of a run, from the sizes of a model."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cli.plan import Plan, make_plan
from shoal.spec import Cluster, Job

KIB = 1024
FACTS: dict[str, Any] = {
    "parcels": [
        {"name": "0.weight", "kind": "Linear", "numel": 192 * KIB, "itemsize": 4},
        {"name": "0.bias", "kind": "Linear", "numel": 64 * KIB, "itemsize": 4},
    ],
    "state_bytes": 2048 * KIB,
    "fixed_bytes": 10,
    "optimizer": "Adam",
    "num_samples": 640,
    "global_batch": 64,
    "total_steps": 30,
}


def plan(strategy: str, *, slots: int | None = None, **cluster: int) -> Plan:
    job = Job(target="digits.py", strategy=strategy, cluster=Cluster(**{"workers": 2, **cluster}), slots=slots)
    return make_plan(job, FACTS)


def held(found: Plan) -> list[tuple[int, int]]:
    return [(holding.times, holding.num_bytes) for holding in found.manner.memory]


def test_data_keeps_one_copy_and_a_gradient_for_each_slot() -> None:
    found = plan("data", slots=3)

    assert held(found) == [(1, 3072 * KIB), (3, 1024 * KIB), (2, 10)]
    assert "(1 + 2)" in found.manner.meaning and found.cells == 90
    assert found.placement_table == ""


def test_data_over_sockets_keeps_a_copy_for_each_worker() -> None:
    assert held(plan("data:via=ring")) == [(2, 3072 * KIB), (2, 1024 * KIB), (2, 10)]


def test_servers_keep_a_backup_and_say_who_holds_what() -> None:
    found = plan("ps:servers=2")

    assert held(found) == [(2, 3072 * KIB), (4, 1024 * KIB), (4, 1024 * KIB + 10)]
    assert found.memory_bytes == sum(times * num_bytes for times, num_bytes in held(found))
    assert found.placement_table.startswith("server") and "0.weight" in found.placement_table
    servers = found.to_dict()["servers"]
    assert [server["num_bytes"] for server in servers] == [512 * KIB, 512 * KIB]


@pytest.mark.parametrize(
    ("strategy", "pace"),
    [
        ("ps", "waits for all workers"),
        ("ps:sync=asp", "Nobody waits"),
        ("ps:sync=ssp:3", "more than 3 steps ahead"),
        ("ps:sync=alternate:4", "4 steps in which nobody waits"),
        ("ps:sync=quorum:1/2", "the first 1 of 2 pushes"),
    ],
)
def test_who_waits_for_whom(strategy: str, pace: str) -> None:
    assert pace in plan(strategy).manner.meaning


@pytest.mark.parametrize(
    ("strategy", "spares", "words"),
    [
        ("data", 0, "replaced by a fresh process"),
        ("data:via=ring", 0, "ends the run"),
        ("data", 1, "replaced by one of 1 spare"),
        ("ps:servers=2", 0, "followed by its backups"),
        ("ps:servers=2,replicas=0", 0, "goes on with what lies in the host's memory"),
        ("ps:servers=2,replicas=0,wire=tcp", 0, "A server that dies ends the run"),
        ("ps:servers=2,via=ring", 0, "A worker that dies ends the run"),
    ],
)
def test_what_happens_on_failure(strategy: str, spares: int, words: str) -> None:
    assert words in plan(strategy, spares=spares).manner.on_failure


def test_a_grid_says_where_every_worker_stands() -> None:
    found = plan("mesh:data=2,tensor=2", workers=4)

    seats = [(seat.worker, seat.lane, dict(seat.coordinates)) for seat in found.manner.grid]
    assert seats == [
        (0, 0, {"data": 0, "tensor": 0}),
        (1, 0, {"data": 0, "tensor": 1}),
        (2, 1, {"data": 1, "tensor": 0}),
        (3, 1, {"data": 1, "tensor": 1}),
    ]
    assert (
        "data=2 x tensor=2" in found.manner.meaning and "2 parts, one for each lane of 2" in found.manner.meaning
    )
    # Half the width of parameters, gradients and state for each; all buffers.
    assert held(found) == [(4, 512 * KIB), (4, 512 * KIB), (4, 1024 * KIB), (4, 10)]
    assert found.to_dict()["grid"][3] == {"worker": 3, "lane": 1, "coordinates": {"data": 1, "tensor": 1}}


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "state"), [(1, 1024, 1024, 512), (2, 1024, 256, 512), (3, 256, 256, 512)]
)
def test_each_stage_of_sharding_cuts_more(stage: int, parameters: int, gradients: int, state: int) -> None:
    memory = held(plan(f"sharded:stage={stage}", workers=4))

    assert memory[:3] == [(4, parameters * KIB), (4, gradients * KIB), (4, state * KIB)]
    # What computes needs its parameters whole for a while.
    assert (4, 768 * KIB) in memory[3:] or stage < 3


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        ("pipeline:microbatches=2", "33%"),  # (2-1) / (2+1)
        ("pipeline:microbatches=16,schedule=gpipe", "6%"),
        ("pipeline:microbatches=4,schedule=interleaved", "11%"),  # two stages each: (2-1) / (2*4+1)
        ("pipeline:microbatches=4,schedule=zero-bubble", "at most 20%"),
    ],
)
def test_a_pipeline_says_how_long_it_waits(strategy: str, share: str) -> None:
    assert f"nothing to do for {share} of a step" in plan(strategy).manner.meaning


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("pipeline:preprocess=1", "Beside each worker a process reads and prepares the samples"),
        ("mesh:pipeline=2,preprocess=3", "Beside each worker 3 processes read and prepare the samples"),
    ],
)
def test_it_says_who_prepares_samples(strategy: str, words: str) -> None:
    assert words in plan(strategy).manner.meaning
    assert "samples" not in plan("pipeline").manner.meaning


def test_nobody_replaces_a_part_of_the_model() -> None:
    assert "with --checkpoint every=200 it goes on" in plan("tensor").manner.on_failure


@pytest.mark.parametrize(
    ("strategy", "words", "parts"),
    [
        ("layer", "branches go to different workers", 2),
        ("layer:place=left@0+right@1", "as left@0+right@1 says", 2),
        ("layer:decoupled=on", "into 2 groups of layers", 2),
        ("layer:phases=3,every=9", "3 groups of layers take turns of 9 steps", 1),
    ],
)
def test_layers_are_cut_or_take_turns(strategy: str, words: str, parts: int) -> None:
    found = plan(strategy)

    assert words in found.manner.meaning and "--checkpoint" in found.manner.on_failure
    assert held(found)[0] == (2, 1024 * KIB // parts)
