"""A footprint as plain data: what it comes to, what of it is used, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shoal.spec import parse_strategy
from shoal.spec.footprint import Flow, Footprint, Medium, MemoryRegion, Stay, told_of
from shoal.spec.model_size import CutSize, ModelSize, PassSize, RunSize

MIB = 1 << 20
MODEL = ModelSize(trained=(10 * MIB,) * 8, buffers=3 * MIB, mirrored=("exp_avg", "exp_avg_sq"))


def region(name: str, num_bytes: int, stay: Stay = Stay.ALWAYS, *, is_used: bool = True) -> MemoryRegion:
    return MemoryRegion(name=name, what=name.partition("/")[0], num_bytes=num_bytes, stay=stay, is_used=is_used)


FOUND = Footprint(
    shared=(region("values/0", 5000), region("values/1", 5000, is_used=False), region("label", 1)),
    worker=(region("own", 100), region("built", 70, Stay.OPENING), region("pass", 30, Stay.TRAINING)),
    workers=3,
    server=(region("copy", 7),),
    servers=2,
    flows=(Flow(what="gradients", medium=Medium.NETWORK, num_bytes=9),),
)


def test_regions_take_whole_pages_and_only_what_is_used_counts() -> None:
    assert FOUND.mapped_bytes == 5 * 4096
    assert FOUND.shared_bytes == 3 * 4096
    assert FOUND.unused_bytes == 2 * 4096


def test_a_worker_needs_its_worst_moment_and_what_all_share() -> None:
    assert FOUND.own_bytes == 170
    assert FOUND.worker_bytes == 3 * 4096 + 170
    assert FOUND.host_bytes == 3 * 4096 + 3 * 170 + 2 * 7


def test_it_can_be_written_and_read() -> None:
    assert Footprint.from_plain(json.loads(json.dumps(FOUND.plain()))) == FOUND


def test_regions_of_one_purpose_are_told_together() -> None:
    values, label = told_of(FOUND.shared)
    assert (values.what, values.num_bytes, values.times, values.unused) == ("values", 5000, 1, 5000)
    assert (label.what, label.total) == ("label", 1)
    (mixed,) = told_of([region("table/a", 1), region("table/b", 2)], times=2)
    assert (mixed.num_bytes, mixed.times, mixed.total) == (3, 2, 6)
    assert told_of([region("nothing", 0)]) == []


@pytest.mark.parametrize(
    ("strategy", "workers", "shared", "own"),
    [
        # Shared: parameters, two values for each, a gradient for each slot; at first each worker builds the model.
        ("data", 2, 80 * (1 + 2 + 2), 80 + 3),
        ("data", 1, 0, 80 * 4 + 3),
        ("data:via=ring", 2, 0, 80 * 4 + 3 + 16),
        ("data:partition=relay", 2, 0, 80 * 4 + 3 + 2 * 10),
        ("ps", 2, 80 * (3 + 4), 80 * 2 + 3),
        ("ps:servers=2,wire=tcp", 2, 0, 80 * 2 + 3 + 160),
        ("sharded:stage=1", 4, 0, 80 + (80 + 10) + 40 + 3),
        ("sharded:stage=2", 4, 0, 80 + (20 + 2 * 10) + 40 + 3),
        ("sharded", 4, 0, 20 + (20 + 2 * 10) + 40 + 3),
        ("pipeline", 4, 0, 80 + 3),
        ("pipeline", 3, 0, 120 + 3),
        ("tensor", 4, 0, 20 + (5 * 10 + 16) + 3),
        ("mesh:data=2,pipeline=2", 4, 0, 160 + 40 + 3),
        ("mesh:shard=2,pipeline=2", 4, 0, 20 + (20 + 2 * 10) + 40 + 3),
        ("layer", 2, 0, 160 + 3),
        ("layer:phases=2", 2, 0, 80 * 4 + 3 + 16),
    ],
)
def test_what_strategies_need(strategy: str, workers: int, shared: int, own: int) -> None:
    run = RunSize(workers=workers, slots=workers if strategy != "data:partition=relay" else 1, is_limited=True)
    found = parse_strategy(strategy).footprint(MODEL, run)
    assert found.shared_bytes / MIB == pytest.approx(shared, abs=0.2)
    assert found.own_bytes / MIB == pytest.approx(own, abs=0.5)


def test_activations_count_where_a_step_is_the_worst_moment() -> None:
    one = PassSize(activations=200 * MIB, with_gradients=230 * MIB, batch=MIB)

    def own(strategy: str, workers: int) -> float:
        run = RunSize(workers=workers, slots=workers, one=one, is_limited=True)
        return parse_strategy(strategy).footprint(MODEL, run).own_bytes / MIB

    assert own("data", 2) == pytest.approx(3 + 201)  # more than the model as it is built
    # Gradients of 80 MiB are among the 230 MiB of a pass whose gradients stay.
    assert own("data", 1) == pytest.approx(80 + 160 + 3 + 230 + 1)
    # The first of two stages has two micro-batches on their way, each in half of the model.
    assert own("pipeline", 2) == pytest.approx(160 + 3 + 200 + 1)


def test_without_a_limit_a_model_that_is_cut_is_built_whole() -> None:
    spec, run = parse_strategy("pipeline"), RunSize(workers=8, slots=1)
    tried = 16 + 10
    assert spec.footprint(MODEL, run).own_bytes == (10 + 80 + tried + 3) * MIB
    assert spec.footprint(MODEL, replace(run, is_limited=True)).own_bytes == (4 * 10 + 3) * MIB


def test_workers_that_talk_through_memory_share_buffers() -> None:
    spec, run = parse_strategy("sharded"), RunSize(workers=2, slots=2, is_limited=True)
    silent, found = (spec.footprint(MODEL, run, CutSize(talk=talk)) for talk in (0, 5 * MIB))
    assert found.worker_bytes == silent.worker_bytes + 5 * MIB
    assert {flow.medium for flow in silent.flows} == {Medium.NETWORK}
    assert {flow.medium for flow in found.flows} == {Medium.MEMORY}


def test_without_a_limit_workers_share_parameters_and_what_they_find_for_them() -> None:
    run, cut = RunSize(workers=2, slots=2), CutSize(talk=5 * MIB, units=(40 * MIB, 30 * MIB, 10 * MIB))
    for stage, found in {1: 80 * MIB, 2: 80 * MIB, 3: 80 * MIB}.items():
        footprint = parse_strategy(f"sharded:stage={stage}").footprint(MODEL, run, cut)
        assert footprint.shared_bytes == (5 + 80) * MIB + 2 * found


def test_how_a_strategy_cuts_the_model_decides() -> None:
    run = RunSize(workers=2, slots=2, is_limited=True)
    uneven = parse_strategy("layer").footprint(MODEL, run, CutSize(parts=(70 * MIB, 10 * MIB)))
    assert uneven.own_bytes == 4 * 70 * MIB + 3 * MIB
    blocks = parse_strategy("sharded").footprint(MODEL, run, CutSize(units=(40 * MIB, 30 * MIB, 10 * MIB)))
    assert blocks.own_bytes == 4 * 40 * MIB + 2 * (40 + 10) * MIB + 3 * MIB


def test_what_has_no_width_is_whole_at_all_workers() -> None:
    run = RunSize(workers=4, slots=1, is_limited=True)
    found = parse_strategy("tensor").footprint(MODEL, run, CutSize(uncut=0.5))
    assert found.own_bytes / MIB == pytest.approx(4 * (40 + 10) + 3, abs=0.1)


def test_it_says_what_is_sent_over_what() -> None:
    def sent(strategy: str, workers: int) -> dict[Medium, int]:
        found = parse_strategy(strategy).footprint(MODEL, RunSize(workers=workers, slots=workers))
        total = dict.fromkeys(Medium, 0)
        for flow in found.flows:
            total[flow.medium] += flow.num_bytes // MIB
        return total

    assert sent("data:via=ring", 4) == {Medium.MEMORY: 0, Medium.NETWORK: 120}  # 2 (n - 1) / n
    assert sent("data", 4) == {Medium.MEMORY: 160, Medium.NETWORK: 0}
    assert sent("ps", 2) == {Medium.MEMORY: 160, Medium.NETWORK: 0}
    assert sent("ps:wire=tcp", 2) == {Medium.MEMORY: 0, Medium.NETWORK: 160}
    assert sent("sharded", 4)[Medium.NETWORK] == 3 * 60


@pytest.mark.parametrize(("is_limited", "gathered"), [(True, 1), (False, 0)])
def test_parameters_that_lie_where_all_find_them_are_not_sent(is_limited: bool, gathered: int) -> None:
    run = RunSize(workers=2, slots=2, is_limited=is_limited)
    flows = parse_strategy("sharded").footprint(MODEL, run, CutSize(talk=MIB)).flows
    assert [flow.what for flow in flows].count("parameters gathered") == gathered
