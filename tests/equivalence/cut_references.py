"""A strategy beside one process: the two comparisons, half precision apart, and whether everything moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cut_tasks
import torch

from helpers.training import Train, Trained
from shoal.spec import Cluster, Job, Layer, LayerForm, ModelParallel, as_mesh
from shoal.verification.bounds import FLOAT64_BOUND, first_step_bound
from shoal.verification.difference import Difference, difference, same_bits

TASKS = Path(__file__).with_name("cut_tasks.py")
OPTIMIZER_CLASSES = {"momentum": "SGD", "adamw": "AdamW"}
GRADIENTS = ("momentum_buffer", "exp_avg")
"""What the optimizers keep of gradients."""
HALF_LOSS_BOUND = 5e-3
"""The loss after all steps in bf16, relative to that of one process. Measured: at most 4e-4."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """How one process has to train to compute what a strategy computes."""

    strategy: str
    """With the whole batch at once."""
    slots: int
    pieces: int
    """Of each slot."""
    synchronised: bool
    """BatchNorm is that of the whole batch, so that there is one slot."""
    cuts_width: bool
    """Several processes compute one layer."""


def alone(strategy: str, workers: int) -> Alone:
    """The one process that a strategy is compared with."""
    job = Job(target="tasks.py", strategy=strategy, cluster=Cluster(workers=workers))
    spec = job.spec
    has_phases = isinstance(spec, Layer) and spec.form is LayerForm.PHASED
    synchronised = getattr(spec, "batchnorm", "local") == "sync"
    mesh = as_mesh(spec, workers) if isinstance(spec, ModelParallel) else None
    return Alone(
        strategy=strategy if has_phases else "data",
        slots=1 if synchronised else job.num_slots,
        pieces=mesh.num_microbatches if mesh is not None else 1,
        synchronised=synchronised,
        cuts_width=mesh is not None and mesh.tensor > 1,
    )


class References:
    """Runs of one process, each made once for all that are compared with it."""

    def __init__(self, train: Train) -> None:
        self.train = train
        self._made: dict[tuple[Any, ...], Trained] = {}

    def whole_batch(self, factory: str, args: Mapping[str, Any], how: Alone) -> Trained:
        """All steps in float64, the whole batch at once."""
        return self._make(factory, args, {"strategy": how.strategy, "numerics": "float64"}, {})

    def same_cut(
        self, factory: str, args: Mapping[str, Any], how: Alone, *, precision: str = "fp32", steps: int = 1
    ) -> Trained:
        """The first steps, with batches cut as the strategy cuts them."""
        strategy = "data:via=arena" if how.strategy == "data" else how.strategy
        fixed = {"strategy": strategy, "slots": how.slots, "precision": precision}
        return self._make(factory, args, fixed, {"max_steps": steps, "accumulate": how.pieces})

    def start(self, factory: str, args: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The model before its first step, as every process makes it."""
        task = getattr(cut_tasks, factory)(**args)
        torch.manual_seed(task.seed)
        return dict(task.model().state_dict())

    def _make(
        self, factory: str, args: Mapping[str, Any], how: dict[str, Any], overrides: dict[str, Any]
    ) -> Trained:
        key = (factory, *args.items(), *how.items(), *overrides.items())
        if key not in self._made:
            self._made[key] = self.train(factory, overrides=overrides, **how, **args)
        return self._made[key]


def check(references: References, factory: str, strategy: str, workers: int, **args: Any) -> None:
    """Float64 against the whole batch, the first step in float32 against the same cut; every parameter moved."""
    train, how = references.train, alone(strategy, workers)
    whole = references.whole_batch(factory, args, how)
    cut = train(factory, workers=workers, strategy=strategy, numerics="float64", **args)
    assert cut.results["steps"] == whole.results["steps"]
    assert cut.results["audit"]["clean"]
    for what, found in _compare(cut, whole).items():
        assert found.relative <= FLOAT64_BOUND, (what, found)
    assert abs(cut.results["results"]["loss"] / whole.results["results"]["loss"] - 1) < FLOAT64_BOUND
    start = {name: value.double() for name, value in references.start(factory, args).items()}
    _check_moved(cut, start, {name.split("/")[0] for name in whole.state})

    first = train(factory, workers=workers, strategy=strategy, overrides={"max_steps": 1}, **args)
    for what, found in _compare(first, references.same_cut(factory, args, how)).items():
        optimizer = OPTIMIZER_CLASSES[args["optimizer"]]
        bound = first_step_bound(what, optimizer, synchronised=how.synchronised)
        assert found.relative <= bound, (what, found)


def check_half(references: References, factory: str, strategy: str, workers: int, **args: Any) -> Trained:
    """In bf16 against one process in bf16 with the same cut; it is not float32, and every parameter moved."""
    how = alone(strategy, workers)
    fields = {"workers": workers, "strategy": strategy, "precision": "bf16", **args}
    first = references.train(factory, overrides={"max_steps": 1}, **fields)
    for what, found in _compare(first, references.same_cut(factory, args, how, precision="bf16")).items():
        optimizer = OPTIMIZER_CLASSES[args["optimizer"]]
        bound = first_step_bound(what, optimizer, synchronised=how.synchronised, narrowed=how.cuts_width)
        assert found.relative <= bound, (what, found)
    assert not difference(first.model, references.same_cut(factory, args, how).model).bitwise

    ran = references.train(factory, **fields)
    assert ran.results["precision"] == "bf16"
    same = references.same_cut(factory, args, how, precision="bf16", steps=cut_tasks.STEPS)
    assert abs(ran.results["results"]["loss"] / same.results["results"]["loss"] - 1) < HALF_LOSS_BOUND
    trained = {name.split("/")[0] for name in same.state}
    _check_moved(ran, references.start(factory, args), trained)
    assert trained == {
        name.split("/")[0] for name in ran.state if name.endswith(GRADIENTS) and ran.state[name].any()
    }
    return ran


def _compare(ours: Trained, reference: Trained) -> dict[str, Difference]:
    return {
        "parameters": difference(ours.model, reference.model),
        "optimizer state": difference(ours.state, reference.state, lambda name: name.rpartition("/")[2]),
    }


def _check_moved(run: Trained, start: Mapping[str, torch.Tensor], trained: set[str]) -> None:
    still = [name for name in trained if same_bits(run.model[name], start[name])]
    assert trained and not still
