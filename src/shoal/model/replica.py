"""A task's model, optimizer and scheduler, made in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shoal.errors import SpecError, TaskError
from shoal.model.compiled import under_own_names
from shoal.model.convolutions import use_patches
from shoal.model.ensemble import Ensemble, members_of
from shoal.model.fitting_loss import with_fitting_loss
from shoal.model.loss_parts import LossParts
from shoal.model.memory_format import lay_out_channels_last
from shoal.model.normalising import normalises_by_batch
from shoal.model.optimizer.averaging import check_average, with_average
from shoal.model.optimizer.kinds import prefer_fused
from shoal.model.parking.building import Parking
from shoal.model.precision import Precision, layers_of
from shoal.model.products import multiply_by_onednn
from shoal.model.recompute import recompute_blocks
from shoal.model.start import Start
from shoal.spec import Task
from shoal.spec.precision import SCALED
from shoal.spec.step_form import StepForm


class Replica:
    """What one process builds from a task. Its parameters may lie in memory that others share, or in a file."""

    def __init__(
        self,
        task: Task,
        *,
        numerics: str = "task",
        device: str = "cpu",
        sample: Callable[[], Any] | None = None,
        start: Start | None = None,
        parking: Parking | None = None,
        precision: str = "fp32",
        recompute: bool = False,
        form: StepForm | None = None,
    ) -> None:
        self.form = form or StepForm()
        """In which form its passes run."""
        self.compute: Any = None
        """Who runs them, made on first use (`step/compute.py`)."""
        self.is_by_sample = False
        """Whether passes are computed for many samples side by side (`step/private.py`)."""
        self.preparing: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Entered while a pass is compiled or captured, which takes much longer than passes do."""
        self.task = task = with_fitting_loss(task, numerics=numerics, device=device)
        self.start = start or Start()
        self.numerics = numerics
        self.device = device
        self.sample = sample
        """Reads a few samples as a batch, in the host's memory; for whoever must see the whole model at work."""
        torch.manual_seed(task.seed)
        with nullcontext() if parking is None else parking.building():
            self.module = self._make_module(sample)
        if parking is not None:
            parking.park_rest(self.module)
        self.start.load_model(self.module)
        self.optimizer = self._make_optimizer()
        check_average(self.optimizer, self.start)
        self.scheduler = None if task.scheduler is None else task.scheduler(self.optimizer)
        in_groups = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = list(self.module.named_parameters())
        if foreign := len(in_groups - {id(p) for _, p in named}):
            raise TaskError(
                f"Task: the optimizer was given {foreign} parameters that are not the model's, so no other "
                "process would know them; make them part of the module that model() returns."
            )
        self.trained = {name: p for name, p in named if id(p) in in_groups and p.requires_grad}
        """Parameters that the optimizer updates, by name."""
        self.untrained = {name: p for name, p in named if name not in self.trained}
        """All others: frozen, or not given to the optimizer."""
        if not self.trained:
            raise TaskError(
                "Task: the optimizer was given no parameter of the model that needs a gradient; "
                "pass it the parameters that `optimizer` receives."
            )
        if task.skip_loss_below is not None and isinstance(self.optimizer, torch.optim.LBFGS):
            raise SpecError(
                "Task: skip_loss_below leaves parts of a batch out by their loss, which LBFGS evaluates several "
                "times per step; use another optimizer."
            )
        self.loss_parts = LossParts(task.metrics)
        """What its loss is told with."""
        self.precision = self._make_precision(precision)
        """In which numbers it computes."""
        self.recomputes = recompute
        """Whether blocks of the model are computed again in the backward pass."""
        if recompute and not recompute_blocks(self.module):
            raise SpecError(
                f"recompute: the model ({type(self.module).__name__}) has no repeated blocks (several of a kind "
                "in a Sequential or ModuleList) to compute twice; leave recompute out."
            )

    def _make_precision(self, kind: str) -> Precision:
        if kind in SCALED and isinstance(self.optimizer, torch.optim.LBFGS):
            raise SpecError(
                f"Job: precision={kind} may skip a step, but LBFGS evaluates the loss several times in each; use "
                "bf16, or another optimizer."
            )
        layers, saved = layers_of(self.module, self.trained), self.start.facts.get("precision")
        return Precision(kind, device=self.device, layers=layers, saved=saved)

    def _make_module(self, sample: Callable[[], Any] | None) -> nn.Module:
        module = self.task.model()
        if not isinstance(module, nn.Module):
            raise TaskError(
                f"Task: model() must make an nn.Module, found {type(module).__name__}; "
                "write for instance model=lambda: nn.Linear(4, 2)."
            )
        module = under_own_names(module)
        if saved := members_of(self.start.model or {}):
            module = Ensemble([module, *(under_own_names(self.task.model()) for _ in saved[1:])])
        if self.numerics == "float64":
            module.double()
        if any(is_lazy(p) for p in module.parameters()) and sample is not None:
            self._materialise(module, sample())
        if not any(True for _ in module.parameters()):
            raise TaskError(
                f"Task: the model ({type(module).__name__}) has no parameters, so there is nothing to train; "
                "check what model() returns."
            )
        if self.form.memory_format == "channels_last":
            lay_out_channels_last(module)
        if self.form.products == "onednn":
            multiply_by_onednn(module)
        if self.form.convolutions == "patches":
            use_patches(module, by_onednn=self.form.products == "onednn")
        return module if self.device == "cpu" else module.to(self.device)

    def _materialise(self, module: nn.Module, batch: Any) -> None:
        """Let lazy layers see a batch, so that they know their shapes; nothing else moves."""
        module.eval()
        with torch.no_grad():
            if self.task.objective is not None:
                self.task.objective(module, batch)
            else:
                call_model(module, batch[0])
        module.train()

    def made_anew(self, seed: int) -> dict[str, torch.Tensor]:
        """By name: the values that the trained parameters would have, had the task another seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            other = dict(self._make_module(self.sample).named_parameters())
        return {name: other[name].detach() for name in self.trained}

    def _make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = self.task.optimizer(list(self.module.parameters()))
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TaskError(
                f"Task: optimizer(params) must make a torch optimizer, found {type(optimizer).__name__}."
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise TaskError(
                "Task: SparseAdam needs sparse gradients, which Shoal turns into dense ones; use Adam instead."
            )
        prefer_fused(optimizer)
        return with_average(optimizer, self.task)

    def forget_whole(self, module: nn.Module) -> None:
        """The model has been cut: keep only this process's part of it, and of the whole its names and shapes."""
        self.module = module
        shapes = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            for p in (*self.trained.values(), *self.untrained.values())
        }
        for named in (self.trained, self.untrained):
            named.update({name: shapes[id(p)] for name, p in named.items()})
        for group in self.optimizer.param_groups:
            group["params"] = [shapes[id(p)] for p in group["params"]]

    def train_mode(self) -> None:
        """Ready for a training step."""
        if self.numerics == "float64":
            # Dropout off, whether a module or a function that asks `self.training`; BatchNorm as in training.
            self.module.eval()
            for module in self.module.modules():
                if normalises_by_batch(module):
                    module.train()
        else:
            self.module.train()

    def advance(self, loss: float) -> None:
        """One step is committed: move the learning rate on."""
        if self.scheduler is None:
            return
        # The scheduler looks for a wrapped step() to warn people who forgot it; ours may run elsewhere.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()

    def advance_over(self, losses: Iterable[float]) -> None:
        """The same for many steps, which others have taken."""
        if self.scheduler is not None:
            for loss in losses:
                self.advance(loss)

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


@dataclass(frozen=True)
class Arguments:
    """What somebody calls a model with."""

    positional: tuple[Any, ...]
    named: Mapping[str, Any]


def call_model(module: nn.Module, inputs: Any) -> Any:
    """Inputs may be a tensor, a tuple of arguments or a dict of named ones, or both."""
    try:
        if isinstance(inputs, Arguments):
            return module(*inputs.positional, **inputs.named)
        if isinstance(inputs, dict):
            return module(**inputs)
        if isinstance(inputs, (tuple, list)):
            return module(*inputs)
        return module(inputs)
    except NotImplementedError as error:
        if 'the required "forward" function' not in str(error):
            raise
        raise TaskError(
            f"Task: metrics and predictions need the model's output, but {type(module).__name__} has no forward; "
            "give it one that takes the inputs of a batch, or leave metrics= out."
        ) from None
