"""A strategy that cuts the model beside one process: the two comparisons, and whether everything moved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cut_tasks
import torch

from helpers.training import Train, Trained
from shoal.spec import ModelParallel, as_mesh, parse_strategy
from shoal.verify.bounds import FLOAT64_BOUND, first_step_bound
from shoal.verify.difference import Difference, difference, same_bits

TASKS = Path(__file__).with_name("cut_tasks.py")
OPTIMIZER_CLASSES = {"momentum": "SGD", "adamw": "AdamW"}


class References:
    """Runs of one process, each made once for all that are compared with it."""

    def __init__(self, train: Train) -> None:
        self.train = train
        self._made: dict[tuple[Any, ...], Trained] = {}

    def whole_batch(self, factory: str, args: Mapping[str, Any]) -> Trained:
        """All steps in float64, the whole batch at once."""
        return self._make(factory, args, {"strategy": "data", "numerics": "float64"}, {})

    def same_cut(self, factory: str, args: Mapping[str, Any], slots: int, pieces: int) -> Trained:
        """The first step in float32, with so many slots, each cut into so many pieces."""
        return self._make(factory, args, {"slots": slots}, {"max_steps": 1, "accumulate": pieces})

    def start(self, factory: str, args: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The model in float64 before its first step, as every process makes it."""
        task = getattr(cut_tasks, factory)(**args)
        torch.manual_seed(task.seed)
        return dict(task.model().double().state_dict())

    def _make(
        self, factory: str, args: Mapping[str, Any], how: dict[str, Any], overrides: dict[str, Any]
    ) -> Trained:
        key = (factory, *args.items(), *how.items(), *overrides.items())
        if key not in self._made:
            self._made[key] = self.train(factory, overrides=overrides, **how, **args)
        return self._made[key]


def check(references: References, factory: str, strategy: str, workers: int, **args: Any) -> None:
    """Float64 against the whole batch, the first step in float32 against the same cut; every parameter moved."""
    spec = parse_strategy(strategy)
    assert isinstance(spec, ModelParallel)
    mesh, train = as_mesh(spec, workers), references.train
    whole = references.whole_batch(factory, args)
    cut = train(factory, workers=workers, strategy=strategy, numerics="float64", **args)
    assert cut.results["steps"] == whole.results["steps"]
    assert cut.results["audit"]["clean"]
    for what, found in _compare(cut, whole).items():
        assert found.relative <= FLOAT64_BOUND, (what, found)
    assert abs(cut.results["results"]["loss"] / whole.results["results"]["loss"] - 1) < FLOAT64_BOUND
    _check_moved(cut.model, references.start(factory, args), {name.split("/")[0] for name in whole.state})

    first = train(factory, workers=workers, strategy=strategy, overrides={"max_steps": 1}, **args)
    synchronised = mesh.batchnorm == "sync"
    slots = 1 if synchronised else mesh.lanes
    same = references.same_cut(factory, args, slots, mesh.num_microbatches)
    for what, found in _compare(first, same).items():
        bound = first_step_bound(what, OPTIMIZER_CLASSES[args["optimizer"]], synchronised=synchronised)
        assert found.relative <= bound, (what, found)


def _compare(ours: Trained, reference: Trained) -> dict[str, Difference]:
    return {
        "parameters": difference(ours.model, reference.model),
        "optimizer state": difference(ours.state, reference.state, lambda name: name.rpartition("/")[2]),
    }


def _check_moved(model: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor], trained: set[str]) -> None:
    still = [name for name in trained if same_bits(model[name], start[name])]
    assert trained and not still
