"""Workers that share the state of training train as one process does with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.training import Train, Trained, largest_difference
from shoal.errors import WorkerFailed
from shoal.launch.owner import ZygoteProcess
from shoal.spec import Cluster

WHOLE_BATCH = 1e-9
"""The bound in float64 against one process."""
ONE = {"strategy": "data:via=arena", "numerics": "float64"}


each_way = pytest.mark.parametrize("via", ["memory", "backend"])
"""In shared memory nothing is gathered; through torch's collectives units are gathered and let go."""


def beyond_rounding(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without what is zero but for rounding: the gradient of a bias that BatchNorm takes away again."""
    return {name: tensor for name, tensor in state.items() if float(tensor.abs().max()) > 1e-14}


def compare(train: Train, task: str, strategy: str, *, workers: int = 2, slots: int = 1, **args: Any) -> Trained:
    """Both in float64, without dropout: nothing is left but the order of sums."""
    ours = train(task, workers=workers, strategy=strategy, numerics="float64", **args)
    alone = train(task, slots=slots, **ONE, **args)
    assert largest_difference(ours.model, alone.model) <= WHOLE_BATCH
    meant = beyond_rounding(alone.state)
    assert ours.state.keys() == alone.state.keys()
    assert largest_difference({name: ours.state[name] for name in meant}, meant) <= WHOLE_BATCH
    assert ours.losses() == pytest.approx(alone.losses(), rel=WHOLE_BATCH)
    assert ours.results["results"] == pytest.approx(alone.results["results"], rel=WHOLE_BATCH)
    return ours


@pytest.mark.parametrize(
    ("task", "strategy", "args"),
    [
        ("mlp_quiet", "sharded:stage=1,policy=count", {"optimizer": "momentum", "clip": 0.1}),
        ("gpt_quiet", "sharded:stage=2,policy=layer", {"optimizer": "adamw"}),
        ("conv", "sharded:stage=3,batchnorm=sync", {"optimizer": "momentum"}),
        ("mlp_quiet", "sharded:stage=3,policy=device,capacities=2+1", {"optimizer": "adamw", "clip": 0.1}),
        ("mlp_quiet", "sharded:stage=3,policy=layer", {"optimizer": "muon_like", "clip": 0.1}),
        ("mlp_quiet", "sharded:stage=1,policy=count", {"optimizer": "recalling"}),
    ],
)
def test_as_one_process(train: Train, task: str, strategy: str, args: dict[str, object]) -> None:
    compare(train, task, strategy, steps=4, **args)


def test_an_optimizer_of_whole_parameters_is_saved_with_them(train: Train) -> None:
    """Its state goes by the parameters' names, so that one process goes on from it, and workers from that."""
    words: dict[str, Any] = {"numerics": "float64", "optimizer": "muon_like", "steps": 6}
    begun = train(
        "mlp_quiet",
        workers=2,
        strategy="sharded:policy=layer",
        checkpoint="every=1000",
        overrides={"max_steps": 2},
        **words,
    )
    alone = train.resume(begun, 2, strategy="data", cluster=Cluster(threads=1), overrides={"max_steps": 4})
    back = train.resume(
        alone,
        4,
        strategy="sharded:stage=1,policy=count",
        cluster=Cluster(workers=2, threads=1),
        overrides={"max_steps": 6},
    )
    unbroken = train("mlp_quiet", slots=1, strategy="data:via=arena", **words)
    assert back.results["steps"] == 6
    assert largest_difference(back.model, unbroken.model) <= WHOLE_BATCH
    assert largest_difference(back.state, unbroken.state) <= WHOLE_BATCH


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("sharded", "Adafactor works on whole parameters, but several workers keep parts of .*; use policy=layer"),
        ("tensor", "Adafactor works on whole parameters, but .* is cut by its width"),
    ],
)
def test_an_optimizer_of_whole_parameters_needs_them_whole(train: Train, strategy: str, words: str) -> None:
    with pytest.raises(WorkerFailed, match=words):
        train("mlp_quiet", workers=2, strategy=strategy, optimizer="muon_like", steps=1)


@pytest.fixture
def train_choosy(tmp_path: Path, zygote: ZygoteProcess) -> Train:
    return Train(Path(__file__).with_name("sharded_tasks.py"), tmp_path, zygote)


@each_way
def test_workers_may_use_blocks_in_different_orders(train_choosy: Train, via: str) -> None:
    """Evaluation between the steps included; and a small last batch leaves the first worker another branch."""
    ours = compare(train_choosy, "choosy", f"sharded:stage=3,via={via}", slots=2)
    assert len(ours.told("evaluation")) >= 3


def test_resumed_as_data_and_back(train: Train) -> None:
    """One model goes on in other ways, and ends where one process ends."""
    steps = [{"max_steps": count} for count in (2, 4, 6)]
    saves: dict[str, Any] = {"numerics": "float64", "optimizer": "adamw", "checkpoint": "every=1000"}
    begun = train("gpt_quiet", workers=2, strategy="sharded:stage=3", overrides=steps[0], **saves)
    as_data = train.resume(
        begun, 2, strategy="data:via=arena", cluster=Cluster(workers=2, threads=1), overrides=steps[1]
    )
    back = train.resume(
        as_data, 4, strategy="sharded:stage=2", cluster=Cluster(workers=2, threads=1), overrides=steps[2]
    )
    alone = train("gpt_quiet", slots=1, optimizer="adamw", overrides=steps[2], **ONE)
    assert back.results["steps"] == 6
    assert largest_difference(back.model, alone.model) <= WHOLE_BATCH
    assert largest_difference(back.state, alone.state) <= WHOLE_BATCH


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("task", ["mlp_quiet", "gpt_quiet", "conv"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage(train: Train, stage: int, task: str, optimizer: str, workers: int) -> None:
    strategy = f"sharded:stage={stage}" + ",batchnorm=sync" * (task == "conv")
    compare(train, task, strategy, workers=workers, optimizer=optimizer, steps=20)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["size", "count", "layer", "device,capacities=3+1+0+2"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_policy(train: Train, stage: int, policy: str) -> None:
    strategy = f"sharded:stage={stage},policy={policy}"
    compare(train, "mlp_quiet", strategy, workers=4, optimizer="adamw", clip=0.1, steps=8)


@pytest.mark.long
@each_way
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_with_different_orders(
    train_choosy: Train, stage: int, workers: int, accumulate: int, via: str
) -> None:
    strategy = f"sharded:stage={stage},via={via}"
    compare(train_choosy, "choosy", strategy, workers=workers, slots=workers, accumulate=accumulate, steps=12)


@pytest.mark.long
@each_way
@pytest.mark.parametrize("task", ["awkward", "branching", "padded"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_awkward_models(train: Train, stage: int, task: str, via: str) -> None:
    """Frozen layers, layers that some samples use, several dtypes, means over tokens."""
    compare(train, task, f"sharded:stage={stage},via={via}", workers=4, slots=4)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=2,shard=2", "shard=2,data=2,stage=2", "data=2,shard=2,stage=1"])
def test_copies_of_what_is_shared(train: Train, mesh: str) -> None:
    compare(train, "gpt_quiet", f"mesh:{mesh}", workers=4, optimizer="adamw", steps=8)
