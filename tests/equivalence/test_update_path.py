"""The pieces of a worker's update path: each stays within its bound of the plain way, and does what it says."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from helpers.observed import ObservedEngine
from helpers.training import Train, Trained, largest_difference
from shoal.errors import Interrupted, WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.observe import Event
from shoal.spec import Cluster, Job

STEPS = 20
GROUPS = {"ring": 1, "router:2": 2}


def applied_pushes(run: Trained) -> int:
    """Pushes that each shard applied, from a run in which every cell counted once."""
    audit = run.results["audit"]
    assert audit["clean"], audit
    (count,) = {row["applied_pushes"] for row in audit["shards"]}
    return count


@pytest.mark.parametrize(
    ("model", "workers", "numerics", "bound"),
    [
        ("mlp", 3, "float64", 1e-9),
        pytest.param("mlp", 3, "task", 2e-4, marks=pytest.mark.long),
        pytest.param("conv", 4, "float64", 1e-9, marks=pytest.mark.long),
        pytest.param("conv", 4, "task", 2e-4, marks=pytest.mark.long),
    ],
)
def test_groups_add_up_what_they_push(train: Train, model: str, workers: int, numerics: str, bound: float) -> None:
    """Another order of summing; float64 shows that nothing else differs."""
    direct = train(model, workers=workers, strategy="ps:servers=2", numerics=numerics)
    assert applied_pushes(direct) == workers * STEPS
    for via, groups in GROUPS.items():
        grouped = train(model, workers=workers, strategy=f"ps:servers=2,via={via}", numerics=numerics)
        assert applied_pushes(grouped) == groups * STEPS
        assert largest_difference(direct.model, grouped.model) < bound
        assert largest_difference(direct.state, grouped.state) < 10 * bound
        assert grouped.results["loss"] == pytest.approx(direct.results["loss"], rel=bound)


@pytest.mark.parametrize("via", ["router:2", pytest.param("ring", marks=pytest.mark.long)])
def test_whoever_leads_pushes_the_same_bits(train: Train, via: str) -> None:
    """Also where some slots have no gradient for a layer, and none has one for another."""
    fixed = train("awkward", workers=4, strategy=f"ps:via={via}")
    rotating = train("awkward", workers=4, strategy=f"ps:via={via},leader=rotate")
    assert rotating.digests() == fixed.digests()
    assert applied_pushes(rotating) == GROUPS[via] * STEPS
    assert "sometimes.weight/momentum_buffer" in fixed.state and "never.weight/momentum_buffer" not in fixed.state


def test_groups_with_many_slots_weights_and_no_shared_memory(train: Train) -> None:
    direct = train("padded", workers=3, slots=5, strategy="ps")
    grouped = train("padded", workers=3, slots=5, strategy="ps:via=router:2,leader=rotate,wire=tcp")
    assert largest_difference(direct.model, grouped.model) < 2e-4
    assert applied_pushes(grouped) == 2 * STEPS


def test_a_group_ends_together_on_a_plateau(train: Train) -> None:
    run = train("soon_enough", workers=3, strategy="ps:via=ring", steps=100)
    assert (run.results["reason"], run.results["steps"]) == ("plateau", 4)


def test_a_group_stops_on_request(train: Train) -> None:
    def interrupt(event: Event) -> None:
        if event.kind == "steps" and event.values["steps"][0][0] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="after the step it was in"):
        train("mlp", workers=3, strategy="ps:via=ring", on_event=interrupt, steps=5000)


class Sniper(ObservedEngine):
    """Kills one worker after the first steps."""

    def __init__(self, zygote: ZygoteProcess, victim: int) -> None:
        super().__init__(zygote)
        self._victim = victim
        self.has_fired = False

    def on_event(self, event: Event) -> None:
        if event.kind == "steps" and not self.has_fired:
            self.has_fired = True
            (victim,) = [one for one in self.running("worker") if one.global_rank == self._victim]
            self.signal(victim, signal.SIGKILL)


def train_and_kill(
    train: Train, zygote: ZygoteProcess, strategy: str, *, victim: int, steps: int
) -> dict[str, Any]:
    sniper = Sniper(zygote, victim)
    job = Job(
        target=f"{train.tasks}:mlp",
        args={"steps": steps},
        strategy=strategy,
        cluster=Cluster(workers=3, threads=1),
        overrides={"evaluate_every": 10_000, "epochs": steps},
        run_dir=str(train.folder),
    )
    try:
        return sniper.run(job, sniper.on_event)
    finally:
        assert sniper.has_fired


@pytest.mark.parametrize(
    ("via", "victim"), [("ring", 0), ("router:2", 2), pytest.param("router:3", 1, marks=pytest.mark.long)]
)
def test_a_death_in_a_group_ends_the_run(train: Train, zygote: ZygoteProcess, via: str, victim: int) -> None:
    """Seen by those who add up with the dead; where it was alone in its group, by whoever takes its place."""
    with pytest.raises(WorkerFailed, match=f"A worker died, and via={via} cannot replace it; use via=direct"):
        train_and_kill(train, zygote, f"ps:via={via}", victim=victim, steps=5000)


def test_whoever_replaces_a_pools_worker_does_nothing_twice(train: Train, zygote: ZygoteProcess) -> None:
    """Its cells come to others in other company, and some of them may have been pushed."""
    strategy = "ps:servers=2,shards=4,sync=asp,pool=threads:2,count:4"
    results = train_and_kill(train, zygote, strategy, victim=1, steps=150)
    assert results["audit"]["clean"], results["audit"]
    assert {row["once"] for row in results["audit"]["shards"]} == {3 * 150}


def test_a_pool_of_one_is_asp(train: Train) -> None:
    """The server divides by 32 what the pool has multiplied by it: no bit is lost."""
    plain = train("conv", strategy="ps:sync=asp")
    pooled = train("conv", strategy="ps:sync=asp,pool=threads:1,count:1")
    assert applied_pushes(pooled) == applied_pushes(plain) == STEPS
    assert pooled.digests() == plain.digests()


@pytest.mark.parametrize(
    ("model", "batch_size", "numerics", "bound"),
    [("padded", 5, "task", 2e-4), pytest.param("even", 8, "float64", 1e-9, marks=pytest.mark.long)],
)
def test_a_pool_of_four_is_a_batch_four_times_as_large(
    train: Train, model: str, batch_size: int, numerics: str, bound: float
) -> None:
    """Four consecutive parts of the epoch, each counted by its weight: samples, or tokens."""
    whole = train(model, strategy="data", numerics=numerics)
    pooled = train(
        model,
        strategy="ps:servers=2,sync=asp,pool=threads:2,count:4",
        numerics=numerics,
        steps=4 * STEPS,
        overrides={"batch_size": batch_size},
    )
    assert applied_pushes(pooled) == STEPS
    assert largest_difference(pooled.model, whole.model) < bound
    assert largest_difference(pooled.state, whole.state) < 10 * bound


@pytest.mark.parametrize(
    ("pool", "is_enough"),
    [
        ("threads:2,ms:1,count:1000", lambda pushes: pushes > 2),
        ("threads:2,ms:60000,count:10", lambda pushes: 8 <= pushes <= 9),
    ],
)
def test_a_round_ends_by_time_or_by_count(train: Train, pool: str, is_enough: Callable[[int], bool]) -> None:
    """80 cells of two workers, trained on in few pushes, each cell in one of them."""
    run = train("conv", workers=2, strategy=f"ps:sync=asp,pool={pool}", steps=40)
    assert is_enough(applied_pushes(run))
