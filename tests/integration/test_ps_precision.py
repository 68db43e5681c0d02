"""Half precision with a parameter server: in lockstep the bits of `data`, elsewhere a scale for each worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import half_tasks
import pytest

from helpers.training import Train, Trained, largest_difference
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster, Job

TASKS = Path(half_tasks.__file__)
LONG = {"steps": 40}
"""So many that the batch that overflows comes twice."""


class Runs:
    """`runs("faint", "adaptive", "ps")`: two workers each, one run after the other."""

    def __init__(self, folder: Path, zygote: ZygoteProcess) -> None:
        self.train = Train(TASKS, folder, zygote)

    def __call__(self, factory: str, precision: str, strategy: str, *, workers: int = 2, **fields: Any) -> Trained:
        cluster, target = Cluster(workers=workers, threads=1), f"{TASKS}:{factory}"
        return self.train.run(
            Job(target=target, precision=precision, strategy=strategy, cluster=cluster, **fields)
        )


@pytest.fixture
def runs(tmp_path: Path, zygote: ZygoteProcess) -> Runs:
    return Runs(tmp_path, zygote)


def skipped_by(run: Trained) -> list[int]:
    """How many steps each worker says were skipped."""
    return [told["results"]["skipped_steps"] for told in run.told("done")]


def first_loss(run: Trained) -> float:
    """Of the first step that was told of: of one that begins with a push of several, not of step 1."""
    return run.losses()[min(run.losses())]


def last_loss(run: Trained) -> float:
    """Of the best of the last steps: late gradients make it jump."""
    return min(run.losses()[step] for step in sorted(run.losses())[-5:])


def test_only_one_worker_has_the_sample_that_overflows() -> None:
    step = half_tasks.overflowing().train.tensors[1][:, 1].view(-1, half_tasks.BATCH)[half_tasks.OVERFLOWS_AT - 1]
    assert step.view(2, -1).sum(1).tolist() == [0, 1]


def test_bsp_skips_the_step_as_data_does_though_a_worker_dies(runs: Runs) -> None:
    data = runs("overflowing", "fp16", "data:via=arena", args=LONG)
    served = runs("overflowing", "fp16", "ps:servers=2", chaos="kill worker:1 at step 3", args=LONG)
    assert served.told("replaced")
    assert skipped_by(served) == [2, 2]
    for key in ("skipped_steps", "loss_scale"):
        assert served.results[key] == data.results[key]
    assert served.digests() == data.digests()
    assert served.losses()[40] == data.losses()[40]
    assert served.results["audit"]["clean"]


def test_bsp_moves_the_same_layers_to_float32_as_data(runs: Runs) -> None:
    data, served = (runs("faint", "adaptive", strategy) for strategy in ("data:via=arena", "ps:servers=2"))
    assert served.results["float32_layers"] == data.results["float32_layers"] == ["faint"]
    assert served.digests() == data.digests()
    assert [line["text"] for line in served.told("line") if "float32" in line["text"]] == [
        "faint computes in float32: its gradients leave the range of half precision"
    ]


def test_asp_skips_what_one_worker_computed_and_learns(runs: Runs) -> None:
    run = runs("overflowing", "fp16", "ps:sync=asp,servers=2", args=LONG)
    assert run.results["skipped_steps"] == sum(skipped_by(run)) >= 2
    assert run.results["audit"]["clean"]
    assert last_loss(run) < 0.6 * first_loss(run)


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["ps", "ps:servers=2,wire=tcp", "ps:wire=tcp,compress=zstd", "ps:sync=quorum:2/2"]
)
def test_lockstep_is_data_bit_for_bit(runs: Runs, strategy: str) -> None:
    data, served = (runs("overflowing", "fp16", one, args=LONG) for one in ("data:via=arena", strategy))
    assert served.digests() == data.digests()
    assert skipped_by(served) == [2, 2]


@pytest.mark.long
def test_several_slots_of_a_worker_count_one_by_one(runs: Runs) -> None:
    data, served = (runs("overflowing", "fp16", one, slots=4) for one in ("data:via=arena", "ps:servers=2"))
    assert served.digests() == data.digests()
    assert skipped_by(served) == [1, 1]


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    ["servers=host", "servers=host,agree=ring", "via=ring", "via=router:2", "wire=tcp,compress=fp16"],
)
def test_every_lockstep_skips_the_same_step(runs: Runs, strategy: str) -> None:
    data, served = (runs("overflowing", "fp16", one) for one in ("data:via=arena", f"ps:{strategy}"))
    assert skipped_by(served) == [1, 1]
    assert largest_difference(served.model, data.model) < 1e-2
    faint = runs("faint", "adaptive", f"ps:{strategy}")
    assert faint.results["float32_layers"] == ["faint"]


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        "sync=ssp:1",
        "sync=alternate:2",
        "sync=quorum:1/2",
        "sync=asp,pool=threads:2,count:2",
        "sync=asp,servers=host,agree=scatter-sum",
        "sync=asp,wire=tcp,compress=topk:0.1",
        "sync=asp,wire=tcp,overlap=on",
        "sync=ssp:2,shares=speed",
        "push=parameters,every=2",
        "push=parameters,every=2,sync=asp",
    ],
)
def test_every_other_way_skips_and_learns(runs: Runs, strategy: str) -> None:
    run = runs("overflowing", "fp16", f"ps:{strategy}", args=LONG)
    assert run.results["skipped_steps"] == sum(skipped_by(run)) >= 1
    assert run.results["audit"]["clean"]
    assert all(value.isfinite().all() for value in run.model.values())
    assert last_loss(run) < first_loss(run)


@pytest.mark.long
@pytest.mark.parametrize("who", ["worker:0", "worker:1", "server:0"])
@pytest.mark.parametrize("wire", ["memory", "tcp"])
def test_whoever_dies_the_scale_stays(runs: Runs, wire: str, who: str) -> None:
    data = runs("overflowing", "fp16", "data:via=arena", args=LONG)
    for at in (3, 4, 30):
        strategy = f"ps:servers=2,wire={wire}"
        served = runs("overflowing", "fp16", strategy, args=LONG, chaos=f"kill {who} at step {at}")
        assert served.told("replaced")
        assert served.digests() == data.digests()
        assert (served.results["skipped_steps"], served.results["loss_scale"]) == (2, 16384.0)


@pytest.mark.long
@pytest.mark.parametrize("sync", ["asp", "ssp:1", "alternate:1"])
@pytest.mark.parametrize("who", ["worker:1", "server:1"])
def test_the_books_stay_clean_when_somebody_dies(runs: Runs, sync: str, who: str) -> None:
    chaos = f"kill {who} at step 10"
    run = runs("overflowing", "fp16", f"ps:servers=2,sync={sync}", args=LONG, chaos=chaos)
    assert run.told("replaced")
    assert run.results["audit"]["clean"]
    assert run.results["skipped_steps"] >= 1


@pytest.mark.long
@pytest.mark.parametrize(("factory", "precision"), [("overflowing", "fp16"), ("faint", "adaptive")])
def test_a_resumed_run_knows_the_scale(runs: Runs, factory: str, precision: str) -> None:
    whole = runs(factory, precision, "ps:servers=2", checkpoint="every=4")
    resumed = runs.train.resume(whole, 4)
    elsewhere = runs.train.resume(whole, 4, strategy="data:via=arena")
    assert whole.digests() == resumed.digests() == elsewhere.digests()
    for name in ("skipped_steps", "loss_scale"):
        assert resumed.results[name] == whole.results[name]


@pytest.mark.long
def test_a_lone_asynchronous_worker_is_one_process(runs: Runs) -> None:
    alone, served = (
        runs("overflowing", "fp16", strategy, workers=1) for strategy in ("data:via=arena", "ps:sync=asp")
    )
    assert served.digests() == alone.digests()
    assert served.results["skipped_steps"] == 1


@pytest.mark.long
def test_asynchronous_workers_report_the_union_of_their_layers(runs: Runs) -> None:
    run = runs("faint", "adaptive", "ps:sync=asp,servers=2", args={"steps": 12})
    assert run.results["float32_layers"] == ["faint"]
    assert {name for told in run.told("done") for name in told["results"]["float32_layers"]} == {"faint"}
