"""The plan of a run, from the sizes of a model."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cli.plan import Plan, make_plan
from shoal.spec import Cluster, Job
from shoal.spec.footprint import told_of
from shoal.spec.host_facts import HostFacts
from shoal.spec.model_size import ModelSize, RunSize

KIB = 1024
FACTS: dict[str, Any] = {
    "parcels": [
        {"name": "0.weight", "kind": "Linear", "numel": 192 * KIB, "itemsize": 4},
        {"name": "0.bias", "kind": "Linear", "numel": 64 * KIB, "itemsize": 4},
    ],
    "state_bytes": 2048 * KIB,
    "fixed_bytes": 10,
    "optimizer": "Adam",
    "by_element": True,
    "cut_bytes": 64,
    "process_bytes": 100 * KIB,
    "num_samples": 640,
    "global_batch": 64,
    "total_steps": 30,
}


MODEL = ModelSize(trained=(768 * KIB, 256 * KIB), buffers=10, mirrored=("exp_avg", "exp_avg_sq"))


def plan(strategy: str, *, slots: int | None = None, facts: dict[str, Any] | None = None, **cluster: int) -> Plan:
    job = Job(target="digits.py", strategy=strategy, cluster=Cluster(**{"workers": 2, **cluster}), slots=slots)
    found = job.spec.footprint(MODEL, RunSize(workers=job.cluster.places, slots=job.num_slots))
    return make_plan(job, {**FACTS, "footprint": found.plain(), "limited": found.plain(), **(facts or {})})


def held(found: Plan, where: str) -> dict[str, tuple[int, int]]:
    """By purpose: how often, and how many bytes."""
    return {one.what: (one.times, one.num_bytes) for one in told_of(getattr(found.footprint, where))}


def test_data_keeps_one_copy_and_a_gradient_for_each_slot() -> None:
    found = plan("data", slots=3)

    shared = held(found, "shared")
    assert shared["parameters and optimizer state"] == (3, 1024 * KIB)
    assert shared["gradients of a slot"] == (3, 1024 * KIB)
    assert held(found, "worker")["the model as it is built"] == (1, 1024 * KIB)
    assert "(1 + 2)" in found.manner.meaning and found.cells == 90
    assert found.placement_table == ""


def test_data_over_sockets_keeps_a_copy_for_each_worker() -> None:
    found = plan("data:via=ring")
    assert found.footprint.shared == () and found.footprint.workers == 2
    own = held(found, "worker")
    assert own["parameters"] == own["gradients"] == (1, 1024 * KIB)
    assert own["optimizer state"] == (1, 2048 * KIB)


def test_who_would_be_on_which_host() -> None:
    cluster = Cluster(workers=3, threads=1, on="ssh:a,b")
    job = Job(target="digits.py", strategy="ps:servers=2", cluster=cluster)
    sizes = job.spec.footprint(MODEL, RunSize(workers=3, slots=3)).plain()
    hosts = [HostFacts(name="a", address="10.0.0.1", cores=1), HostFacts(name="b", address="10.0.0.2", cores=2)]
    found = make_plan(job, {**FACTS, "footprint": sizes, "limited": sizes}, hosts)
    assert found.to_dict()["hosts"] == [
        "a (10.0.0.1, 1 core): worker 0, server 1, the coordinator",
        "b (10.0.0.2, 2 cores): workers 1-2, server 0",
    ]
    assert "on 2 hosts (a, b)" in found.world
    assert "hosts" not in plan("ps").to_dict(), "where this machine is the only one"


def test_servers_keep_a_backup_and_say_who_holds_what() -> None:
    found = plan("ps:servers=2")

    shared = held(found, "shared")
    assert shared["parameters and optimizer state"] == (6, 1024 * KIB)  # with a backup
    assert shared["gradients on their way"] == (4, 1024 * KIB)
    assert held(found, "server") == {"the model as a server builds it": (1, 1024 * KIB + 10)}
    told = found.to_dict()
    assert told["worker_bytes"] == found.footprint.worker_bytes < told["mapped_bytes"] + 4096 * KIB
    assert told["memory_bytes"] == found.footprint.host_bytes + 4 * 100 * KIB
    gradients = [one for one in told["memory"]["shared"] if one["what"] == "gradients on their way"]
    assert [(one["total"], one["unused"]) for one in gradients] == [(4096 * KIB, 8192 * KIB)]
    assert found.placement_table.startswith("server") and "0.weight" in found.placement_table
    assert [server["num_bytes"] for server in told["servers"]] == [512 * KIB, 512 * KIB]


def test_an_optimizer_that_works_on_the_whole_has_one_server() -> None:
    found = plan("ps:servers=2,replicas=0", facts={"by_element": False})
    (server,) = found.to_dict()["servers"]
    assert server["num_bytes"] == 1024 * KIB and not server["cut"]
    assert "1 server holds the model in 1 shard" in found.manner.meaning
    assert "A server that dies ends the run" in found.manner.on_failure


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

    points = [(point.worker, point.lane, dict(point.coordinates)) for point in found.manner.grid]
    assert points == [
        (0, 0, {"data": 0, "tensor": 0}),
        (1, 0, {"data": 0, "tensor": 1}),
        (2, 1, {"data": 1, "tensor": 0}),
        (3, 1, {"data": 1, "tensor": 1}),
    ]
    assert (
        "data=2 x tensor=2" in found.manner.meaning and "2 parts, one for each lane of 2" in found.manner.meaning
    )
    # Half the width of parameters, gradients and state for each; all buffers.
    own = held(found, "worker")
    assert own["parameters of a worker"] == own["gradients of a worker"] == (1, 512 * KIB)
    assert own["optimizer state of a worker"] == (1, 1024 * KIB)
    assert own["buffers and frozen parameters"] == (1, 10)
    assert found.to_dict()["grid"][3] == {"worker": 3, "lane": 1, "coordinates": {"data": 1, "tensor": 1}}


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "state"), [(1, 1024, 1024, 512), (2, 1024, 256, 512), (3, 256, 256, 512)]
)
def test_each_stage_of_sharding_cuts_more(stage: int, parameters: int, gradients: int, state: int) -> None:
    own = held(plan(f"sharded:stage={stage}", workers=4), "worker")

    assert own["parameters of a worker"] == (1, parameters * KIB)
    assert own["gradients of a worker"] == (1, gradients * KIB)
    assert own["optimizer state of a worker"] == (1, state * KIB)
    # What computes needs its parameters and gradients whole for a while.
    assert own.get("blocks whole, while they are used") == (None if stage == 1 else (1, 2 * 768 * KIB))


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
    cut, whole = "parameters of a worker's layers", "parameters"
    assert held(found, "worker")[cut if parts > 1 else whole][1] == (768 if parts > 1 else 1024) * KIB
