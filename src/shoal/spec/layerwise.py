"""The strategy that treats a model by its layers: who runs which, who trains alone, who trains when."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Self

from shoal.errors import SpecError
from shoal.spec.checks import require_choice, require_count
from shoal.spec.cluster import Cluster
from shoal.spec.conduct import Claim, Conduct, even_fills
from shoal.spec.cut_footprint import layered_footprint
from shoal.spec.data import Data
from shoal.spec.footprint import Footprint
from shoal.spec.model_parallel import NOBODY_ELSE
from shoal.spec.model_size import CutSize, ModelSize, RunSize
from shoal.spec.strategy import Only, StrategySpec
from shoal.spec.whole_footprint import summed_over_sockets

if TYPE_CHECKING:
    from shoal.spec.job import Job

_PLACE = r"[\w.]+@\d+"
_NUMBER = r"\d+(\.\d+)?"


class LayerForm(Enum):
    """What is done with the layers."""

    PLACED = "placed"
    """Each worker runs some of them; branches run at the same time."""
    DECOUPLED = "decoupled"
    """Each worker trains a group of them by a loss of its own, on what the group before it sends."""
    PHASED = "phased"
    """Groups of them take turns in training; the batch is shared by the workers."""


@dataclass(frozen=True, kw_only=True)
class Layer(StrategySpec):
    """By layers: named ones on named workers, groups with heads of their own, or groups that take turns."""

    name: ClassVar[str] = "layer"
    made_by: ClassVar[str] = "shoal.strategies.layer:make"
    cut_by: ClassVar[str] = "shoal.strategies.layer.sizes:cut_size"
    tried_by: ClassVar[str] = "shoal.strategies.layer.trying:try_cut"
    only: ClassVar[Mapping[str, Only]] = {
        "every": Only(lambda layer: layer.phases > 0, "where layers take turns (phases=N)"),
        "weights": Only(lambda layer: layer.decoupled, "with decoupled=on"),
        "via": Only(lambda layer: layer.cuts_model, "where the model is cut (not with phases=N)"),
    }
    VIA: ClassVar[tuple[str, ...]] = ("auto", "memory", "sockets")

    place: str = "auto"
    """Which worker runs which submodule: `left@0+right@1+head@0`; `auto`: branches go to different workers."""
    decoupled: bool = False
    """`on`: the model is cut by depth, and each worker trains its group with a head of its own, at once."""
    weights: str = "even"
    """With decoupled=on: what each group's loss counts, as in `0.3+0.3+1`; `even`: 1 each."""
    phases: int = 0
    """So many groups of layers take turns: one trains, the others are frozen; 0: all train always."""
    every: int = 50
    """With phases: steps of one phase."""
    via: str = "auto"
    """How values go from worker to worker: through shared memory (`memory`, the default) or our own `sockets`."""

    def __post_init__(self) -> None:
        require_choice(self.name, "via", self.via, self.VIA)
        require_count(self.name, "phases", self.phases, least=0)
        require_count(self.name, "every", self.every)
        if self.place != "auto" and not re.fullmatch(rf"{_PLACE}(\+{_PLACE})*", self.place):
            raise SpecError(f"layer: place must be auto or like left@0+right@1+head@0, found {self.place!r}.")
        if self.weights != "even" and not re.fullmatch(rf"{_NUMBER}(\+{_NUMBER})*", self.weights):
            raise SpecError(
                f"layer: weights must be 'even' or a number per group as in 0.3+1, found {self.weights!r}."
            )
        if self.phases == 1:
            raise SpecError("layer: phases=1 has no turns to take; use 2 or more, or strategy data.")
        forms = {"place": self.place != "auto", "decoupled": self.decoupled, "phases": self.phases > 0}
        if len(asked := [key for key, is_set in forms.items() if is_set]) > 1:
            raise SpecError(f"layer: {' and '.join(asked)} are different ways to train; choose one of them.")

    @property
    def form(self) -> LayerForm:
        """Which of the three ways this is."""
        if self.decoupled:
            return LayerForm.DECOUPLED
        return LayerForm.PHASED if self.phases else LayerForm.PLACED

    @property
    def cuts_model(self) -> bool:
        """Whether each worker holds a part of the model, and all work on the same batch."""
        return self.form is not LayerForm.PHASED

    @property
    def homes(self) -> Mapping[str, int]:
        """By name of a submodule: the worker that the user wants it on."""
        if self.place == "auto":
            return {}
        pairs = (item.split("@") for item in self.place.split("+"))
        return {module: int(worker) for module, worker in pairs}

    def conduct(self, cluster: Cluster, slots: int | None = None) -> Conduct:
        workers = cluster.places
        if not self.cuts_model:
            return Conduct(
                fills=even_fills(slots or workers, workers),
                has_phases=True,
                has_whole_passes=False,
                spans_hosts=cluster.device == "cpu",
                meets=True,
                why={"has_places": f"strategy={self} sums gradients over sockets and cannot replace workers"},
            )
        return Conduct(
            fills=(range(1),) * workers,
            slots_are_free=False,
            is_cut=True,
            has_whole_passes=False,
            gathers=True,
            spans_hosts=self.via != "memory" and cluster.device == "cpu",
            can_skip=False,
            calls_model=False,
            has_one_loss=not self.decoupled,
            draws_otherwise=True,
            puts_aside="head" if self.decoupled else "",
            why={
                "has_places": f"with strategy={self} {NOBODY_ELSE}",
                "slots": f"strategy={self} cuts every batch into 1",
                "can_skip": f"with strategy={self} one worker alone knows the loss in time; use data",
            },
        )

    def claim(self, workers: int, optimizer: str = "SGD") -> Claim:
        return Claim.RESULT if self.decoupled else Claim.SUMS

    def check(self, job: Job) -> None:
        self.check_workers(job.cluster.places)

    def footprint(self, model: ModelSize, run: RunSize, cut: CutSize | None = None) -> Footprint:
        if not self.cuts_model:
            return summed_over_sockets(model, run, "ring")
        return layered_footprint(model, run, cut or CutSize(), returns=not self.decoupled)

    def for_trial(self, steps: int) -> Self:
        """With a phase for each group of layers where these take turns."""
        return replace(self, every=min(self.every, max(1, steps // self.phases))) if self.phases else self

    def for_inference(self) -> StrategySpec:
        """Layers take turns in training alone; all workers have the whole model."""
        return self if self.cuts_model else Data()

    def loss_weights(self, workers: int) -> tuple[float, ...]:
        """What the loss of each worker's group counts."""
        if self.weights == "even":
            return (1.0,) * workers
        return tuple(float(weight) for weight in self.weights.split("+"))

    def check_workers(self, workers: int) -> None:
        """What is written must fit so many workers."""
        if far := [f"{module}@{worker}" for module, worker in self.homes.items() if worker >= workers]:
            raise SpecError(
                f"layer: place has {', '.join(far)}, but the workers are 0 to {workers - 1}; use one of them, or "
                "more workers."
            )
        if len(self.loss_weights(workers)) != workers:
            raise SpecError(
                f"layer: weights={self.weights} are for {len(self.loss_weights(workers))} groups, but each of the "
                f"{workers} workers has one; write {workers} numbers."
            )
